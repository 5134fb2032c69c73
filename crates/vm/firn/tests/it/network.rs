//! A VM with a network card whose frames pass through Firn, and a client outside.

use std::time::{Duration, SystemTime};

use crate::outside::Outside;
use crate::protect::{lose, protect, standby_called};
use crate::session::{eventually, kill, text};
use crate::vm::{Vm, writes};

const PATIENCE: Duration = Duration::from_secs(60);
/// How often a VM is killed. More by the environment.
const ROUNDS: &str = "FIRN_ROUNDS";
/// How often it is cut. Another interval by the environment.
const INTERVAL: &str = "FIRN_INTERVAL";

/// A guest with a card, in which a program counts the questions that it answers.
fn booted(outside: &Outside) -> Vm {
    let vm = Vm::one_of_hosts();
    let uplink = vm.session.path("uplink");
    outside.listen(&uplink);
    booted_in(vm, outside, &format!("firn,id=net,uplink={}", text(&uplink)))
}

/// Such a guest, with this back end.
pub fn booted_in(vm: Vm, outside: &Outside, netdev: &str) -> Vm {
    let card = ["-netdev", netdev, "-device", "virtio-net-pci,netdev=net,romfile="];
    let vm = vm.with(&card).booted_with(&[]);
    let mut control = vm.control();
    control.spawn_job("count", &["firn-guest", "net-dma", "count"]).unwrap();
    control.wait_output("count", "ready", PATIENCE).unwrap();
    outside.is_answered(20);
    vm
}

pub fn card(vm: &Vm, name: &str) -> serde_json::Value {
    vm.session.status(name)["network"][0].clone()
}

/// Ends a standby so that its primary cannot know whether it runs: one that its user stops reports that, and holds nothing back.
pub fn kill_standby(vm: &Vm, name: &str) {
    let status = vm.session.status(name);
    for process in ["guard_pid", "watcher_pid", "supervisor_pid", "pid"] {
        status[process].as_i64().into_iter().for_each(kill);
    }
}

pub fn some_time() -> Duration {
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap();
    Duration::from_millis(u64::from(now.subsec_micros()) % 300)
}

/// Protects a VM, kills it at some moment, and has its standby run.
fn fail_over(vm: &Vm, outside: &Outside, name: &str, standby: std::process::Child, next: &str) {
    let interval = std::env::var(INTERVAL).unwrap_or("100ms".to_owned());
    protect(vm, name, standby, &["--interval", &interval]);
    outside.delays_ms();
    outside.is_answered(200);
    eprintln!("{name}: {}, seen outside: {:?} ms", card(vm, name), outside.delays_ms());
    std::thread::sleep(some_time());
    lose(vm, name, next);
    vm.session.firn(&["failover", next]).succeeds();
    outside.is_answered(20);
}

/// A guest that counts is killed again and again. Whatever number the client outside has heard, the guest never counts on from a
/// lower one. And if what it sends were not held, it would.
#[test]
fn no_output_of_an_undone_epoch_leaves() {
    let outside = Outside::start();
    let mut vm = booted(&outside);
    eprintln!("not protected: {:?} ms", outside.delays_ms());
    let rounds: u32 = std::env::var(ROUNDS).map_or(2, |rounds| rounds.parse().unwrap());
    let mut name = "web".to_owned();
    for round in 0..rounds {
        let next = format!("twin{round}");
        // The last of them is to lead the round without holding.
        vm.session.arm((round == rounds - 1).then_some("net.hold=EIO"));
        let standby = standby_called(&vm, &next);
        vm.session.arm(None);
        let announced = outside.heard().announced;
        fail_over(&vm, &outside, &name, standby, &next);
        let heard = outside.heard();
        assert!(heard.undone.is_empty(), "round {round}: {:?}", heard.undone);
        assert!(heard.announced > announced, "round {round}");
        name = next;
    }
    vm.is_well();
    let elsewhere = vm.session.path("elsewhere");
    outside.listen(&elsewhere);
    let uplink = format!("net={}", text(&elsewhere));
    let address = format!("unix:{}", text(&vm.session.path("standby")));
    let standby = ["standby", "last", "--listen", &address, "--uplink", &uplink];
    let standby = crate::hypervisor_dies::start(&vm, &standby);
    eventually("the standby listens", PATIENCE, || vm.session.path("standby").exists());
    fail_over(&vm, &outside, &name, standby, "last");
    assert_eq!(card(&vm, "last")["uplink"], text(&elsewhere));
    let undone = outside.heard().undone.clone();
    eprintln!("not held: {undone:?}");
    assert!(!undone.is_empty(), "nothing was held, and nothing was undone");
}

/// Who may be running elsewhere says nothing until somebody decides that it is the one.
#[test]
fn buffered_output_leaves_by_the_release_command() {
    let outside = Outside::start();
    let vm = booted(&outside);
    // A standby's QEMU takes the name of this socket.
    let mut control = vm.control();
    let session = &vm.session;
    let supervisor = || session.status("web")["supervisor_pid"].as_i64().unwrap();
    kill(supervisor());
    outside.is_answered(20);
    assert_eq!(card(&vm, "web")["open"], true);
    session.firn(&["release", "web"]).fails(2, "not being protected");

    protect(&vm, "web", standby_called(&vm, "released"), &[]);
    outside.is_answered(20);
    assert_eq!(card(&vm, "web")["open"], false);
    session.firn(&["release", "web"]).succeeds();
    outside.is_answered(20);
    session.firn(&["failover", "released"]).fails(5, "has released it");
    session.firn(&["stop", "released"]).succeeds();

    protect(&vm, "web", standby_called(&vm, "lost"), &[]);
    kill_standby(&vm, "lost");
    eventually("the end", PATIENCE, || session.status("web")["state"] == "running");
    outside.hears_nothing();
    assert!(card(&vm, "web")["held_frames"].as_u64().unwrap() > 0);
    let last = session.status("web")["last"]["text"].to_string();
    assert!(last.contains("firn release"), "{last}");
    let address = format!("unix:{}", text(&session.path("standby")));
    // The former name of --continue-unprotected.
    let again = ["protect", "web", "--to", &address, "--go-on-alone"];
    session.firn(&again).fails(5, "its backup may run this VM");
    outside.hears_nothing();
    kill(supervisor());
    eventually("a successor", PATIENCE, || session.status("web")["recoveries"] == 2);
    outside.hears_nothing();
    session.firn(&["release", "web"]).succeeds();
    outside.is_answered(20);

    protect(&vm, "web", standby_called(&vm, "other"), &[]);
    kill(supervisor());
    eventually("a successor", PATIENCE, || session.status("web")["state"] == "running");
    outside.hears_nothing();
    session.firn(&["release", "web"]).succeeds();
    outside.is_answered(20);
    session.firn(&["stop", "other"]).succeeds();

    protect(&vm, "web", standby_called(&vm, "alone"), &["--continue-unprotected"]);
    session.firn(&["stop", "alone"]).succeeds();
    outside.is_answered(20);
    eventually("the end", PATIENCE, || session.status("web")["state"] == "running");
    writes(&mut control);
    assert!(outside.heard().undone.is_empty());

    session.firn(&["suspend", "web", "-o", "web.firn"]).succeeds();
    session.firn(&["restore", "web.firn"]).succeeds();
    outside.is_answered(20);
}

/// A VM whose standby may run is not heard either when it is saved and goes on elsewhere, until somebody says so.
#[test]
fn buffered_output_stays_buffered_after_a_restore() {
    let outside = Outside::start();
    let vm = booted(&outside);
    let session = &vm.session;
    protect(&vm, "web", standby_called(&vm, "twin"), &[]);
    kill_standby(&vm, "twin");
    eventually("the end", PATIENCE, || session.status("web")["state"] == "running");
    session.firn(&["checkpoint", "web", "-o", "running.firn"]).succeeds();
    session.firn(&["suspend", "web", "-o", "web.firn"]).succeeds();
    for image in ["web.firn", "running.firn"] {
        session.firn(&["restore", image, "--name", "web", "--mode", "eager", "--wait"]).succeeds();
        assert_eq!(card(&vm, "web")["open"], false, "{image}");
        outside.hears_nothing();
        let last = session.status("web")["last"]["text"].to_string();
        assert!(last.contains("firn release"), "{last}");
        kill(session.status("web")["supervisor_pid"].as_i64().unwrap());
        eventually("a successor", PATIENCE, || session.status("web")["recoveries"] == 1);
        outside.hears_nothing();
        session.firn(&["release", "web"]).succeeds();
        outside.is_answered(20);
        session.firn(&["checkpoint", "web", "-o", "released.firn"]).succeeds();
        session.firn(&["stop", "web"]).succeeds();
        session.firn(&["restore", "released.firn", "--name", "web"]).succeeds();
        outside.is_answered(20);
        session.firn(&["stop", "web"]).succeeds();
        std::fs::remove_file(vm.image("released.firn")).unwrap();
    }
}

#[test]
fn an_uplink_that_is_not_there_is_an_error() {
    let vm = Vm::new();
    let run = ["run", "web", "--", "qemu-system-x86_64", "-netdev"];
    let uplink = "firn,id=net,uplink=nowhere";
    vm.session.firn(&[&run[..], &[uplink]].concat()).fails(2, "connecting net to");
    vm.session.firn(&[&run[..], &["firn,id=net"]].concat()).fails(2, "uplink=PATH");
    assert_eq!(vm.session.ls(), []);
}
