//! Cards that are not Firn's own: while a VM is protected, filters of QEMU hold back what it sends.

use std::path::Path;
use std::time::Duration;

use firn_vmm::QemuVm;
use rustix::process::Signal;
use serde_json::{Value, json};

use crate::attached_disks::OwnQemu;
use crate::faults::points;
use crate::network::{booted_in, card, kill_standby, some_time};
use crate::outside::Outside;
use crate::own_qemu::resources_of;
use crate::parts::part_of;
use crate::protect::{protect, standby_called};
use crate::session::{eventually, kill, signal, text};
use crate::vm::{Vm, writes};

mod tap;

const PATIENCE: Duration = Duration::from_secs(60);
/// How often a VM is killed. More by the environment.
const ROUNDS: &str = "FIRN_ROUNDS";

/// A guest that counts the questions that it answers, with a back end of QEMU's own, and a monitor for the test.
fn booted(outside: &Outside) -> (Vm, QemuVm) {
    let vm = Vm::one_of_hosts();
    let (uplink, monitor) = (vm.session.path("uplink"), vm.session.path("monitor"));
    outside.listen(&uplink);
    let qmp = format!("unix:{},server=on,wait=off", text(&monitor));
    let vm = booted_in(vm.with(&["-qmp", &qmp]), outside, &stream_to(&uplink));
    // A standby's QEMU takes the name of this socket.
    let monitor = QemuVm::connect(&monitor).unwrap();
    (vm, monitor)
}

/// A back end that speaks to a socket.
fn stream_to(uplink: &Path) -> String {
    format!("stream,id=net,server=off,addr.type=unix,addr.path={}", text(uplink))
}

/// Objects, character devices, jobs, block nodes and network of a QEMU.
pub fn graph(qemu: &mut QemuVm) -> Value {
    let qmp = qemu.qmp();
    let sorted = |mut list: Value| {
        list.as_array_mut().unwrap().sort_by_key(Value::to_string);
        list
    };
    let objects = qmp.execute("qom-list", json!({ "path": "/objects" })).unwrap();
    let chardevs: Vec<Value> = qmp.query("query-chardev").unwrap();
    // Who is connected changes.
    let chardevs: Vec<&Value> = chardevs.iter().map(|device| &device["label"]).collect();
    json!({
        "objects": sorted(objects),
        "chardevs": sorted(json!(chardevs)),
        "jobs": qmp.execute("query-jobs", Value::Null).unwrap(),
        "nodes": sorted(qmp.execute("query-named-block-nodes", Value::Null).unwrap()),
        "network": qmp.execute_hmp("info network").unwrap(),
    })
}

/// Ends the supervisor of a VM, its guards and its hypervisor at once, as if its host were lost.
fn lose_all(vm: &Vm, name: &str, standby: &str) {
    kill_standby(vm, name);
    let has_ended = || vm.session.status(standby)["standby"]["ended"].is_string();
    eventually("the end", PATIENCE, has_ended);
}

fn supervisor(vm: &Vm, name: &str) -> i64 {
    vm.session.status(name)["supervisor_pid"].as_i64().unwrap()
}

/// An answer waits for the epoch in which it was given: while the standby acknowledges none, nothing is heard.
#[test]
fn output_waits_for_the_standby() {
    let outside = Outside::start();
    let (vm, mut monitor) = booted(&outside);
    let before = graph(&mut monitor);
    outside.delays_ms();
    outside.is_answered(100);
    let (unprotected, _) = outside.delays_ms();
    let printed = {
        let standby = standby_called(&vm, "twin");
        let address = format!("unix:{}", text(&vm.session.path("standby")));
        let printed = vm.session.firn(&["protect", "web", "--to", &address]).succeeds().out;
        crate::hypervisor_dies::answer(standby).succeeds();
        printed
    };
    assert!(!printed.contains("not buffered"), "{printed}");
    outside.is_answered(50);
    outside.delays_ms();
    outside.is_answered(100);
    let (protected, _) = outside.delays_ms();
    eprintln!("not protected: {unprotected} ms, protected: {protected} ms; {}", card(&vm, "web"));
    assert!(protected > 50.0 && protected > unprotected, "an epoch of 100 ms");
    assert_eq!(
        (card(&vm, "web")["filtered"].clone(), card(&vm, "web")["open"].clone()),
        (true.into(), false.into())
    );
    for _ in 0..2 {
        let standby = supervisor(&vm, "twin");
        signal(standby, Signal::STOP);
        // What was acknowledged before may still be under way.
        std::thread::sleep(Duration::from_millis(300));
        let heard = outside.heard().answers;
        std::thread::sleep(Duration::from_millis(1000));
        let now = outside.heard().answers;
        signal(standby, Signal::CONT);
        assert_eq!(now, heard, "no epoch was committed");
        outside.is_answered(50);
    }
    vm.session.firn(&["release", "web"]).succeeds();
    assert_eq!(graph(&mut monitor), before);
    assert!(vm.session.status("web")["network"].is_null());
    assert!(files_of_filters(&vm).is_empty());
    outside.is_answered(100);
    assert!(outside.heard().undone.is_empty());
}

fn files_of_filters(vm: &Vm) -> Vec<String> {
    let files = std::fs::read_dir(vm.session.runtime_dir().join("web")).unwrap();
    let names = files.map(|file| file.unwrap().file_name().into_string().unwrap());
    names.filter(|name| name.starts_with("card")).collect()
}

/// A guest that counts is lost with its host again and again. Whatever number the client has heard, the guest never counts on from a
/// lower one. And if what it sends were not held, it would.
#[test]
fn no_output_of_an_undone_epoch_leaves() {
    let outside = Outside::start();
    let (mut vm, _monitor) = booted(&outside);
    let rounds: u32 = std::env::var(ROUNDS).map_or(2, |rounds| rounds.parse().unwrap());
    let mut name = "web".to_owned();
    for round in 0..=rounds {
        let next = format!("twin{round}");
        // The last of them is to lead the last round without holding.
        vm.session.arm((round + 1 == rounds).then_some("net.hold=EIO"));
        let standby = standby_called(&vm, &next);
        vm.session.arm(None);
        protect(&vm, &name, standby, &[]);
        outside.is_answered(200);
        std::thread::sleep(some_time());
        lose_all(&vm, &name, &next);
        vm.session.firn(&["failover", &next]).succeeds();
        outside.is_answered(20);
        let undone = outside.heard().undone.clone();
        eprintln!("round {round}: heard up to {}, undone: {undone:?}", outside.heard().newest);
        match round == rounds {
            false => assert!(undone.is_empty(), "round {round}: {undone:?}"),
            true => assert!(!undone.is_empty(), "nothing was held, and nothing was undone"),
        }
        name = next;
    }
    vm.is_well();
}

/// A VM of a user's own QEMU is attached, protected and released: its QEMU has what it had, no more and no less.
#[test]
fn release_leaves_a_users_own_qemu_as_it_was() {
    let outside = Outside::start();
    let vm = Vm::one_of_hosts();
    let uplink = vm.session.path("uplink");
    outside.listen(&uplink);
    let netdev = stream_to(&uplink);
    let vm = vm.with(&["-netdev", &netdev, "-device", "virtio-net-pci,netdev=net,romfile="]);
    let qemu = OwnQemu::guest(&vm);
    let mut control = vm.control();
    qemu.attach(&vm.session);
    control.spawn_job("count", &["firn-guest", "net-dma", "count"]).unwrap();
    control.wait_output("count", "ready", PATIENCE).unwrap();
    outside.is_answered(20);
    let mut monitor = qemu.monitor();
    let resources = || {
        let mut resources = resources_of(qemu.child.id());
        resources.remove("threads");
        resources
    };
    let (before, had) = (graph(&mut monitor), resources());
    // A standby's QEMU takes the name of this socket, and removes the name when it ends.
    let (path, kept) = (qemu.dir.join("qmp"), qemu.dir.join("kept"));
    std::fs::hard_link(&path, &kept).unwrap();
    let name_again = || {
        let _ = std::fs::remove_file(&path);
        std::fs::hard_link(&kept, &path).unwrap();
    };
    for round in 0..2 {
        let twin = format!("twin{round}");
        protect(&vm, "web", standby_called(&vm, &twin), &[]);
        name_again();
        outside.is_answered(50);
        assert_ne!(graph(&mut monitor), before);
        vm.session.firn(&["release", "web"]).succeeds();
        assert_eq!(graph(&mut monitor), before, "round {round}");
        eventually("descriptors", PATIENCE, || resources() == had);
        vm.session.firn(&["stop", &twin]).succeeds();
        name_again();
        outside.is_answered(50);
    }
    vm.session.firn(&["detach", "web"]).succeeds();
    outside.is_answered(50);
    assert!(outside.heard().undone.is_empty());
}

/// A supervisor that dies takes nothing of the VM's network with it for good, and lets nothing out.
#[test]
fn filters_outlive_their_supervisor() {
    let outside = Outside::start();
    let (vm, mut monitor) = booted(&outside);
    let before = graph(&mut monitor);
    let session = &vm.session;
    protect(&vm, "web", standby_called(&vm, "twin"), &[]);
    outside.is_answered(20);
    kill(supervisor(&vm, "web"));
    eventually("a successor", PATIENCE, || session.status("web")["state"] == "running");
    outside.hears_nothing();
    assert_eq!(card(&vm, "web")["open"], false);
    session.firn(&["checkpoint", "web", "-o", "no.firn"]).fails(5, "output is blocked");
    // Without a supervisor the VM would have no network, and `firn release` could not open it.
    session.firn(&["detach", "web"]).fails(5, "would have no network");
    let pid = supervisor(&vm, "web");
    signal(pid, Signal::TERM);
    std::thread::sleep(Duration::from_millis(500));
    assert_eq!(supervisor(&vm, "web"), pid, "SIGTERM is ignored");
    kill(supervisor(&vm, "web"));
    eventually("a successor", PATIENCE, || session.status("web")["recoveries"] == 2);
    outside.hears_nothing();
    session.firn(&["release", "web"]).succeeds();
    assert_eq!(graph(&mut monitor), before);
    outside.is_answered(50);
    session.firn(&["stop", "twin"]).succeeds();
    session.firn(&["checkpoint", "web", "-o", "yes.firn"]).succeeds();

    // The standby is lost, and the user knows that it is.
    protect(&vm, "web", standby_called(&vm, "alone"), &["--continue-unprotected"]);
    kill_standby(&vm, "alone");
    outside.is_answered(20);
    eventually("the end", PATIENCE, || session.status("web")["state"] == "running");
    eventually("the filters are removed", PATIENCE, || graph(&mut monitor) == before);

    // A program that removes a filter ends the protection.
    protect(&vm, "web", standby_called(&vm, "third"), &[]);
    monitor.qmp().execute("object-del", json!({ "id": "firn-card0-captured" })).unwrap();
    eventually("the end", PATIENCE, || session.status("web")["state"] == "running");
    let last = session.status("web")["last"]["text"].to_string();
    assert!(last.contains("firn-card0-captured"), "{last}");
    session.firn(&["release", "web"]).succeeds();
    assert_eq!(graph(&mut monitor), before);
    outside.is_answered(20);
}

/// Wherever the supervisor dies while it adds or removes filters: afterwards QEMU has none, and the VM its network.
#[test]
fn killed_while_filters_are_added_or_removed() {
    let outside = Outside::start();
    let mut vm = Vm::one_of_hosts();
    let (uplink, path) = (vm.session.path("uplink"), vm.session.path("monitor"));
    outside.listen(&uplink);
    let qmp = format!("unix:{},server=on,wait=off", text(&path));
    vm = booted_in(vm.with(&["-qmp", &qmp]), &outside, &stream_to(&uplink));
    vm.session.firn(&["suspend", "web", "-o", "web.firn"]).succeeds();
    for point in part_of(points(&["filter."])) {
        vm.session.arm(Some(point));
        vm.session.firn(&["restore", "web.firn", "--mode", "eager", "--wait"]).succeeds();
        vm.session.arm(None);
        outside.is_answered(20);
        let mut control = vm.control();
        let mut monitor = QemuVm::connect(&path).unwrap();
        let before = graph(&mut monitor);
        let mut standby = standby_called(&vm, "twin");
        let address = format!("unix:{}", text(&vm.session.path("standby")));
        let protected = vm.session.firn(&["protect", "web", "--to", &address]);
        if protected.code == 0 {
            outside.is_answered(20);
            vm.session.firn(&["release", "web"]).fails(8, "the supervisor died");
        } else {
            protected.fails(8, "the supervisor died");
        }
        eventually("a successor", PATIENCE, || vm.session.status("web")["state"] == "running");
        if card(&vm, "web")["open"] == false {
            outside.hears_nothing();
            vm.session.firn(&["release", "web"]).succeeds();
        }
        eventually(point, PATIENCE, || graph(&mut monitor) == before);
        assert!(files_of_filters(&vm).is_empty(), "{point}");
        outside.is_answered(20);
        let written = writes(&mut control);
        eventually("writers go on", PATIENCE, || writes(&mut control) > written);
        // A standby that no primary has introduced itself to ends.
        drop(std::os::unix::net::UnixStream::connect(vm.session.path("standby")));
        eventually("the standby knows", PATIENCE, || standby.try_wait().unwrap().is_some());
        vm.session.firn(&["stop", "twin"]);
        vm.session.firn(&["stop", "web"]).succeeds();
    }
}
