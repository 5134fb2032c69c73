//! A VM that is protected by a standby: its hypervisor is killed, and it goes on there.

use std::os::unix::net::UnixStream;
use std::process::Child;
use std::time::Duration;

use crate::faults::points;
use crate::hypervisor_dies::{answer, start};
use crate::session::{eventually, kill, text};
use crate::vm::{Vm, userfaultfds, writes};

const PATIENCE: Duration = Duration::from_secs(60);

/// Where the standby `twin` listens.
fn address(vm: &Vm) -> String {
    format!("unix:{}", text(&vm.session.path("standby")))
}

/// Starts a standby, which returns when a primary has connected.
fn standby(vm: &Vm) -> Child {
    let standby = start(vm, &["standby", "twin", "--listen", &address(vm)]);
    eventually("the standby listens", PATIENCE, || vm.session.path("standby").exists());
    standby
}

fn protected(vm: &Vm, how: &[&str]) {
    let standby = standby(vm);
    let address = address(vm);
    vm.session.firn(&[&["protect", "web", "--to", &address], how].concat()).succeeds();
    answer(standby).succeeds();
}

fn committed(vm: &Vm) -> u64 {
    vm.session.status("twin")["standby"]["committed"].as_u64().unwrap()
}

fn a_killed_vm_goes_on(how: &[&str]) {
    let vm = Vm::boot();
    protected(&vm, how);
    eventually("epochs", PATIENCE, || committed(&vm) >= 10);
    let status = vm.session.status("web");
    eprintln!("{how:?}: {}", status["protection"]);
    assert_eq!(status["state"], "protected");
    assert!(status["protection"]["downtime_ms"]["p50"].as_f64().unwrap() > 0.0);
    kill(vm.pid());
    eventually("the end", PATIENCE, || vm.session.status("twin")["standby"]["ended"].is_string());
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
fn a_vm_whose_hypervisor_is_killed_goes_on_at_its_standby() {
    a_killed_vm_goes_on(&["--interval", "100ms"]);
}

#[test]
fn also_without_prediction() {
    a_killed_vm_goes_on(&["--interval", "50ms", "--no-prediction"]);
}

#[test]
fn what_a_protected_vm_refuses_and_how_it_is_released() {
    let vm = Vm::boot();
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
    let vm = Vm::boot();
    protected(&vm, &[]);
    vm.session.firn(&["stop", "twin"]).succeeds();
    eventually("the end", PATIENCE, || vm.session.status("web")["state"] == "running");
    let last = vm.session.status("web")["last"]["text"].to_string();
    assert!(last.contains("not protected any more"), "{last}");
    assert_eq!(userfaultfds(vm.pid()), 0);
}

#[test]
fn a_protected_vm_can_be_stopped() {
    let vm = Vm::boot();
    protected(&vm, &[]);
    vm.session.firn(&["stop", "web"]).succeeds();
    vm.session.firn(&["stop", "twin"]).succeeds();
    assert_eq!(vm.session.ls(), []);
}

/// Wherever the supervisor dies, also in a pause: the guest goes on and is well, and nothing of Firn is left in it.
#[test]
fn a_supervisor_that_dies_leaves_the_vm_running() {
    let mut vm = Vm::boot();
    vm.session.firn(&["suspend", "web", "-o", "web.firn"]).succeeds();
    for point in points(&["protect."]) {
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
    let vm = Vm::boot();
    protected(&vm, &[]);
    kill(vm.session.status("twin")["supervisor_pid"].as_i64().unwrap());
    eventually("it is gone", PATIENCE, || vm.session.ls().len() == 1);
    eventually("the end", PATIENCE, || vm.session.status("web")["state"] == "running");
}

#[test]
fn a_vm_that_writes_to_a_disk_is_refused() {
    let vm = Vm::boot_with_disks();
    let mut standby = standby(&vm);
    vm.session.firn(&["protect", "web", "--to", &address(&vm)]).fails(5, "its disk disk0");
    vm.is_well();
    // Whoever connects there now is no primary: the standby is over.
    drop(UnixStream::connect(vm.session.path("standby")).unwrap());
    eventually("the standby's end", PATIENCE, || standby.try_wait().unwrap().is_some());
}
