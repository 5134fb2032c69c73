//! The pause of a VM without disks: QEMU begins and ends it by itself, and waits for Firn in between.

use std::time::Duration;

use firn_memory::{Process, process_memory};
use firn_types::HostVirt;

use crate::hypervisor_dies::{Stop, answer, qemu_killed_in_a_save, start};
use crate::session::{eventually, text};
use crate::storage::Events;
use crate::vm::Vm;

const PATIENCE: Duration = Duration::from_secs(60);
/// Between the time that QEMU notes and the one that Firn measures.
const CLOCKS_MS: f64 = 0.5;
/// Points that are passed while QEMU waits.
const HELD: [&str; 3] = ["save.stopped", "save.device-state", "save.reprotected"];

fn base() -> Vm {
    let vm = Vm::resumed();
    vm.session.firn(&["checkpoint", "web", "-o", "base.firn"]).succeeds();
    vm.session.firn(&["stop", "web"]).succeeds();
    vm
}

#[test]
fn firn_killed_while_qemu_waits() {
    let mut vm = base();
    for point in HELD {
        vm.session.arm(Some(point));
        vm.session.firn(&["restore", "base.firn", "--mode", "eager", "--wait"]).succeeds();
        vm.session.arm(None);
        vm.session.firn(&["checkpoint", "web", "-o", "new.firn"]).fails(8, "aborted");
        assert_eq!(vm.session.status("web")["recoveries"], 1, "{point}");
        assert_eq!(vm.session.status("web")["state"], "running", "{point}");
        vm.is_well();
        assert_eq!(vm.session.files("new.firn"), Vec::<String>::new(), "{point}");
        vm.session.firn(&["checkpoint", "web", "-o", "after.firn", "--strategy", "cow"]).succeeds();
        vm.session.firn(&["stop", "web"]).succeeds();
    }
}

#[test]
fn qemu_killed_while_it_waits() {
    let mut vm = base();
    HELD.iter().for_each(|point| qemu_killed_in_a_save(&mut vm, point, &[]));
}

/// A thread of QEMU that writes after memory is fixed and before devices are saved would make the two disagree.
#[test]
fn a_device_write_in_the_pause_fails_the_save() {
    let mut vm = base();
    let stop = Stop::arm(&mut vm, "save.reprotected@2");
    vm.session.firn(&["restore", "base.firn", "--mode", "eager", "--wait"]).succeeds();
    vm.session.arm(None);
    // The page has contents, and this save drops its mapping: to read it is a fault of its own.
    write_one_byte(vm.pid());
    vm.session.firn(&["checkpoint", "web", "-o", "first.firn", "--strategy", "trace"]).succeeds();
    let mut saving = start(&vm, &["checkpoint", "web", "-o", "new.firn"]);
    assert!(stop.is_reached(&mut saving));
    write_one_byte(vm.pid());
    stop.go_on();
    answer(saving).fails(1, "a device wrote to the guest's memory while the VM was paused");
    assert_eq!(vm.session.files("new.firn"), Vec::<String>::new());
    assert_eq!(vm.session.files(".new.firn"), Vec::<String>::new());
    vm.is_well();
    vm.session.firn(&["checkpoint", "web", "-o", "after.firn"]).succeeds();
}

/// Each pause that QEMU made is in the report, those before the cut too; no pause was longer than is reported.
#[test]
fn pauses_of_pre_copy_rounds_are_reported() {
    let vm = Vm::new();
    let monitor = vm.session.path("events");
    let monitor_arg = format!("unix:{},server=on,wait=off", text(&monitor));
    let vm = vm.with(&["-qmp", &monitor_arg]).with_disks_past_the_page_cache();
    let mut events = Events::connect(&monitor);
    assert!(events.pauses_ms().is_empty());
    let save = ["checkpoint", "web", "-o", "web.firn", "--strategy", "pre-copy"];
    let saved = vm.session.json(&save);
    let report = &saved["report"];
    let of_rounds = report["round_pauses_ms"].as_array().unwrap();
    assert!(!of_rounds.is_empty(), "{report}");
    let cut = &report["pause"]["downtime_ms"];
    let reported: Vec<f64> =
        of_rounds.iter().chain([cut]).map(|pause| pause.as_f64().unwrap()).collect();
    let made = events.pauses_ms();
    eprintln!("reported {reported:?}, made {made:?}");
    assert_eq!(made.len(), reported.len(), "{made:?} {reported:?}");
    for (made, reported) in made.iter().zip(&reported) {
        assert!(*made <= reported + CLOCKS_MS, "{made} ms, but {reported} ms are reported");
    }
    let sum: f64 = reported[..of_rounds.len()].iter().sum();
    assert!((report["drained_ms"].as_f64().unwrap() - sum).abs() < 0.01, "{report}");
    let out = vm.session.firn(&save).succeeds().out;
    let made = events.pauses_ms().len();
    assert!(out.contains(&format!(", {} before it of up to ", made - 1)), "{made}: {out}");
    vm.is_well();
}

/// The byte stays what it is. Firn sees it all the same, and lets it pass.
fn write_one_byte(pid: i64) {
    let process = Process::open(pid as i32).unwrap();
    let (at, mut byte) = (ram(pid), [0]);
    process_memory::read_memory(&process, at, &mut byte).unwrap();
    let write = std::thread::spawn(move || process_memory::write_memory(&process, at, &byte));
    eventually("the byte", PATIENCE, || write.is_finished());
    write.join().unwrap().unwrap();
}

/// Somewhere in the guest's RAM, which is QEMU's largest mapping of a file.
pub fn ram(pid: i64) -> HostVirt {
    let maps = std::fs::read_to_string(format!("/proc/{pid}/maps")).unwrap();
    let range = |line: &str| {
        let (start, end) = line.split_whitespace().next()?.split_once('-')?;
        let number = |hex: &str| u64::from_str_radix(hex, 16).ok();
        line.contains("rw-s").then_some((number(start)?, number(end)?))
    };
    let (start, end) =
        maps.lines().filter_map(range).max_by_key(|(start, end)| end - start).unwrap();
    HostVirt(start + (end - start) / 2)
}
