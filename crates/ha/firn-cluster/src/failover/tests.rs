use std::collections::BTreeMap;
use std::time::Duration;

use proptest::prelude::*;

use super::*;
use crate::cut::GlobalCheckpoint;
use crate::{Epoch, Generation, HostId, RequestNumber, VmId};

const S: Duration = Duration::from_secs(1);
const TERMS: LeaseTerms = LeaseTerms { ttl: Duration::from_secs(3), drift_ppm_max: 100 };

fn placements() -> BTreeMap<VmId, VmPlacement> {
    let placement = |primary| VmPlacement { primary: HostId(primary), backup: Some(HostId(2)) };
    BTreeMap::from([(VmId(0), placement(0)), (VmId(1), placement(1))])
}

fn hosts(hosts: &[u16]) -> std::collections::BTreeSet<HostId> {
    hosts.iter().copied().map(HostId).collect()
}

fn controller(alive: &[u16]) -> FailoverController {
    FailoverController::new(FailoverRecord::new(placements()), hosts(alive))
}

fn proposed(controller: &mut FailoverController) -> FailoverRecord {
    let ControllerDecision::Propose(register) = controller.next_decision() else {
        panic!("{:?}", controller.next_decision())
    };
    controller.learn_record(&register);
    register
}

fn checkpoint(register: &FailoverRecord) -> GlobalCheckpoint {
    GlobalCheckpoint {
        number: register.checkpoint.number + 1,
        generation: register.generation,
        layout: register.layout,
        request: RequestNumber::default(),
        marks: register.placements.keys().map(|&vm| (vm, Epoch(9))).collect(),
    }
}

#[test]
fn a_failure_takes_every_vm_to_its_backup_once_the_old_primaries_are_fenced() {
    let mut controller = controller(&[1, 2]);
    let register = proposed(&mut controller);
    assert_eq!(register.generation, Generation(1));
    assert_eq!(register.primaries(), hosts(&[2]));
    assert!(register.placements.values().all(|placement| placement.backup == Some(HostId(1))));
    assert_eq!(register.fence, hosts(&[0, 1]));
    let register = proposed(&mut controller);
    assert_eq!(register.fence, hosts(&[1]), "the lease of 0 is over");
    controller.record_stopped(HostId(1), Generation(0));
    assert_eq!(
        controller.next_decision(),
        ControllerDecision::Wait,
        "that was about another timeline"
    );
    controller.record_stopped(HostId(1), Generation(1));
    assert!(proposed(&mut controller).fence.is_empty());
    assert_eq!(controller.next_decision(), ControllerDecision::Wait);
}

#[test]
fn a_lost_backup_is_replaced_without_going_back() {
    let mut controller = controller(&[0, 1, 3]);
    let register = proposed(&mut controller);
    assert_eq!((register.generation, register.layout), (Generation(0), 1));
    assert!(register.placements.values().all(|placement| placement.backup == Some(HostId(3))));
    assert!(!register.is_protected());
    controller.set_lease_holders(hosts(&[1, 3]));
    assert_eq!(
        controller.next_decision(),
        ControllerDecision::Lost(VmId(0)),
        "the new backup has no copies yet"
    );
    let protected = register.with_checkpoint(&checkpoint(&register)).unwrap();
    controller.learn_record(&protected);
    assert_eq!(proposed(&mut controller).primaries(), hosts(&[3]));
}

#[test]
fn a_primary_never_becomes_a_backup() {
    let mut controller = controller(&[0, 1]);
    let register = proposed(&mut controller);
    assert!(register.placements.values().all(|placement| placement.backup.is_none()));
    assert_eq!(controller.next_decision(), ControllerDecision::Wait);
    controller.set_lease_holders(hosts(&[0, 1, 4]));
    assert!(proposed(&mut controller).is_separate());
}

#[test]
fn a_failed_vm_takes_the_cluster_back() {
    let mut controller = controller(&[0, 1, 2]);
    controller.record_failed(VmId(0), Generation(9));
    assert_eq!(controller.next_decision(), ControllerDecision::Wait, "of another timeline");
    controller.record_failed(VmId(0), Generation(0));
    assert_eq!(proposed(&mut controller).generation, Generation(1));
}

#[test]
fn a_planned_move_waits_for_a_checkpoint_of_everything() {
    let mut controller = controller(&[0, 1, 2]);
    controller.plan_failover();
    (0..2).for_each(|vm| controller.record_drained(VmId(vm), Epoch(9), Generation(0)));
    assert_eq!(controller.next_decision(), ControllerDecision::Wait);
    let register = FailoverRecord::new(placements());
    controller.learn_record(&register.with_checkpoint(&checkpoint(&register)).unwrap());
    assert_eq!(proposed(&mut controller).generation, Generation(1));
    assert!(!controller.is_failover_planned());
}

#[test]
fn a_checkpoint_of_another_timeline_or_layout_is_not_recorded() {
    let register = FailoverRecord::new(placements());
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
    let mut guard = HostGuard::new(HostId(0), TERMS);
    assert!(matches!(
        guard.record_grant(S, &FailoverRecord::new(placements()))[..],
        [GuardAction::Run { .. }]
    ));
    assert!(guard.may_send(2 * S) && guard.may_send(3 * S));
    assert!(!guard.may_send(4 * S));
}

#[test]
fn a_host_obeys_the_record_of_its_lease() {
    let mut guard = HostGuard::new(HostId(0), TERMS);
    let old = FailoverRecord::new(placements());
    guard.record_grant(S, &old);
    let new = controller(&[1, 2]).clone();
    let ControllerDecision::Propose(new) = new.next_decision() else { panic!() };
    let stopped = [GuardAction::Stop(Generation(0)), GuardAction::Stopped(Generation(1))];
    assert_eq!(guard.record_grant(2 * S, &new), stopped);
    assert!(!guard.may_send(2 * S));
    assert_eq!(guard.record_grant(2 * S, &old), [], "an older answer comes late");
    assert_eq!(guard.running_generation(), None);
}

#[test]
fn a_cluster_that_has_ended_leaves_its_timeline_behind() {
    let mut guard = HostGuard::new(HostId(0), TERMS);
    let first = FailoverRecord::new(placements());
    guard.record_grant(S, &first);
    let ended = first.with_end();
    assert!(ended.is_ended() && ended.is_protected());
    assert_eq!(ended.fence, hosts(&[0, 1]));
    let mut controller = FailoverController::new(ended.clone(), hosts(&[0]));
    assert_eq!(proposed(&mut controller).fence, hosts(&[0]), "1 can't send any more");
    let again = ended.with_restart(placements());
    assert_eq!((again.generation, again.version), (Generation(2), 2));
    assert_eq!(again.fence, hosts(&[0, 1]), "who ran before may still send");
    assert_eq!(guard.learn_record(&again)[0], GuardAction::Stop(Generation(0)));
    assert_eq!(guard.learn_record(&first), [], "an older answer comes late");
    assert_eq!(guard.running_generation(), None);
    let mut controller = FailoverController::new(again, hosts(&[2]));
    let next = proposed(&mut controller);
    assert_eq!((next.generation, next.fence.len()), (Generation(2), 0));
}

#[test]
fn a_vm_of_its_own_has_the_backup_that_has_its_copy() {
    let placement =
        |backup| BTreeMap::from([(VmId(0), VmPlacement { primary: HostId(0), backup })]);
    let alone = FailoverRecord::new(placement(None));
    let lost = FailoverController::new(alone.clone(), hosts(&[1]));
    assert_eq!(lost.next_decision(), ControllerDecision::Lost(VmId(0)), "1 has nothing");
    let backed = alone.with_backup(Some(HostId(1)));
    assert!(backed.is_protected() && backed.generation == alone.generation);
    let next = proposed(&mut FailoverController::new(backed.clone(), hosts(&[1])));
    assert_eq!((next.primaries(), next.fence.clone()), (hosts(&[1]), hosts(&[0])));
    assert!(!next.is_protected(), "a second failure now would lose it");
    let taken_up = backed.with_adopting_host(HostId(0), HostId(7));
    assert_eq!(
        taken_up.placements,
        BTreeMap::from([(VmId(0), VmPlacement { primary: HostId(7), backup: None })])
    );
    assert_eq!(
        FailoverController::new(taken_up, hosts(&[1])).next_decision(),
        ControllerDecision::Lost(VmId(0))
    );
    assert!(!backed.with_backup(None).is_protected());
}

#[test]
fn a_vm_moves_to_its_backup_without_a_fence() {
    let placement = BTreeMap::from([(VmId(0), VmPlacement { primary: HostId(0), backup: None })]);
    let alone = FailoverRecord::new(placement);
    let backed = alone.with_backup(Some(HostId(1)));
    assert_eq!(alone.with_move(HostId(0), HostId(1)), None, "it has no backup");
    assert_eq!(backed.with_move(HostId(0), HostId(2)), None, "that is not its backup");
    assert_eq!(backed.with_move(HostId(1), HostId(0)), None, "that is not its primary");
    assert_eq!(backed.with_end().with_move(HostId(0), HostId(1)), None);
    assert_eq!(FailoverRecord::new(placements()).with_move(HostId(0), HostId(1)), None);
    let moved = backed.with_move(HostId(0), HostId(1)).unwrap();
    assert_eq!((moved.primaries(), moved.generation), (hosts(&[1]), Generation(1)));
    assert!(moved.fence.is_empty() && !moved.is_protected());
    let mut guard = HostGuard::new(HostId(1), TERMS);
    let run = guard.record_grant(S, &moved);
    assert!(matches!(run[..], [GuardAction::Run { generation: Generation(1), .. }]));
    assert!(guard.may_send(2 * S));
}

#[test]
fn a_lease_that_was_given_up_comes_back_with_another_record_only() {
    let placement = BTreeMap::from([(VmId(0), VmPlacement { primary: HostId(0), backup: None })]);
    let backed = FailoverRecord::new(placement).with_backup(Some(HostId(1)));
    let mut guard = HostGuard::new(HostId(0), TERMS);
    guard.record_grant(S, &backed);
    guard.give_up_lease(&backed);
    assert!(!guard.may_send(2 * S) && guard.running_generation() == Some(Generation(0)));
    guard.record_grant(2 * S, &backed);
    assert!(!guard.may_send(2 * S), "a proposal for this record may still arrive");
    let called_off = backed.with_backup(None);
    assert!(guard.has_given_up(backed.version) && !guard.has_given_up(called_off.version));
    guard.record_grant(3 * S, &called_off);
    assert!(guard.may_send(4 * S));
}

#[test]
fn a_former_primary_may_run_a_new_cluster_after_its_lease() {
    let placement = BTreeMap::from([(VmId(0), VmPlacement { primary: HostId(0), backup: None })]);
    let again = FailoverRecord::new(placement.clone()).with_end().with_restart(placement);
    assert_eq!(
        FailoverController::new(again.clone(), hosts(&[0])).next_decision(),
        ControllerDecision::Wait
    );
    let next = proposed(&mut FailoverController::new(again, hosts(&[])));
    assert!(next.fence.is_empty());
    let mut guard = HostGuard::new(HostId(0), TERMS);
    guard.record_grant(S, &next);
    assert!(guard.may_send(2 * S));
}

#[test]
fn a_host_that_finds_no_record_stops() {
    let mut guard = HostGuard::new(HostId(0), TERMS);
    assert_eq!(guard.lose_record(), None);
    guard.record_grant(S, &FailoverRecord::new(placements()));
    assert_eq!(guard.may_send_until().map(|(generation, _)| generation), Some(Generation(0)));
    assert_eq!(guard.lose_record(), Some(GuardAction::Stop(Generation(0))));
    assert!(!guard.may_send(2 * S) && guard.may_send_until().is_none());
}

#[test]
fn no_new_primary_runs_while_a_host_is_in_the_fence() {
    let mut controller = controller(&[2]);
    let mut guard = HostGuard::new(HostId(2), TERMS);
    assert_eq!(guard.learn_record(&proposed(&mut controller)), []);
    let run = guard.learn_record(&proposed(&mut controller));
    assert!(matches!(run[..], [GuardAction::Run { generation: Generation(1), .. }]));
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
        let mut lease = HeldLease::new(TERMS);
        let mut grants = GrantedLeases::after_takeover(TERMS, [], granter(0));
        grants.grant_lease(HostId(0), granter(under_way_us));
        lease.record_grant(holder(0));
        let over = grants.unexpired_hosts(granter(later_us)).is_empty();
        prop_assert!(!(over && lease.is_held(holder(later_us))));
    }
}
