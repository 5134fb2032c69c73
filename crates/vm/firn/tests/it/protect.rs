//! A VM that is protected by a standby: its hypervisor is killed, and it goes on there.

use std::os::unix::net::{UnixListener, UnixStream};
use std::process::Child;
use std::time::Duration;

use rustix::process::Signal;

use crate::faults::points;
use crate::hypervisor_dies::{Stop, answer, start};
use crate::parts::part_of;
use crate::session::{eventually, kill, signal, text};
use crate::vm::{Vm, userfaultfds, writes};

const PATIENCE: Duration = Duration::from_secs(60);

/// Where the standby `twin` listens.
fn address(vm: &Vm) -> String {
    format!("unix:{}", text(&vm.session.path("standby")))
}

/// Starts a standby, which returns when a primary has connected.
fn standby(vm: &Vm) -> Child {
    standby_called(vm, "twin")
}

pub fn standby_called(vm: &Vm, name: &str) -> Child {
    let standby = start(vm, &["standby", name, "--listen", &address(vm)]);
    eventually("the standby listens", PATIENCE, || vm.session.path("standby").exists());
    standby
}

fn protected(vm: &Vm, how: &[&str]) {
    let standby = standby(vm);
    protect(vm, "web", standby, how);
}

/// Protects a VM by a standby that listens.
pub fn protect(vm: &Vm, name: &str, standby: Child, how: &[&str]) {
    let address = address(vm);
    vm.session.firn(&[&["protect", name, "--to", &address], how].concat()).succeeds();
    answer(standby).succeeds();
}

fn committed(vm: &Vm) -> u64 {
    committed_of(vm, "twin")
}

pub fn committed_of(vm: &Vm, name: &str) -> u64 {
    vm.session.status(name)["standby"]["committed"].as_u64().unwrap()
}

/// Kills the hypervisor of a VM, and waits until its standby has noticed.
pub fn lose(vm: &Vm, name: &str, standby: &str) {
    kill(vm.session.status(name)["pid"].as_i64().unwrap());
    let has_ended = || vm.session.status(standby)["standby"]["ended"].is_string();
    eventually("the end", PATIENCE, has_ended);
}

fn a_killed_vm_goes_on(how: &[&str]) {
    let vm = Vm::resumed();
    protected(&vm, how);
    eventually("epochs", PATIENCE, || committed(&vm) >= 10);
    let status = vm.session.status("web");
    eprintln!("{how:?}: {}", status["protection"]);
    assert_eq!(status["state"], "protected");
    assert!(status["protection"]["downtime_ms"]["p50"].as_f64().unwrap() > 0.0);
    lose(&vm, "web", "twin");
    let newest = committed(&vm);
    let run = vm.session.json(&["failover", "twin"]);
    eprintln!("failover: {run}");
    assert_eq!(run["epoch"], newest);
    vm.is_well();
    assert_eq!(vm.session.status("twin")["state"], "running");
    vm.session.firn(&["checkpoint", "twin", "-o", "twin.firn"]).succeeds();
    vm.is_well();
}

#[test]
fn a_vm_whose_hypervisor_is_killed_continues_at_its_standby() {
    a_killed_vm_goes_on(&["--interval", "100ms"]);
}

#[test]
fn also_without_prediction() {
    a_killed_vm_goes_on(&["--interval", "50ms", "--no-prediction"]);
}

#[test]
fn a_protected_vm_refuses_other_operations_until_its_release() {
    let vm = Vm::resumed();
    let session = &vm.session;
    session.firn(&["release", "web"]).fails(2, "not being protected");
    session.firn(&["failover", "web"]).fails(2, "no standby");
    protected(&vm, &[]);
    session.firn(&["protect", "web", "--to", &address(&vm)]).fails(4, "being protected");
    session.firn(&["checkpoint", "web", "-o", "web.firn"]).fails(4, "being protected");
    session.firn(&["checkpoint", "twin", "-o", "twin.firn"]).fails(4, "standby");
    session.firn(&["release", "web"]).succeeds();
    assert_eq!(session.status("web")["state"], "running");
    assert_eq!(userfaultfds(vm.pid()), 0);
    session.firn(&["checkpoint", "web", "-o", "web.firn"]).succeeds();
    session.firn(&["stop", "twin"]).succeeds();
    session.firn(&["stop", "web"]).succeeds();
    assert_eq!(session.ls(), []);
}

#[test]
fn a_standby_that_goes_leaves_the_vm_running() {
    let vm = Vm::resumed();
    protected(&vm, &[]);
    vm.session.firn(&["stop", "twin"]).succeeds();
    eventually("the end", PATIENCE, || vm.session.status("web")["state"] == "running");
    let last = vm.session.status("web")["last"]["text"].to_string();
    assert!(last.contains("not protected any more"), "{last}");
    assert!(last.contains("its user stopped the standby"), "{last}");
    assert_eq!(userfaultfds(vm.pid()), 0);
}

/// Pages that were protected and copied while it ran may have been written since: nobody knows. Nor could the standby take the state of a
/// device that it does not have.
#[test]
fn an_unsupported_device_added_later_ends_protection() {
    let vm = Vm::new();
    let monitor = vm.session.path("monitor");
    let disk = vm.session.path("late.raw");
    std::fs::write(&disk, vec![0; 1 << 20]).unwrap();
    let qmp = format!("unix:{},server=on,wait=off", text(&monitor));
    let slot = ["-device", "pcie-root-port,id=hotslot,chassis=1"];
    let vm = vm.with(&["-qmp", &qmp]).with(&slot).booted_with(&[]);
    // The standby's QEMU takes the names of these sockets.
    let mut user = firn_vmm::QemuVm::connect(&monitor).unwrap();
    let mut control = vm.control();
    protected(&vm, &[]);
    let add = |user: &mut firn_vmm::QemuVm, name: &str, direct: bool| {
        let disk = serde_json::json!({ "driver": "file", "node-name": name, "filename": text(&disk),
            "read-only": true, "cache": { "direct": direct } });
        user.qmp().execute("blockdev-add", disk).unwrap();
    };
    add(&mut user, "cached", false);
    let before = committed(&vm);
    eventually("epochs go on", PATIENCE, || committed(&vm) > before + 5);
    add(&mut user, "direct", true);
    eventually("the end", PATIENCE, || vm.session.status("web")["state"] == "running");
    let last = vm.session.status("web")["last"]["text"].to_string();
    assert!(last.contains("past the page cache"), "{last}");
    assert_eq!(userfaultfds(vm.pid()), 0);
    let end = ended(&vm, "twin");
    assert_eq!(end["how"], "unprotected", "the VM runs on: {end}");
    vm.session.firn(&["stop", "twin"]).succeeds();
    user.qmp().execute("blockdev-del", serde_json::json!({ "node-name": "direct" })).unwrap();
    vm.session.firn(&["release", "web"]);
    protected(&vm, &[]);
    let rng = serde_json::json!({ "driver": "virtio-rng-pci", "bus": "hotslot", "id": "late" });
    user.qmp().execute("device_add", rng).unwrap();
    eventually("the end", PATIENCE, || vm.session.status("web")["state"] == "running");
    let last = vm.session.status("web")["last"]["text"].to_string();
    assert!(last.contains("late (virtio-rng-pci) was added"), "{last}");
    assert_eq!(userfaultfds(vm.pid()), 0);
    let end = ended(&vm, "twin");
    assert_eq!(end["how"], "unprotected", "{end}");
    assert!(end["why"].to_string().contains("late (virtio-rng-pci)"), "{end}");
    vm.session.firn(&["stop", "twin"]).succeeds();
    let writes_before = writes(&mut control);
    eventually("writers go on", PATIENCE, || writes(&mut control) > writes_before);
    // A standby would lack it from the beginning.
    let mut standby = standby(&vm);
    let refused = vm.session.firn(&["protect", "web", "--to", &address(&vm)]);
    refused.fails(5, "late (virtio-rng-pci) was added while the VM ran");
    drop(UnixStream::connect(vm.session.path("standby")).unwrap());
    eventually("the standby's end", PATIENCE, || standby.try_wait().unwrap().is_some());
}

/// How a standby was informed that its primary ended.
fn ended(vm: &Vm, standby: &str) -> serde_json::Value {
    let standby = || vm.session.status(standby)["standby"].clone();
    eventually("the standby knows", PATIENCE, || standby()["ended"].is_string());
    standby()["end"].clone()
}

#[test]
fn a_protected_vm_can_be_stopped() {
    let vm = Vm::resumed();
    let session = &vm.session;
    protected(&vm, &[]);
    // Its guest ignores the button, and it stays protected.
    session.firn(&["stop", "web", "--powerdown=1"]).fails(8, "did not power down");
    assert_eq!(session.status("web")["state"], "protected");
    session.firn(&["stop", "web"]).succeeds();
    assert_eq!(ended(&vm, "twin"), serde_json::json!({ "how": "stopped" }));
    let listed = session.firn(&["ls"]).succeeds().out;
    assert!(listed.contains("standby, its VM stopped"), "{listed}");
    let output = session.firn(&["status", "twin"]).succeeds().out;
    assert!(output.contains("`firn stop twin` removes this standby"), "{output}");
    let refused = session.firn(&["failover", "twin"]).fails(5, "the VM was not lost");
    assert!(refused.err.contains("--accept-stopped"), "{}", refused.err);
    // Who stopped it by mistake may have it back.
    let run = session.firn(&["failover", "twin", "--accept-stopped"]).succeeds().out;
    assert!(run.contains("this rests on your word"), "{run}");
    assert_eq!(session.status("twin")["state"], "running");
    session.firn(&["stop", "twin"]).succeeds();
    assert_eq!(session.ls(), []);
}

/// While epochs arrive the VM runs at its primary. One whose supervisor is frozen sends none.
#[test]
fn a_primary_that_runs_is_not_failed_over() {
    let vm = Vm::resumed();
    let session = &vm.session;
    protected(&vm, &[]);
    eventually("epochs", PATIENCE, || committed(&vm) >= 3);
    let refused = session.firn(&["failover", "twin"]).fails(5, "its primary runs");
    assert!(refused.err.contains("--accept-running"), "{}", refused.err);
    assert_eq!(session.status("web")["state"], "protected");
    let supervisor = session.status("web")["supervisor_pid"].as_i64().unwrap();
    signal(supervisor, Signal::STOP);
    session.firn(&["failover", "twin"]).succeeds();
    assert_eq!(session.status("twin")["state"], "running");
    vm.is_well();
    signal(supervisor, Signal::CONT);
    let is_protected = || session.status("web")["state"] == "protected";
    eventually("the primary knows", PATIENCE, || !is_protected());
}

/// A hypervisor that was asked to quit, as one whose guest shuts down, was not lost; one that was killed was.
#[test]
fn a_standby_learns_how_its_primary_ended() {
    let vm = Vm::new();
    let monitor = vm.session.path("monitor");
    let qmp = format!("unix:{},server=on,wait=off", text(&monitor));
    let vm = vm.with(&["-qmp", &qmp]).booted_with(&[]);
    // The standby's QEMU takes the names of these sockets.
    let mut user = firn_vmm::QemuVm::connect(&monitor).unwrap();
    protected(&vm, &[]);
    user.quit().unwrap();
    assert_eq!(ended(&vm, "twin"), serde_json::json!({ "how": "shut-down" }));
    vm.session.firn(&["failover", "twin"]).fails(5, "the guest shut down");
    eventually("the end", PATIENCE, || vm.session.status("web")["state"] == "ended");
    assert_eq!(vm.session.status("web")["protection_end"]["how"], "shut-down");
    vm.session.firn(&["failover", "twin", "--accept-stopped"]).succeeds();
    protect(&vm, "twin", standby_called(&vm, "twin2"), &[]);
    kill(vm.session.status("twin")["pid"].as_i64().unwrap());
    let end = ended(&vm, "twin2");
    assert_eq!(end["how"], "lost", "{end}");
    assert!(end["why"].to_string().contains("killed by signal 9"), "{end}");
    vm.session.firn(&["failover", "twin2"]).succeeds();
    vm.is_well();
}

/// Wherever the supervisor dies, also in a pause: the guest goes on and is well, and nothing of Firn is left in it.
#[test]
fn a_supervisor_that_dies_leaves_the_vm_running() {
    let mut vm = Vm::resumed();
    vm.session.firn(&["suspend", "web", "-o", "web.firn"]).succeeds();
    for point in part_of(points(&["protect."])) {
        vm.session.arm(Some(point));
        vm.session.firn(&["restore", "web.firn", "--mode", "eager", "--wait"]).succeeds();
        vm.session.arm(None);
        // The standby's QEMU has the same command line, and takes the name of this socket.
        let mut control = vm.control();
        let mut standby = standby(&vm);
        let protect = ["protect", "web", "--to", &address(&vm)];
        vm.session.firn(&protect).fails(8, "the supervisor died");
        eventually("a successor", PATIENCE, || vm.session.status("web")["state"] == "running");
        assert_eq!(userfaultfds(vm.pid()), 0, "{point}");
        let before = writes(&mut control);
        eventually("writers go on", PATIENCE, || writes(&mut control) > before);
        // It is over if nobody has introduced himself.
        drop(UnixStream::connect(vm.session.path("standby")));
        eventually("the standby knows", PATIENCE, || standby.try_wait().unwrap().is_some());
        vm.session.firn(&["stop", "twin"]);
        vm.session.firn(&["stop", "web"]).succeeds();
    }
}

/// A standby that dies is forgotten with its QEMU, and its primary runs on.
#[test]
fn a_standby_whose_supervisor_dies_is_gone() {
    let vm = Vm::resumed();
    protected(&vm, &[]);
    kill(vm.session.status("twin")["supervisor_pid"].as_i64().unwrap());
    eventually("it is gone", PATIENCE, || vm.session.ls().len() == 1);
    eventually("the end", PATIENCE, || vm.session.status("web")["state"] == "running");
}

/// A socket whose listener reads nothing: the error names the backup, and the VM runs.
#[test]
fn a_backup_that_reads_nothing_is_named() {
    let vm = Vm::boot();
    let listener = UnixListener::bind(vm.session.path("standby")).unwrap();
    let refused = vm
        .session
        .firn(&["protect", "web", "--to", &address(&vm)])
        .fails(1, &format!("backup at {}", address(&vm)));
    assert!(!refused.err.contains("Resource temporarily"), "{}", refused.err);
    drop(listener);
    assert_eq!(vm.session.status("web")["state"], "running");
    assert_eq!(userfaultfds(vm.pid()), 0);
    vm.is_well();
}

/// Before a primary has connected there is no VM, and nobody waits for one.
#[test]
fn a_waiting_standby_is_listed_and_can_be_stopped() {
    let vm = Vm::new();
    let standby = standby(&vm);
    assert_eq!(vm.session.status("twin")["state"], "starting");
    vm.session.firn(&["failover", "twin"]).fails(4, "waits for its primary");
    vm.session.firn(&["stop", "twin"]).succeeds();
    assert_eq!(vm.session.ls(), []);
    answer(standby).fails(8, "it was stopped");
    assert!(!vm.session.path("standby").exists());
}

/// Its name is free as soon as that is said, and who has it then keeps it, however long the first one takes to end.
#[test]
fn a_standby_that_was_stopped_leaves_its_successor_alone() {
    let mut vm = Vm::new();
    let stop = Stop::arm(&mut vm, "standby.stopped");
    let mut first = standby(&vm);
    vm.session.arm(None);
    vm.session.firn(&["stop", "twin"]).succeeds();
    assert!(stop.is_reached(&mut first));
    let elsewhere = vm.session.path("elsewhere");
    let address = format!("unix:{}", text(&elsewhere));
    let second = start(&vm, &["standby", "twin", "--listen", &address]);
    eventually("the second listens", PATIENCE, || elsewhere.exists());
    stop.go_on();
    answer(first).fails(8, "it was stopped");
    assert_eq!(vm.session.status("twin")["state"], "starting");
    vm.session.firn(&["stop", "twin"]).succeeds();
    answer(second).fails(8, "it was stopped");
    assert_eq!(vm.session.ls(), []);
}

/// A QEMU that can't open a pipe of Firn's is stopped and started by commands. Whoever dies in between, it goes on.
#[test]
fn a_vm_paused_by_command_is_resumed_after_the_supervisor_dies() {
    if !rustix::process::geteuid().is_root() {
        return firn_skip::skip_test("only root can keep a QEMU from opening files");
    }
    let mut vm = Vm::new();
    let cell = vm.session.path("cell");
    std::fs::create_dir(&cell).unwrap();
    vm.session.arm(Some("protect.copied@2"));
    let vm = vm.with(&["-chroot", text(&cell)]).booted_with(&[]);
    let mut control = vm.control();
    let standby = standby(&vm);
    let protect = ["protect", "web", "--to", &address(&vm)];
    vm.session.firn(&protect).fails(8, "the supervisor died");
    drop(standby);
    eventually("a successor", PATIENCE, || vm.session.status("web")["recoveries"] == 1);
    eventually("it runs", PATIENCE, || vm.session.status("web")["state"] == "running");
    let last = vm.session.status("web")["last"]["text"].to_string();
    assert!(last.contains("the VM runs on"), "{last}");
    let before = writes(&mut control);
    eventually("writers go on", PATIENCE, || writes(&mut control) > before);
    let log = std::fs::read_to_string(vm.session.runtime_dir().join("web/log")).unwrap();
    assert!(log.contains("not protected any more, and is resumed"), "it was held: {log}");
}

/// A failover whose supervisor dies: once the VM's state is in place a successor runs it, before that it is said to be lost.
#[test]
fn a_failover_continues_after_its_supervisor_died() {
    let mut vm = Vm::resumed();
    let steps =
        [("failover.started", true), ("failover.running", true), ("failover.loaded", false)];
    let mut name = "web".to_owned();
    for (at, (point, goes_on)) in steps.into_iter().enumerate() {
        let next = format!("twin{at}");
        vm.session.arm(Some(point));
        let standby = standby_called(&vm, &next);
        vm.session.arm(None);
        protect(&vm, &name, standby, &[]);
        lose(&vm, &name, &next);
        let failover = vm.session.firn(&["failover", &next]);
        if goes_on {
            failover.succeeds();
            assert_eq!(vm.session.status(&next)["state"], "running", "{point}");
            assert_eq!(vm.session.status(&next)["recoveries"], 1, "{point}");
            vm.is_well();
        } else {
            failover.fails(8, "the VM can't be continued here");
            eventually("it is gone", PATIENCE, || {
                !vm.session.ls().iter().any(|(it, _)| *it == next)
            });
        }
        name = next;
    }
}

/// What its user has stopped stays stopped, whatever the epochs do, until its user says otherwise.
#[test]
fn a_vm_that_its_user_stops_stays_stopped() {
    let mut vm = Vm::new();
    let monitor = vm.session.path("monitor");
    let stop = Stop::arm(&mut vm, "protect.tracking");
    let qmp = format!("unix:{},server=on,wait=off", text(&monitor));
    let mut vm = vm.with(&["-qmp", &qmp]).booted_with(&[]);
    vm.session.arm(None);
    // The standby's QEMU takes the names of these sockets.
    let (mut user, mut control) = (firn_vmm::QemuVm::connect(&monitor).unwrap(), vm.control());
    let standby = standby(&vm);
    let mut protect = start(&vm, &["protect", "web", "--to", &address(&vm)]);
    assert!(stop.is_reached(&mut protect));
    user.stop().unwrap();
    stop.go_on();
    answer(protect).succeeds();
    answer(standby).succeeds();
    let before = committed(&vm);
    eventually("epochs go on", PATIENCE, || committed(&vm) > before + 3);
    assert_eq!(user.status().unwrap().status, "paused");
    user.cont().unwrap();
    let writes_before = writes(&mut control);
    eventually("writers go on", PATIENCE, || writes(&mut control) > writes_before);
    user.stop().unwrap();
    kill(vm.session.status("web")["supervisor_pid"].as_i64().unwrap());
    eventually("a successor", PATIENCE, || vm.session.status("web")["recoveries"] == 1);
    let last = vm.session.status("web")["last"]["text"].to_string();
    assert!(last.contains("stands still"), "{last}");
    assert_eq!(user.status().unwrap().status, "paused");
    user.cont().unwrap();
    let writes_before = writes(&mut control);
    eventually("writers go on", PATIENCE, || writes(&mut control) > writes_before);
}

/// What fails in the middle leaves the VM running, with nothing of Firn in it, and says so.
#[test]
fn a_protection_that_fails_to_begin_leaves_the_vm_running() {
    let mut vm = Vm::resumed();
    vm.session.firn(&["suspend", "web", "-o", "web.firn"]).succeeds();
    let faults = [
        ("protect.tracking=EIO", "can't be protected"),
        ("protect.start-thread=EIO", "can't be started"),
        ("protect.start-thread@2=EIO", "can't be started"),
    ];
    for (fault, why) in faults {
        vm.session.arm(Some(fault));
        vm.session.firn(&["restore", "web.firn", "--mode", "eager", "--wait"]).succeeds();
        vm.session.arm(None);
        let mut standby = standby(&vm);
        let protect = vm.session.firn(&["protect", "web", "--to", &address(&vm)]);
        assert!(protect.code != 0 && protect.err.contains(why), "{fault}: {}", protect.err);
        assert_eq!(userfaultfds(vm.pid()), 0, "{fault}");
        let status = vm.session.status("web");
        assert_eq!((&status["state"], &status["recoveries"]), (&"running".into(), &0.into()));
        assert!(status["last"]["text"].to_string().contains("not protected any more"), "{status}");
        vm.session.firn(&["stop", "twin"]);
        eventually("the standby's end", PATIENCE, || standby.try_wait().unwrap().is_some());
        vm.session.firn(&["stop", "web"]).succeeds();
    }
}
