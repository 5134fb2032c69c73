//! A guest switches itself off, and no host runs it again.

use std::time::{Duration, Instant};

use super::power_cut::Machines;
use super::{LEASE, PATIENCE, place};
use crate::session::{Session, eventually};
use crate::tiny_guest::TinyGuest;
use crate::vm::Vm;

/// Asserts for a while, in which a lost VM would be run again, that a host does not run it.
fn is_not_run(hosts: &[&Session], time: Duration) {
    let since = Instant::now();
    while since.elapsed() < time {
        for host in hosts {
            let vms = host.ls();
            assert!(vms.iter().all(|(_, state)| state == "standby" || state == "ended"), "{vms:?}");
        }
        std::thread::sleep(Duration::from_millis(100));
    }
}

fn a_guest_is_switched_off(its_host_dies: bool) {
    let _turn = Vm::one_of_hosts();
    let mut machines = Machines::start();
    let mut guest = TinyGuest::run(machines.session(0), &[]);
    machines.protect();
    guest.power_off();
    eventually("its backup knows", PATIENCE, || {
        let vms = machines.session(1).json(&["ls"]);
        vms.as_array().unwrap().iter().all(|vm| vm["standby"]["end"]["how"] == "shut-down")
    });
    if its_host_dies {
        machines.kill_agent(0);
    }
    let (b, c) = (machines.session(1), machines.session(2));
    is_not_run(&[b, c], 2 * LEASE);
    // Nor is a record of it left, or a standby.
    eventually("it is no cluster", PATIENCE, || place(c).is_null());
    eventually("no standby is left", PATIENCE, || b.ls().is_empty() && c.ls().is_empty());
    if !its_host_dies {
        let ended = machines.session(0).status("web");
        assert_eq!(
            (&ended["state"], &ended["protection_end"]["how"]),
            (&"ended".into(), &"shut-down".into())
        );
    }
}

#[test]
fn a_guest_that_switches_itself_off_is_run_by_no_host() {
    a_guest_is_switched_off(false);
}

/// Its host has no time to end the record: its backup, which has the lease next, does.
#[test]
fn nor_when_its_host_is_lost_at_once() {
    a_guest_is_switched_off(true);
}
