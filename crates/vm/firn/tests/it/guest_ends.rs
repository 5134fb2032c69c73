//! A guest that ends by itself while it is protected: what it wanted is not undone by a failover, and a panic is shown at
//! both ends.

use std::time::Duration;

use serde_json::{Value, json};

use crate::agent::{Agent, Network, configure, health};
use crate::protect::{committed_of, protect, standby_called};
use crate::session::{Session, eventually};
use crate::tiny_guest::TinyGuest;
use crate::vm::Vm;

const PATIENCE: Duration = Duration::from_secs(60);

/// Waits until a standby knows how its primary ended, and returns that.
fn primary_end(session: &Session, standby: &str) -> Value {
    let status = || session.status(standby)["standby"].clone();
    eventually("the standby knows", PATIENCE, || status()["ended"].is_string());
    status()["end"].clone()
}

fn protected(vm: &Vm, more: &[&str]) -> TinyGuest {
    let guest = TinyGuest::run(&vm.session, more);
    protect(vm, "web", standby_called(vm, "twin"), &[]);
    eventually("epochs", PATIENCE, || committed_of(vm, "twin") >= 3);
    guest
}

#[test]
fn a_guest_that_switches_itself_off_is_not_run_again() {
    let vm = Vm::new();
    let session = &vm.session;
    protected(&vm, &[]).power_off();
    assert_eq!(primary_end(session, "twin"), json!({ "how": "shut-down" }));
    eventually("the end", PATIENCE, || session.status("web")["state"] == "ended");
    assert_eq!(session.status("web")["protection_end"]["how"], "shut-down");
    let listed = session.firn(&["ls"]).succeeds().out;
    assert!(listed.contains("standby, its VM shut down"), "{listed}");
    let output = session.firn(&["status", "twin"]).succeeds().out;
    assert!(output.contains("`firn stop twin` removes this standby"), "{output}");
    session.firn(&["failover", "twin"]).fails(5, "the guest shut down");
    assert_eq!(session.status("twin")["state"], "standby");
    session.firn(&["stop", "twin"]).succeeds();
}

/// By agents: the standby goes, and nothing advises to run it.
#[test]
fn agents_leave_a_guest_off_that_switched_itself_off() {
    let (vm, b, network) = (Vm::one_of_hosts(), Session::new(), Network::new());
    let a = &vm.session;
    configure(&network, [a, &b]);
    let _agents = [Agent::start(&network, 0, a), Agent::start(&network, 1, &b)];
    let mut guest = TinyGuest::run(a, &[]);
    for session in [a, &b] {
        eventually("both are there", PATIENCE, || health(session) == "alive");
    }
    a.firn(&["protect", "web", "--backup", "b"]).succeeds();
    guest.power_off();
    eventually("it has ended", PATIENCE, || a.status("web")["state"] == "ended");
    eventually("the standby is gone", PATIENCE, || b.ls().is_empty());
    for session in [a, &b] {
        let output = session.firn(&["agent", "status"]).succeeds().out;
        assert!(!output.contains("failover"), "{output}");
    }
}

/// The hypervisor ends with its guest: that is no loss of the VM, for the standby has the panic or will have it, and no
/// wanted end.
#[test]
fn a_guest_that_panics_is_shown_at_both_ends() {
    let vm = Vm::new();
    let session = &vm.session;
    protected(&vm, &[]).panic();
    assert_eq!(primary_end(session, "twin"), json!({ "how": "panicked" }));
    eventually("the end", PATIENCE, || session.status("web")["state"] == "ended");
    assert_eq!(session.status("web")["protection_end"]["how"], "panicked");
    let listed = session.firn(&["ls"]).succeeds().out;
    assert!(listed.contains("standby, its VM panicked"), "{listed}");
    let run = session.firn(&["failover", "twin"]).succeeds().out;
    eprintln!("{run}");
    assert_eq!(session.status("twin")["state"], "running");
}

/// A hypervisor that stays with its guest: the VM stays protected, and says why it does nothing.
#[test]
fn a_guest_that_panics_and_stays_is_shown_as_trouble() {
    let vm = Vm::new();
    let session = &vm.session;
    protected(&vm, &["-action", "panic=pause"]).panic();
    let trouble = || session.status("web")["protection"]["trouble"].clone();
    eventually("the trouble", PATIENCE, || trouble() == "guest-panicked");
    let listed = session.firn(&["ls"]).succeeds().out;
    assert!(listed.contains("protected, guest panicked"), "{listed}");
    let output = session.firn(&["status", "web"]).succeeds().out;
    assert!(output.contains("guest panicked; its standby has the same trouble"), "{output}");
    let before = committed_of(&vm, "twin");
    eventually("epochs go on", PATIENCE, || committed_of(&vm, "twin") > before + 3);
    assert_eq!(session.status("web")["state"], "protected");
    assert!(session.status("twin")["standby"]["end"].is_null(), "nothing has ended");
}
