//! Firn killed with SIGKILL at every named point of a save and of a restore.
//!
//! What must hold each time: the guest goes on within moments and finds its memory as it left it, or the command says
//! what happened; a checkpoint is whole or not there; nothing is left lying about.

use std::process::Stdio;
use std::time::{Duration, Instant};

use firn_fault::POINTS;

use crate::parts::part_of;
use crate::session::{eventually, kill};
use crate::vm::Vm;

const PATIENCE: Duration = Duration::from_secs(60);

/// The first fault passes `save.fault` as well.
const TWICE: &str = "save.first-fault";

/// Points that are passed many times, in the middle. How often depends on what the guest touches before the background
/// does, so that one that is not reached proves nothing.
const LATER: &[&str] = &[
    "save.fault@30",
    "save.sweep@20",
    "image.write@10",
    "restore.fault@30",
    "restore.install@300",
    "restore.fill@3",
];

/// Only the restore of a clone passes it (see `fork`).
const OF_CLONES: &str = "restore.mapped";

pub fn points(beginnings: &[&str]) -> Vec<&'static str> {
    let wanted = |point: &&str| beginnings.iter().any(|beginning| point.starts_with(beginning));
    let all = POINTS.iter().chain(LATER).copied();
    all.filter(|point| wanted(point) && ![TWICE, OF_CLONES].contains(point)).collect()
}

/// A guest saved while it worked, to start each try from.
pub fn base() -> Vm {
    Vm::with_base(true)
}

/// Passed only where a disk is read past the page cache.
pub const DRAINED: &str = "pre-copy.drained";

/// The same, with such a disk.
pub fn base_past_the_page_cache() -> Vm {
    saved(Vm::boot_with_disks_past_the_page_cache())
}

/// Saves a VM as `base.firn`, and ends it.
pub fn saved(vm: Vm) -> Vm {
    vm.session.firn(&["checkpoint", "web", "-o", "base.firn"]).succeeds();
    vm.session.firn(&["stop", "web", "--discard"]).succeeds();
    vm
}

#[test]
fn killed_anywhere_in_a_save() {
    let mut vm = base();
    let mut untouched = Vec::new();
    for point in part_of(points(&["save.", "image."])) {
        if ["image.open", "image.read"].contains(&point) {
            continue;
        }
        vm.session.arm(Some(point));
        vm.session.firn(&["restore", "base.firn", "--mode", "eager", "--wait"]).succeeds();
        vm.session.arm(None);
        let saved = vm.session.firn(&["checkpoint", "web", "-o", "new.firn"]);
        let since = Instant::now();
        let status = vm.session.status("web");
        vm.control().run_program(&["true"]).unwrap();
        eprintln!("{point}: exit {}, guest answers after {:?}", saved.code, since.elapsed());
        if status["recoveries"] == 0 && !LATER.contains(&point) {
            untouched.push(point);
        }
        assert_eq!(status["state"], "running", "{point}");
        vm.is_well();
        match vm.session.files("new.firn").is_empty() {
            true => drop(saved.fails(8, "aborted")),
            false => {
                saved.succeeds();
                vm.session.firn(&["image", "verify", "new.firn"]).succeeds();
                std::fs::remove_file(vm.image("new.firn")).unwrap();
            }
        }
        assert_eq!(vm.session.files(".new.firn"), Vec::<String>::new(), "{point}");
        vm.session.firn(&["checkpoint", "web", "-o", "after.firn", "--strategy", "cow"]).succeeds();
        vm.session.firn(&["stop", "web"]).succeeds();
    }
    assert!(untouched.is_empty(), "never reached: {untouched:?}");
}

#[test]
fn killed_anywhere_in_a_restore() {
    let mut vm = base();
    let mut untouched = Vec::new();
    for point in part_of(points(&["restore.", "image.open", "image.read"])) {
        vm.session.arm(Some(point));
        let since = Instant::now();
        let restored = vm.session.command(&["restore", "base.firn", "--name", "web"]).output();
        let restored = crate::session::Answer::of(restored.unwrap());
        eprintln!("{point}: exit {} after {:?}", restored.code, since.elapsed());
        vm.session.arm(None);
        if restored.code == 0 {
            vm.is_well();
            vm.session.firn(&["status", "web", "--watch"]).succeeds();
            let status = vm.session.status("web");
            assert_eq!(status["state"], "running", "{point}");
            if status["recoveries"] == 0 && !LATER.contains(&point) {
                untouched.push(point);
            }
            vm.is_well();
            vm.session.firn(&["stop", "web"]).succeeds();
        } else {
            restored.fails(8, "nothing is left of it");
        }
        eventually("nothing left", PATIENCE, || vm.session.ls().is_empty());
    }
    assert!(untouched.is_empty(), "never reached: {untouched:?}");
}

/// Not at a named point but at any moment, and the guard with it: the next command brings the VM back.
#[test]
fn killed_together_with_its_guard_at_any_moment() {
    let vm = base();
    for delay_ms in part_of([0, 2, 5, 10, 20, 40, 80, 160]) {
        vm.session.firn(&["restore", "base.firn"]).succeeds();
        std::thread::sleep(Duration::from_millis(delay_ms));
        kill_both(&vm);
        assert_eq!(vm.session.ls().len(), 1);
        vm.is_well();
        vm.session.firn(&["status", "web", "--watch"]).succeeds();
        let mut saving = vm.session.command(&["checkpoint", "web", "-o", "new.firn"]);
        let saving = saving.stderr(Stdio::piped()).spawn().unwrap();
        std::thread::sleep(Duration::from_millis(delay_ms));
        kill_both(&vm);
        let saved = saving.wait_with_output().unwrap();
        vm.is_well();
        let code = saved.status.code();
        let is_whole = !vm.session.files("new.firn").is_empty();
        eprintln!("{delay_ms} ms: exit {code:?}, image there: {is_whole}");
        assert_eq!(code == Some(0), is_whole, "{}", String::from_utf8_lossy(&saved.stderr));
        if is_whole {
            vm.session.firn(&["image", "verify", "new.firn"]).succeeds();
            std::fs::remove_file(vm.image("new.firn")).unwrap();
        }
        assert_eq!(vm.session.files(".new.firn"), Vec::<String>::new());
        vm.session.firn(&["stop", "web"]).succeeds();
    }
}

fn kill_both(vm: &Vm) {
    let status = vm.session.status("web");
    for role in ["guard_pid", "watcher_pid", "supervisor_pid"] {
        if let Some(pid) = status[role].as_i64() {
            kill(pid);
        }
    }
}

#[test]
fn a_disk_that_is_full_or_broken() {
    let mut vm = base();
    for fault in part_of([
        "image.create=ENOSPC",
        "image.write=ENOSPC",
        "image.write@3=EIO",
        "image.index=ENOSPC",
        "image.footer=EIO",
        "image.sync=EIO",
        "image.rename=EIO",
    ]) {
        vm.session.arm(Some(fault));
        vm.session.firn(&["restore", "base.firn", "--wait"]).succeeds();
        vm.session.arm(None);
        let why = if fault.ends_with("EIO") { "Input/output error" } else { "No space left" };
        vm.session.firn(&["checkpoint", "web", "-o", "new.firn"]).fails(1, why);
        assert_eq!(vm.session.files("new.firn"), Vec::<String>::new(), "{fault}");
        assert_eq!(vm.session.files(".new.firn"), Vec::<String>::new(), "{fault}");
        assert_eq!(vm.session.status("web")["recoveries"], 0, "{fault}");
        vm.is_well();
        vm.session.firn(&["stop", "web"]).succeeds();
    }
}
