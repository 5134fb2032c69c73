use std::collections::BTreeMap;
use std::time::Duration;

use proptest::prelude::*;

use super::*;
use crate::cut::GlobalCheckpoint;
use crate::{Epoch, Generation, Host, RequestNumber, Vm};

const S: Duration = Duration::from_secs(1);
const TERMS: Terms = Terms { ttl: Duration::from_secs(3), drift_ppm_max: 100 };

fn places() -> BTreeMap<Vm, Place> {
    let place = |primary| Place { primary: Host(primary), backup: Some(Host(2)) };
    BTreeMap::from([(Vm(0), place(0)), (Vm(1), place(1))])
}

fn hosts(hosts: &[u16]) -> std::collections::BTreeSet<Host> {
    hosts.iter().copied().map(Host).collect()
}

fn controller(alive: &[u16]) -> Controller {
    Controller::new(Register::new(places()), hosts(alive))
}

fn proposed(controller: &mut Controller) -> Register {
    let Next::Propose(register) = controller.next() else { panic!("{:?}", controller.next()) };
    controller.learned(&register);
    register
}

fn checkpoint(register: &Register) -> GlobalCheckpoint {
    GlobalCheckpoint {
        number: register.checkpoint.number + 1,
        generation: register.generation,
        layout: register.layout,
        request: RequestNumber::default(),
        marks: register.places.keys().map(|&vm| (vm, Epoch(9))).collect(),
    }
}

#[test]
fn a_failure_takes_every_vm_to_its_backup_once_the_old_primaries_are_fenced() {
    let mut controller = controller(&[1, 2]);
    let register = proposed(&mut controller);
    assert_eq!(register.generation, Generation(1));
    assert_eq!(register.primaries(), hosts(&[2]));
    assert!(register.places.values().all(|place| place.backup == Some(Host(1))));
    assert_eq!(register.fence, hosts(&[0, 1]));
    let register = proposed(&mut controller);
    assert_eq!(register.fence, hosts(&[1]), "the lease of 0 is over");
    controller.stopped(Host(1), Generation(0));
    assert_eq!(controller.next(), Next::Wait, "that was about another timeline");
    controller.stopped(Host(1), Generation(1));
    assert!(proposed(&mut controller).fence.is_empty());
    assert_eq!(controller.next(), Next::Wait);
}

#[test]
fn a_lost_backup_is_replaced_without_going_back() {
    let mut controller = controller(&[0, 1, 3]);
    let register = proposed(&mut controller);
    assert_eq!((register.generation, register.layout), (Generation(0), 1));
    assert!(register.places.values().all(|place| place.backup == Some(Host(3))));
    assert!(!register.is_protected());
    controller.leases(hosts(&[1, 3]));
    assert_eq!(controller.next(), Next::Lost(Vm(0)), "the new backup has no copies yet");
    let protected = register.with_checkpoint(&checkpoint(&register)).unwrap();
    controller.learned(&protected);
    assert_eq!(proposed(&mut controller).primaries(), hosts(&[3]));
}

#[test]
fn a_primary_never_becomes_a_backup() {
    let mut controller = controller(&[0, 1]);
    let register = proposed(&mut controller);
    assert!(register.places.values().all(|place| place.backup.is_none()));
    assert_eq!(controller.next(), Next::Wait);
    controller.leases(hosts(&[0, 1, 4]));
    assert!(proposed(&mut controller).is_separate());
}

#[test]
fn a_failed_vm_takes_the_cluster_back() {
    let mut controller = controller(&[0, 1, 2]);
    controller.failed(Vm(0), Generation(9));
    assert_eq!(controller.next(), Next::Wait, "of another timeline");
    controller.failed(Vm(0), Generation(0));
    assert_eq!(proposed(&mut controller).generation, Generation(1));
}

#[test]
fn a_planned_move_waits_for_a_checkpoint_of_everything() {
    let mut controller = controller(&[0, 1, 2]);
    controller.move_over();
    (0..2).for_each(|vm| controller.drained(Vm(vm), Epoch(9), Generation(0)));
    assert_eq!(controller.next(), Next::Wait);
    let register = Register::new(places());
    controller.learned(&register.with_checkpoint(&checkpoint(&register)).unwrap());
    assert_eq!(proposed(&mut controller).generation, Generation(1));
    assert!(!controller.is_moving());
}

#[test]
fn a_checkpoint_of_another_timeline_or_layout_is_not_recorded() {
    let register = Register::new(places());
    let good = checkpoint(&register);
    assert!(register.with_checkpoint(&good).is_some());
    let refused = |checkpoint| register.with_checkpoint(&checkpoint).is_none();
    assert!(refused(GlobalCheckpoint { generation: Generation(1), ..good.clone() }));
    assert!(refused(GlobalCheckpoint { layout: 1, ..good.clone() }));
    assert!(refused(GlobalCheckpoint { number: 2, ..good.clone() }));
    assert!(refused(GlobalCheckpoint { marks: BTreeMap::new(), ..good }));
}

#[test]
fn a_host_that_was_stopped_and_wakes_sends_nothing() {
    let mut guard = Guard::new(Host(0), TERMS);
    assert!(matches!(guard.granted(S, &Register::new(places()))[..], [Action::Run { .. }]));
    assert!(guard.may_send(2 * S) && guard.may_send(3 * S));
    assert!(!guard.may_send(4 * S));
}

#[test]
fn a_host_obeys_the_register_that_comes_with_its_lease() {
    let mut guard = Guard::new(Host(0), TERMS);
    let old = Register::new(places());
    guard.granted(S, &old);
    let new = controller(&[1, 2]).clone();
    let Next::Propose(new) = new.next() else { panic!() };
    let stopped = [Action::Stop(Generation(0)), Action::Stopped(Generation(1))];
    assert_eq!(guard.granted(2 * S, &new), stopped);
    assert!(!guard.may_send(2 * S));
    assert_eq!(guard.granted(2 * S, &old), [], "an older answer comes late");
    assert_eq!(guard.runs(), None);
}

#[test]
fn a_cluster_that_has_ended_leaves_its_timeline_behind() {
    let mut guard = Guard::new(Host(0), TERMS);
    let first = Register::new(places());
    guard.granted(S, &first);
    let ended = first.ended();
    assert!(ended.is_ended() && ended.is_protected());
    assert_eq!(ended.fence, hosts(&[0, 1]));
    let mut controller = Controller::new(ended.clone(), hosts(&[0]));
    assert_eq!(proposed(&mut controller).fence, hosts(&[0]), "1 can't send any more");
    let again = ended.again(places());
    assert_eq!((again.generation, again.version), (Generation(2), 2));
    assert_eq!(again.fence, hosts(&[0, 1]), "who ran before may still send");
    assert_eq!(guard.learned(&again)[0], Action::Stop(Generation(0)));
    assert_eq!(guard.learned(&first), [], "an older answer comes late");
    assert_eq!(guard.runs(), None);
    let mut controller = Controller::new(again, hosts(&[2]));
    let next = proposed(&mut controller);
    assert_eq!((next.generation, next.fence.len()), (Generation(2), 0));
}

#[test]
fn a_vm_of_its_own_has_the_backup_that_has_its_copy() {
    let place = |backup| BTreeMap::from([(Vm(0), Place { primary: Host(0), backup })]);
    let alone = Register::new(place(None));
    let lost = Controller::new(alone.clone(), hosts(&[1]));
    assert_eq!(lost.next(), Next::Lost(Vm(0)), "1 has nothing");
    let backed = alone.backed_by(Some(Host(1)));
    assert!(backed.is_protected() && backed.generation == alone.generation);
    let next = proposed(&mut Controller::new(backed.clone(), hosts(&[1])));
    assert_eq!((next.primaries(), next.fence.clone()), (hosts(&[1]), hosts(&[0])));
    assert!(!next.is_protected(), "a second failure now would lose it");
    let taken_up = backed.taken_up(Host(0), Host(7));
    assert_eq!(
        taken_up.places,
        BTreeMap::from([(Vm(0), Place { primary: Host(7), backup: None })])
    );
    assert_eq!(Controller::new(taken_up, hosts(&[1])).next(), Next::Lost(Vm(0)));
    assert!(!backed.backed_by(None).is_protected());
}

#[test]
fn who_ran_a_cluster_that_has_ended_may_run_the_next_when_its_lease_is_over() {
    let place = BTreeMap::from([(Vm(0), Place { primary: Host(0), backup: None })]);
    let again = Register::new(place.clone()).ended().again(place);
    assert_eq!(Controller::new(again.clone(), hosts(&[0])).next(), Next::Wait);
    let next = proposed(&mut Controller::new(again, hosts(&[])));
    assert!(next.fence.is_empty());
    let mut guard = Guard::new(Host(0), TERMS);
    guard.granted(S, &next);
    assert!(guard.may_send(2 * S));
}

#[test]
fn who_finds_no_register_stops() {
    let mut guard = Guard::new(Host(0), TERMS);
    assert_eq!(guard.unknown(), None);
    guard.granted(S, &Register::new(places()));
    assert_eq!(guard.may_send_until().map(|(generation, _)| generation), Some(Generation(0)));
    assert_eq!(guard.unknown(), Some(Action::Stop(Generation(0))));
    assert!(!guard.may_send(2 * S) && guard.may_send_until().is_none());
}

#[test]
fn nobody_runs_while_somebody_is_fenced() {
    let mut controller = controller(&[2]);
    let mut guard = Guard::new(Host(2), TERMS);
    assert_eq!(guard.learned(&proposed(&mut controller)), []);
    let run = guard.learned(&proposed(&mut controller));
    assert!(matches!(run[..], [Action::Run { generation: Generation(1), .. }]));
}

proptest! {
    /// However two clocks differ and however late answers are, the holder's lease ends first.
    #[test]
    fn a_lease_is_never_over_while_it_is_held(
        holder_ppm in -100..=100_i64, granter_ppm in -100..=100_i64,
        holder_ahead_ms in 0..100_000_u64, granter_ahead_ms in 0..100_000_u64,
        under_way_us in 0..5_000_000_u64, later_us in 0..10_000_000_u64,
    ) {
        let clock = |ppm: i64, ahead_ms: u64, true_us: u64| {
            let micros = (true_us as i64 + true_us as i64 * ppm / 1_000_000) as u64;
            Duration::from_millis(ahead_ms) + Duration::from_micros(micros)
        };
        let holder = |us| clock(holder_ppm, holder_ahead_ms, us);
        let granter = |us| clock(granter_ppm, granter_ahead_ms, us);
        let mut lease = Lease::new(TERMS);
        let mut grants = Grants::taken_over(TERMS, [], granter(0));
        grants.grant(Host(0), granter(under_way_us));
        lease.granted(holder(0));
        let over = grants.not_over(granter(later_us)).is_empty();
        prop_assert!(!(over && lease.is_held(holder(later_us))));
    }
}
