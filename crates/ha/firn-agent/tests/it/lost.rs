//! Hosts that are lost, and return.

use std::io::{Read, Write};
use std::thread;
use std::time::{Duration, Instant};

use firn_agent::DetectorTiming;
use firn_control::api::ProtectVmRequest;
use firn_control::{HostHealth, client};
use firn_supervisor::VmName;

use crate::host::{Authority, Host, LATE, PATIENCE, eventually, free_address, name, pair};
use crate::relay::Relay;

#[test]
fn a_host_that_goes_is_suspected_and_then_lost() {
    let [a, mut b] = pair();
    assert!(a.peer("b").round_trip_ms.unwrap() < 2000.0);
    b.kill();
    let since = Instant::now();
    eventually("suspected", || a.peer("b").health == HostHealth::Suspected);
    let suspected = since.elapsed();
    eventually("lost", || a.peer("b").health == HostHealth::Lost);
    eprintln!("suspected after {suspected:?}, lost after {:?}", since.elapsed());
    let peer = a.peer("b");
    assert!(peer.trouble.unwrap().contains("connecting to host b"));
    assert!(peer.heard_s.unwrap() >= 4.0);
    // It cannot have counted as lost before it was silent for so long.
    assert!(since.elapsed() > Duration::from_secs(4) && suspected > Duration::from_secs(1));
}

/// No process is notified that the network is dead: the streams end when the host counts as lost,
/// and work when it is back.
#[test]
fn a_host_behind_a_dead_network_is_lost_with_its_streams() {
    let authority = Authority::new();
    let [at_a, at_b] = [free_address(), free_address()];
    let [to_a, to_b] = [Relay::to(at_a), Relay::to(at_b)];
    let a = Host::start(&authority, "a", at_a, &[("b", to_b.address)], DetectorTiming::default());
    let b = Host::start(&authority, "b", at_b, &[("a", to_a.address)], DetectorTiming::default());
    for (host, peer) in [(&a, "b"), (&b, "a")] {
        eventually("there", || host.peer(peer).health == HostHealth::Alive);
    }
    a.protect("web", "b").unwrap();
    let (mut primary, mut standby) = (a.end(), b.end());
    primary.write_all(b"x").unwrap();
    standby.read_exact(&mut [0]).unwrap();
    for relay in [&to_a, &to_b] {
        relay.cut(true);
    }
    let since = Instant::now();
    for end in [&mut primary, &mut standby] {
        end.set_read_timeout(Some(PATIENCE)).unwrap();
        // An end or an error, but not a time-out.
        let read = end.read(&mut [0]);
        assert!(!matches!(&read, Ok(1..)), "{read:?}");
        assert!(since.elapsed() < PATIENCE, "{read:?}");
    }
    eprintln!("both ends know after {:?}", since.elapsed());
    assert!(since.elapsed() > Duration::from_secs(4), "it was not lost yet");
    assert_eq!(a.peer("b").health, HostHealth::Lost);
    for relay in [&to_a, &to_b] {
        relay.cut(false);
    }
    for (host, peer) in [(&a, "b"), (&b, "a")] {
        eventually("back", || host.peer(peer).health == HostHealth::Alive);
    }
    a.protect("web", "b").unwrap();
    let (mut primary, mut standby) = (a.end(), b.end());
    primary.write_all(b"y").unwrap();
    standby.read_exact(&mut [0]).unwrap();
}

/// A host that is lost before the VM's supervisor has connected: the protection ends as soon as it
/// begins.
#[test]
fn a_host_that_is_lost_while_a_stream_is_set_up_ends_it() {
    let authority = Authority::new();
    let [at_a, at_b] = [free_address(), free_address()];
    let [to_a, to_b] = [Relay::to(at_a), Relay::to(at_b)];
    let a = Host::start(&authority, "a", at_a, &[("b", to_b.address)], DetectorTiming::default());
    let b = Host::start(&authority, "b", at_b, &[("a", to_a.address)], DetectorTiming::default());
    eventually("there", || a.peer("b").health == HostHealth::Alive);
    let base = a.base.clone();
    let asked = thread::spawn(move || {
        let vm = VmName::new(LATE).unwrap();
        let wanted = ProtectVmRequest { vm, backup: name("b"), interval_ms: 100, predicts: true };
        client::protect_vm(&base, &wanted, &mut |_| ())
    });
    let _standby = b.end();
    eventually("it is asked", || a.has_a_late_one());
    for relay in [&to_a, &to_b] {
        relay.cut(true);
    }
    eventually("lost", || a.peer("b").health == HostHealth::Lost);
    a.let_late_ones_go();
    asked.join().unwrap().unwrap();
    let mut primary = a.end();
    primary.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
    let read = primary.read(&mut [0]);
    assert!(matches!(&read, Ok(0)), "it does not know that nobody hears it: {read:?}");
}
