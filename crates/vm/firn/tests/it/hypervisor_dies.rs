//! QEMU killed with SIGKILL, or standing still, at every named point of a save and of a restore.
//!
//! The thread of Firn that gets to the point waits there until the test has done its deed, so that nothing depends on
//! how fast anything is. What must hold each time: the command says once what happened, with the exit code for it; an
//! image is whole or not there; `firn ls` shows how the VM died; nobody panics; no process is left.

use std::path::PathBuf;
use std::process::{Child, Stdio};
use std::time::Duration;

use rustix::process::Signal;

use crate::faults::{DRAINED, base, base_past_the_page_cache, points};
use crate::parts::part_of;
use crate::session::{Answer, eventually, kill, signal};
use crate::vm::Vm;

const PATIENCE: Duration = Duration::from_secs(60);
/// How long a QEMU stands still: longer than it takes to find that out.
const STALL: Duration = Duration::from_millis(200);

/// Where a thread of Firn waits: it makes the file, and goes on when that is gone.
pub struct Stop(PathBuf);

impl Stop {
    /// Arms it for the supervisors that are started from now on.
    pub fn arm(vm: &mut Vm, point: &str) -> Self {
        Self::arm_all(vm, &[point])
    }

    /// The same, for several points. Each stops once: at its first pass, or as `POINT@PASS` says.
    pub fn arm_all(vm: &mut Vm, points: &[&str]) -> Self {
        let file = vm.session.path("stop");
        let armed = points.iter().map(|point| format!("{point}=WAIT:{}", file.display()));
        vm.session.arm(Some(&armed.collect::<Vec<_>>().join(",")));
        Self(file)
    }

    /// Whether it was reached before the command had ended.
    pub fn is_reached(&self, command: &mut Child) -> bool {
        let mut over = false;
        eventually("the point", PATIENCE, || {
            over = command.try_wait().unwrap().is_some();
            over || self.0.exists()
        });
        self.0.exists()
    }

    pub fn go_on(&self) {
        std::fs::remove_file(&self.0).unwrap();
    }
}

pub fn start(vm: &Vm, args: &[&str]) -> Child {
    vm.session.command(args).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
}

pub fn answer(command: Child) -> Answer {
    Answer::of(command.wait_with_output().unwrap())
}

/// The VM's QEMU, also of one that is only being started: it has to become QEMU first.
#[track_caller]
fn qemu(vm: &Vm) -> i64 {
    let mut found = None;
    eventually("QEMU", PATIENCE, || {
        found = find_qemu(vm);
        found.is_some()
    });
    found.unwrap()
}

fn find_qemu(vm: &Vm) -> Option<i64> {
    let socket = vm.session.runtime_dir().join("web/qmp.sock");
    let is_it = |line: &[u8]| {
        let line = String::from_utf8_lossy(line);
        line.contains("qemu-system") && line.contains(socket.to_str().unwrap())
    };
    with_command_line(&is_it).first().copied()
}

/// Processes of this session: supervisors and guards are told by their environment.
fn processes(vm: &Vm) -> Vec<i64> {
    let runtime = format!("FIRN_RUNTIME_DIR={}", vm.session.runtime_dir().display());
    let theirs = |pid: &i64| {
        let environment = std::fs::read(format!("/proc/{pid}/environ")).unwrap_or_default();
        environment.split(|&byte| byte == 0).any(|word| word == runtime.as_bytes())
    };
    with_command_line(&|line| !line.is_empty()).into_iter().filter(theirs).collect()
}

fn with_command_line(is_it: &dyn Fn(&[u8]) -> bool) -> Vec<i64> {
    let entries = std::fs::read_dir("/proc").unwrap();
    let pids = entries.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok());
    let line = |pid: i64| std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
    pids.filter(|pid| is_it(&line(*pid))).collect()
}

/// What is in the VM's log; empty if there is no such VM any more.
fn log(vm: &Vm) -> String {
    std::fs::read_to_string(vm.session.runtime_dir().join("web/log")).unwrap_or_default()
}

#[track_caller]
pub fn nobody_is_left(vm: &Vm, point: &str) {
    eventually(&format!("{point}: no process left"), PATIENCE, || processes(vm).is_empty());
}

/// The VM is shown with how it died, and its name can be freed.
#[track_caller]
fn is_shown_dead_and_goes(vm: &Vm, point: &str) {
    let ls = vm.session.firn(&["ls"]).succeeds().out;
    assert!(ls.contains("ended: killed by signal 9"), "{point}: {ls}");
    assert!(!log(vm).contains("panic"), "{point}: {}", log(vm));
    nobody_is_left(vm, point);
    vm.session.firn(&["rm", "web"]).succeeds();
    assert_eq!(vm.session.ls(), []);
}

/// The points of a save that one can wait at: those of reading an image are passed by restores.
fn save_points() -> impl Iterator<Item = &'static str> {
    let reading = ["image.open", "image.read"];
    points(&["save.", "image."]).into_iter().filter(move |point| !reading.contains(point))
}

#[test]
fn qemu_killed_anywhere_in_a_save() {
    let mut vm = base();
    for point in part_of(save_points()) {
        qemu_killed_in_a_save(&mut vm, point, &[]);
    }
}

#[test]
fn qemu_killed_anywhere_in_a_pre_copy() {
    let mut points = points(&["pre-copy.", "save.stopped", "save.resumed"]);
    points.sort_by_key(|&point| point == DRAINED);
    let mut vm = base();
    for point in part_of(points) {
        if point == DRAINED {
            vm = base_past_the_page_cache();
        }
        qemu_killed_in_a_save(&mut vm, point, &["--parent", "base.firn"]);
    }
}

pub fn qemu_killed_in_a_save(vm: &mut Vm, point: &str, how: &[&str]) {
    let stop = Stop::arm(vm, point);
    vm.session.firn(&["restore", "base.firn", "--mode", "eager", "--wait"]).succeeds();
    vm.session.arm(None);
    let mut saving = start(vm, &[&["checkpoint", "web", "-o", "new.firn"], how].concat());
    if !stop.is_reached(&mut saving) {
        assert!(point.contains('@'), "{point} was not reached");
        answer(saving).succeeds();
        vm.session.firn(&["stop", "web"]).succeeds();
        return;
    }
    kill(qemu(vm));
    stop.go_on();
    let saved = answer(saving);
    eprintln!("{point}: exit {}: {}", saved.code, saved.err.trim());
    is_whole_or_not_there(vm, saved, point);
    is_shown_dead_and_goes(vm, point);
}

/// Once all of the guest's memory is copied, an image may become whole without the VM.
#[track_caller]
fn is_whole_or_not_there(vm: &Vm, saved: Answer, point: &str) {
    assert_eq!(vm.session.files(".new.firn"), Vec::<String>::new(), "{point}");
    if vm.session.files("new.firn").is_empty() {
        saved.fails(8, "the VM ended while it was being saved (killed by signal 9)");
        return;
    }
    saved.succeeds();
    vm.session.firn(&["image", "verify", "new.firn"]).succeeds();
    std::fs::remove_file(vm.image("new.firn")).unwrap();
}

/// A save that hangs in its disk is not waited for when its VM has died, and leaves nothing either.
#[test]
fn qemu_killed_while_the_disk_hangs() {
    let mut vm = base();
    let _never_goes_on = Stop::arm(&mut vm, "image.sync");
    vm.session.firn(&["restore", "base.firn", "--mode", "eager", "--wait"]).succeeds();
    vm.session.arm(None);
    let mut saving = start(&vm, &["checkpoint", "web", "-o", "new.firn"]);
    assert!(_never_goes_on.is_reached(&mut saving));
    kill(qemu(&vm));
    answer(saving).fails(8, "the VM ended while it was being saved (killed by signal 9)");
    is_shown_dead_and_goes(&vm, "image.sync");
    assert_eq!(vm.session.files(".new.firn"), Vec::<String>::new());
    assert_eq!(vm.session.files("new.firn"), Vec::<String>::new());
}

#[test]
fn qemu_killed_anywhere_in_a_restore() {
    let mut vm = base();
    // There is none yet when its disks are made.
    let with_qemu = points(&["restore."]).into_iter().filter(|&point| point != "restore.drives");
    for point in part_of(with_qemu.chain(["image.read@20"])) {
        let stop = Stop::arm(&mut vm, point);
        // The command would read the name from the image, and wait there as well.
        let restore = ["restore", "base.firn", "--name", "web", "--wait"];
        let mut restoring = start(&vm, &restore);
        vm.session.arm(None);
        if !stop.is_reached(&mut restoring) {
            assert!(point.contains('@'), "{point} was not reached");
            answer(restoring).succeeds();
            vm.session.firn(&["stop", "web"]).succeeds();
            continue;
        }
        kill(qemu(&vm));
        stop.go_on();
        let restored = answer(restoring);
        eprintln!("{point}: exit {}: {}", restored.code, restored.err.trim());
        ended_in_a_restore(&vm, restored, point);
    }
}

/// Before its guest ran, nothing is left of the VM; after that, it is shown as one that died.
#[track_caller]
fn ended_in_a_restore(vm: &Vm, restored: Answer, point: &str) {
    if vm.session.ls().is_empty() {
        restored.fails(8, "(killed by signal 9)");
        nobody_is_left(vm, point);
        return;
    }
    // With all of its memory there, the VM has been restored; that it ends after that is another matter.
    match point {
        "restore.finished" if restored.code == 0 => {}
        // The command finds the VM gone, or receives its end while it waits for the memory.
        _ if restored.code == 3 => drop(restored.fails(3, "killed by signal 9")),
        _ => drop(restored.fails(8, "killed by signal 9")),
    }
    eventually("ended", PATIENCE, || vm.session.status("web")["state"] == "ended");
    is_shown_dead_and_goes(vm, point);
}

/// QEMU stands still for a while, and answers neither Firn nor its guest: everything waits, and goes on.
#[test]
fn qemu_standing_still_in_a_save() {
    let mut vm = base();
    for point in
        ["save.journaled", "save.registered", "save.rounds", "save.stopped", "save.tracing"]
    {
        let stop = Stop::arm(&mut vm, point);
        vm.session.firn(&["restore", "base.firn", "--mode", "eager", "--wait"]).succeeds();
        vm.session.arm(None);
        let args = ["checkpoint", "web", "-o", "new.firn", "--reference", "new.ram"];
        let mut saving = start(&vm, &args);
        assert!(stop.is_reached(&mut saving), "{point}");
        stall(&vm, &stop);
        answer(saving).succeeds();
        vm.session.firn(&["image", "compare", "new.firn", "new.ram"]).succeeds();
        vm.is_well();
        vm.session.firn(&["stop", "web"]).succeeds();
    }
}

#[test]
fn qemu_standing_still_in_a_restore() {
    let mut vm = base();
    for point in ["restore.spawned", "restore.registered", "restore.device-state", "restore.fault"]
    {
        let stop = Stop::arm(&mut vm, point);
        let mut restoring = start(&vm, &["restore", "base.firn", "--name", "web", "--wait"]);
        vm.session.arm(None);
        assert!(stop.is_reached(&mut restoring), "{point}");
        stall(&vm, &stop);
        answer(restoring).succeeds();
        vm.is_well();
        vm.session.firn(&["stop", "web"]).succeeds();
    }
}

fn stall(vm: &Vm, stop: &Stop) {
    let qemu = qemu(vm);
    signal(qemu, Signal::STOP);
    stop.go_on();
    std::thread::sleep(STALL);
    signal(qemu, Signal::CONT);
}
