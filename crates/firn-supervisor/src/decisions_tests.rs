use super::*;
use proptest::prelude::*;
use serde_json::json;

const A: ClientId = ClientId(1);
const B: ClientId = ClientId(2);

const HOW: FailoverRequest = FailoverRequest { lease: None, member: None, accept_stopped: false };

fn request(cancel_with_client: bool) -> SaveRequest {
    SaveRequest { image: "/web.firn".into(), choices: Default::default(), cancel_with_client }
}

fn saving(cancel_with_client: bool) -> Core {
    let mut core = Core::new(false);
    let begun = core.on(Event::Request(A, Request::Checkpoint(request(cancel_with_client))));
    assert!(matches!(begun[..], [Action::BeginSave { then_stop: false, .. }]));
    core
}

fn kinds(actions: &[Action]) -> Vec<Option<FailureKind>> {
    let kind = |action: &Action| match action {
        Action::Reply(_, Reply::Failed(failure)) => Some(failure.kind),
        _ => None,
    };
    actions.iter().map(kind).collect()
}

fn stop(force: bool) -> Request {
    Request::Stop(StopRequest { force, ..StopRequest::default() })
}

fn fail() -> Failure {
    Failure::new(FailureKind::Other, "no space left")
}

#[test]
fn a_vm_whose_disks_are_served_is_not_left() {
    let mut core = Core::new(false).serving(true);
    let actions = core.on(Event::Request(A, Request::Detach));
    assert!(matches!(&actions[..], [Action::Reply(A, Reply::Failed(_))]), "{actions:?}");
    assert_eq!(core.on(Event::Terminate), []);
    assert!(core.is_idle());
}

#[test]
fn a_checkpoint_is_reported_to_who_asked_and_who_watches() {
    let mut core = saving(false);
    let now = Progress::new("saving", 1, 2);
    assert_eq!(core.on(Event::Progress(now.clone())), [progress(A, &now)]);
    assert_eq!(core.on(Event::Request(B, Request::Watch)), [progress(B, &now)]);
    let ended = core.on(Event::SaveEnded(Ok(json!(7))));
    assert_eq!(ended, [done(A, json!(7)), done(B, json!(7))]);
    assert_eq!(core.progress(), None);
}

#[test]
fn two_checkpoints_at_once_are_one_too_many() {
    let mut core = saving(false);
    let refused = core.on(Event::Request(B, Request::Checkpoint(request(false))));
    assert_eq!(kinds(&refused), [Some(FailureKind::Busy)]);
}

fn protect() -> Request {
    let to = "unix:/standby".parse().unwrap();
    Request::Protect(ProtectRequest {
        to,
        interval_ms: 100,
        predicts: true,
        alone: false,
        lease: None,
    })
}

fn protecting() -> Core {
    let mut core = Core::new(false);
    let begun = core.on(Event::Request(A, protect()));
    assert!(matches!(begun[..], [Action::BeginProtection(_)]));
    core
}

#[test]
fn a_protected_vm_is_busy_until_it_is_released() {
    let mut core = protecting();
    assert_eq!(core.on(Event::Protected(json!(1))), [done(A, json!(1))]);
    let checkpoint = Request::Checkpoint(request(false));
    for refused in [protect(), checkpoint, Request::Detach] {
        let refused = core.on(Event::Request(B, refused));
        assert_eq!(kinds(&refused), [Some(FailureKind::Busy)]);
    }
    assert_eq!(core.on(Event::Request(B, Request::Release)), [Action::Release]);
    let let_out = Action::LetOut(None);
    assert_eq!(core.on(Event::ProtectionEnded(Ok(json!(2)))), [let_out, done(B, json!(2))]);
    assert!(core.is_idle());
}

#[test]
fn what_is_held_leaves_only_when_that_is_asked_for() {
    let ended = |core: &mut Core, how| core.on(Event::ProtectionEnded(how));
    let lets_out = |actions: &[Action]| actions.contains(&Action::LetOut(None));
    let mut core = protecting();
    assert!(!lets_out(&ended(&mut core, Err(fail()))), "its standby may run");
    assert_eq!(core.on(Event::Request(B, Request::Release)), [Action::LetOut(Some(B))]);
    let mut core = protecting();
    core.on(Event::Terminate);
    assert!(!lets_out(&ended(&mut core, Ok(json!(1)))), "the VM is let go of");
    let Request::Protect(request) = protect() else { unreachable!() };
    let request = Request::Protect(ProtectRequest { alone: true, ..request });
    use FailureKind::{Ended, Lost, Other, Refused};
    for (kind, begins, leaves) in [
        (Lost, true, true),
        (Lost, false, false),
        (Other, true, false),
        (Refused, true, false),
        (Ended, true, false),
    ] {
        let mut core = Core::new(false);
        core.on(Event::Request(A, request.clone()));
        if begins {
            core.on(Event::Protected(json!(1)));
        }
        assert_eq!(
            lets_out(&ended(&mut core, Err(Failure::new(kind, "lost")))),
            leaves,
            "{kind:?}"
        );
    }
}

#[test]
fn protection_that_does_not_begin_fails() {
    let mut core = protecting();
    assert_eq!(core.on(Event::ProtectionEnded(Err(fail()))), [failed(A, fail())]);
    assert!(core.is_idle());
}

#[test]
fn a_protected_vm_is_let_go_of_before_it_is_stopped() {
    let mut core = protecting();
    assert_eq!(core.on(Event::Request(B, stop(false))), [Action::StopProtection]);
    let ended = core.on(Event::ProtectionEnded(Ok(json!(2))));
    assert!(matches!(ended[..], [Action::Reply(A, _), Action::EndHypervisor(_)]), "{ended:?}");
}

/// The guest may ignore the power button.
#[test]
fn a_vm_whose_power_button_is_pressed_stays_protected_until_it_ends() {
    let mut core = protecting();
    core.on(Event::Protected(json!(1)));
    let request = StopRequest { powerdown_s: Some(1), ..StopRequest::default() };
    let asked = core.on(Event::Request(B, Request::Stop(request)));
    assert_eq!(asked, [Action::EndHypervisor(request)]);
    assert_eq!(core.on(Event::StopFailed(fail())), [failed(B, fail())]);
    assert_eq!(core.on(Event::Request(A, Request::Release)), [Action::Release]);
}

#[test]
fn only_a_standby_is_failed_over_to() {
    let refused = Core::new(false).on(Event::Request(A, Request::Failover(HOW)));
    assert_eq!(kinds(&refused), [Some(FailureKind::Usage)]);
    let mut core = Core::standby();
    assert_eq!(core.on(Event::Request(A, Request::Failover(HOW))), [Action::TakeUp(A, HOW)]);
    assert_eq!(core.on(Event::RestoreEnded(Ok(json!(1)))), [done(A, json!(1))]);
    assert!(core.is_idle());
}

#[test]
fn a_standby_ends_at_once_when_it_is_stopped() {
    let mut core = Core::standby();
    let kill = Action::KillHypervisor { discard: false };
    assert_eq!(core.on(Event::Request(A, stop(false))), [kill]);
    let record = Action::RecordEnd { exit: Exit::Stopped, reason: None };
    let ended = core.on(Event::HypervisorGone(Exit::Signal(9)));
    assert_eq!(ended, [record, done(A, json!(null))]);
}

#[test]
fn a_failover_that_is_refused_is_told_once_and_can_be_tried_again() {
    let mut core = Core::standby();
    assert_eq!(core.on(Event::Request(A, Request::Failover(HOW))), [Action::TakeUp(A, HOW)]);
    assert_eq!(core.on(Event::TakeUpRefused(A, fail())), [failed(A, fail())]);
    assert_eq!(core.on(Event::Request(B, Request::Failover(HOW))), [Action::TakeUp(B, HOW)]);
    assert_eq!(core.on(Event::RestoreEnded(Ok(json!(1)))), [done(B, json!(1))]);
}

#[test]
fn a_failover_that_loses_its_hypervisor_says_what_it_knows() {
    let mut core = Core::standby();
    core.on(Event::Request(A, Request::Failover(HOW)));
    let wait = [Action::CancelSave, Action::StartGrace];
    assert_eq!(core.on(Event::HypervisorGone(Exit::Signal(9))), wait);
    let ended = core.on(Event::RestoreEnded(Err(fail())));
    assert!(ended.contains(&failed(A, fail())), "{ended:?}");
}

#[test]
fn a_failed_checkpoint_leaves_an_idle_supervisor() {
    let mut core = saving(false);
    assert_eq!(core.on(Event::SaveEnded(Err(fail()))), [failed(A, fail())]);
    let again = core.on(Event::Request(B, Request::Checkpoint(request(false))));
    assert!(matches!(again[..], [Action::BeginSave { .. }]));
}

#[test]
fn a_client_that_dies_takes_the_checkpoint_along_only_if_it_said_so() {
    assert_eq!(saving(false).on(Event::ClientGone(A)), []);
    assert_eq!(saving(true).on(Event::ClientGone(B)), []);
    assert_eq!(saving(true).on(Event::ClientGone(A)), [Action::CancelSave]);
}

#[test]
fn a_suspend_ends_the_vm_and_answers_when_it_has_ended() {
    let mut core = Core::new(false);
    let begun = core.on(Event::Request(A, Request::Suspend(request(false))));
    assert!(matches!(begun[..], [Action::BeginSave { then_stop: true, .. }]));
    let quit = Action::EndHypervisor(StopRequest { force: true, ..StopRequest::default() });
    assert_eq!(core.on(Event::SaveEnded(Ok(json!(7)))), [quit]);
    let record = Action::RecordEnd { exit: Exit::Stopped, reason: None };
    assert_eq!(core.on(Event::HypervisorGone(Exit::Code(0))), [record, done(A, json!(7))]);
}

#[test]
fn a_failed_suspend_does_not_end_the_vm() {
    let mut core = Core::new(false);
    core.on(Event::Request(A, Request::Suspend(request(false))));
    assert_eq!(core.on(Event::SaveEnded(Err(fail()))), [failed(A, fail())]);
    assert_eq!(core.on(Event::Request(A, Request::Watch)), [Action::ReplyStatus(A)]);
}

#[test]
fn stopping_during_a_checkpoint_needs_force() {
    let mut core = saving(false);
    let refused = core.on(Event::Request(B, stop(false)));
    assert_eq!(kinds(&refused), [Some(FailureKind::Busy)]);
    let forced = core.on(Event::Request(B, stop(true)));
    assert_eq!(forced, [Action::CancelSave, Action::KillHypervisor { discard: false }]);
    core.on(Event::HypervisorGone(Exit::Signal(9)));
    let ended = core.on(Event::SaveEnded(Err(fail())));
    let record = Action::RecordEnd { exit: Exit::Stopped, reason: None };
    assert_eq!(ended, [record, failed(A, fail()), done(B, serde_json::Value::Null)]);
}

#[test]
fn everybody_who_asked_to_stop_is_told() {
    let mut core = Core::new(false);
    core.on(Event::Request(A, stop(false)));
    assert_eq!(core.on(Event::Request(B, stop(false))), []);
    let ended = core.on(Event::HypervisorGone(Exit::Code(0)));
    assert_eq!(ended.len(), 3);
}

#[test]
fn a_guest_that_ignores_its_power_button_runs_on() {
    let mut core = Core::new(false);
    core.on(Event::Request(A, stop(false)));
    assert_eq!(core.on(Event::StopFailed(fail())), [failed(A, fail())]);
    assert!(matches!(core.on(Event::Request(A, Request::Detach))[..], [Action::LetGo, _]));
}

#[test]
fn a_hypervisor_that_dies_during_a_save_is_recorded_once_the_save_is_wound_up() {
    let mut core = saving(false);
    let gone = core.on(Event::HypervisorGone(Exit::Signal(11)));
    assert_eq!(gone, [Action::CancelSave, Action::StartGrace]);
    let record = Action::RecordEnd { exit: Exit::Signal(11), reason: None };
    assert_eq!(core.on(Event::SaveEnded(Err(fail()))), [record, failed(A, fail())]);
}

#[test]
fn what_a_hypervisor_that_dies_cuts_short_is_told_with_how_it_died() {
    let exit = Exit::Signal(9);
    let record = Action::RecordEnd { exit, reason: None };
    let told = |what: &str| {
        let text = format!("the VM ended while it was being {what} (killed by signal 9)");
        failed(A, Failure::new(FailureKind::Ended, text))
    };
    for cut_short in [cancelled(), ended()] {
        let mut core = saving(false);
        core.on(Event::HypervisorGone(exit));
        let over = core.on(Event::SaveEnded(Err(cut_short)));
        assert_eq!(over, [record.clone(), told("saved")]);
    }
    let mut core = saving(false);
    assert_eq!(core.on(Event::SaveEnded(Err(ended()))), []);
    assert_eq!(core.on(Event::HypervisorGone(exit)), [record.clone(), told("saved")]);
    let mut core = Core::new(true);
    core.on(Event::Request(A, Request::Watch));
    assert_eq!(core.on(Event::RestoreEnded(Err(ended()))), []);
    assert_eq!(core.on(Event::HypervisorGone(exit)), [record.clone(), told("restored")]);
    let mut core = Core::new(true);
    core.on(Event::Request(A, Request::Watch));
    core.on(Event::HypervisorGone(exit));
    assert_eq!(core.on(Event::RestoreEnded(Err(ended()))), [record, told("restored")]);
}

#[test]
fn a_restore_that_failed_says_why_also_if_its_hypervisor_went_first() {
    let mut core = Core::new(true);
    core.on(Event::Request(A, Request::Watch));
    let exit = Exit::Signal(9);
    assert_eq!(core.on(Event::HypervisorGone(exit)), [Action::CancelSave, Action::StartGrace]);
    let reason = Some(fail());
    let record = Action::RecordEnd { exit, reason };
    assert_eq!(core.on(Event::RestoreEnded(Err(fail()))), [record, failed(A, fail())]);
}

fn cancelled() -> Failure {
    Failure::new(FailureKind::Interrupted, "the save was cancelled")
}

fn ended() -> Failure {
    Failure::new(FailureKind::Ended, "no such process")
}

#[test]
fn a_save_that_hangs_without_its_hypervisor_is_not_waited_for() {
    let mut core = saving(false);
    assert_eq!(core.on(Event::GraceOver), []);
    core.on(Event::HypervisorGone(Exit::Signal(11)));
    let over = core.on(Event::GraceOver);
    assert_eq!(kinds(&over), [None, Some(FailureKind::Ended)]);
}

#[test]
fn a_restore_that_can_not_go_on_takes_its_vm_down_and_says_why() {
    let mut core = Core::new(true);
    assert_eq!(core.on(Event::Request(A, Request::Watch)), []);
    assert_eq!(
        core.on(Event::RestoreEnded(Err(fail()))),
        [Action::KillHypervisor { discard: false }]
    );
    let reason = Some(fail());
    let exit = Exit::Signal(9);
    let record = Action::RecordEnd { exit, reason };
    assert_eq!(core.on(Event::HypervisorGone(exit)), [record, failed(A, fail())]);
}

#[test]
fn while_pages_are_missing_firn_does_not_let_go() {
    let mut core = Core::new(true);
    let refused = core.on(Event::Request(A, Request::Detach));
    assert_eq!(kinds(&refused), [Some(FailureKind::Busy)]);
    assert_eq!(core.on(Event::Terminate), []);
    assert_eq!(core.on(Event::RestoreEnded(Ok(json!(1)))), [Action::LetGo]);
}

#[test]
fn sigterm_cancels_a_save_and_leaves() {
    let mut core = saving(false);
    assert_eq!(core.on(Event::Terminate), [Action::CancelSave]);
    assert_eq!(core.on(Event::Terminate), []);
    assert_eq!(core.on(Event::SaveEnded(Err(fail()))), [failed(A, fail()), Action::LetGo]);
}

#[test]
fn a_merge_ends_before_the_vm_is_stopped() {
    let mut core = Core::new(false);
    let begun = core.on(Event::Request(A, Request::CommitDisks));
    assert_eq!(begun, [Action::BeginMerge { all: true }]);
    let refused = core.on(Event::Request(B, Request::Checkpoint(request(false))));
    assert_eq!(kinds(&refused), [Some(FailureKind::Busy)]);
    assert_eq!(core.on(Event::Request(B, stop(false))), [Action::CancelSave]);
    let cancelled = Failure::new(FailureKind::Interrupted, "cancelled");
    let ended = core.on(Event::MergeEnded(Err(cancelled.clone())));
    let end = Action::EndHypervisor(StopRequest::default());
    assert_eq!(ended, [failed(A, cancelled), end]);
}

/// The client ids are filled in later: each request comes from a client of its own.
fn any_event() -> impl Strategy<Value = Event> {
    let nobody = ClientId(0);
    let request = prop_oneof![
        Just(Request::Status),
        Just(Request::Watch),
        Just(Request::Detach),
        any::<bool>().prop_map(stop),
        Just(protect()),
        Just(Request::Release),
        Just(Request::MergeDisks),
        Just(Request::CommitDisks),
        Just(Request::CommandLine),
        Just(Request::Failover(HOW)),
        Just(Request::ReleaseMember),
        Just(Request::Member(crate::protocol::MemberRequest::Leave)),
        any::<bool>().prop_map(|cancel| Request::Checkpoint(request(cancel))),
        any::<bool>().prop_map(|cancel| Request::Suspend(request(cancel))),
    ];
    prop_oneof![
        3 => request.prop_map(move |request| Event::Request(nobody, request)),
        1 => Just(Event::SaveEnded(Ok(json!(1)))),
        1 => Just(Event::SaveEnded(Err(fail()))),
        1 => Just(Event::SaveEnded(Err(ended()))),
        1 => Just(Event::MergeEnded(Ok(json!(1)))),
        1 => Just(Event::MergeEnded(Err(fail()))),
        1 => Just(Event::MergeEnded(Err(ended()))),
        1 => Just(Event::RestoreEnded(Ok(json!(1)))),
        1 => Just(Event::RestoreEnded(Err(fail()))),
        1 => Just(Event::RestoreEnded(Err(ended()))),
        1 => Just(Event::Protected(json!(1))),
        1 => Just(Event::ProtectionEnded(Ok(json!(1)))),
        1 => Just(Event::ProtectionEnded(Err(fail()))),
        1 => Just(Event::ProtectionEnded(Err(ended()))),
        1 => Just(Event::StopFailed(fail())),
        1 => Just(Event::GuardGone(Role::Guard)),
        1 => Just(Event::GuardDue(Role::Watcher)),
        1 => Just(Event::Terminate),
    ]
}

/// According to the record it runs elsewhere: its operation ends here, and the reason is reported.
#[test]
fn a_vm_that_runs_elsewhere_is_ended_and_says_why() {
    let fence = || Request::Fence { why: "it runs on b".to_owned() };
    let kill = Action::KillHypervisor { discard: false };
    let mut protecting = Core::new(false);
    protecting.on(Event::Request(A, protect()));
    for mut core in [Core::new(false), Core::new(true), protecting] {
        let actions = core.on(Event::Request(B, fence()));
        assert_eq!(actions, [kill.clone(), done(B, serde_json::Value::Null)]);
        let mut actions = core.on(Event::HypervisorGone(Exit::Signal(9)));
        actions.extend(core.on(Event::GraceOver));
        let why = Some(Failure::new(FailureKind::Lost, "it runs on b"));
        let record = Action::RecordEnd { exit: Exit::Signal(9), reason: why };
        assert!(actions.contains(&record), "{actions:?}");
    }
    let refused = Core::standby().on(Event::Request(A, fence()));
    assert!(matches!(&refused[..], [Action::Reply(A, Reply::Failed(_))]), "{refused:?}");
}

#[test]
fn what_a_protected_vm_holds_is_not_let_out_by_its_lease() {
    let mut core = Core::new(false);
    assert_eq!(core.on(Event::Request(A, Request::GoOn)), [Action::GoOn(A)]);
    core.on(Event::Request(A, protect()));
    let refused = core.on(Event::Request(B, Request::GoOn));
    assert!(matches!(&refused[..], [Action::Reply(B, Reply::Failed(_))]), "{refused:?}");
}

proptest! {
    /// Every request gets one last reply, whatever happens meanwhile and however the VM ends.
    #[test]
    fn nobody_waits_for_ever(
        events in proptest::collection::vec(any_event(), 0..40),
        begun in 0..3_u8,
    ) {
        let ending = [Event::HypervisorGone(Exit::Signal(9)), Event::GraceOver];
        let mut core = match begun {
            0 => Core::standby(),
            restoring => Core::new(restoring == 1),
        };
        let mut waiting = BTreeSet::new();
        let mut over = false;
        for (number, event) in events.into_iter().chain(ending).enumerate() {
            if over {
                break;
            }
            let event = match event {
                Event::Request(_, request) => {
                    waiting.insert(ClientId(number as u64));
                    Event::Request(ClientId(number as u64), request)
                }
                event => event,
            };
            for action in core.on(event) {
                match action {
                    Action::Reply(client, reply) if reply.is_last() => {
                        prop_assert!(waiting.remove(&client), "{client:?} was not waiting");
                    }
                    Action::LetOut(Some(client)) => prop_assert!(waiting.remove(&client)),
                    Action::ReplyStatus(client)
                    | Action::CommandLine(client)
                    | Action::Member(client, _) => {
                        prop_assert!(waiting.remove(&client));
                    }
                    Action::LetGo | Action::RecordEnd { .. } => over = true,
                    _ => {}
                }
            }
        }
        prop_assert!(over);
        prop_assert_eq!(waiting, BTreeSet::new());
    }
}

#[test]
fn a_member_is_released_with_its_cluster_only() {
    let mut core = Core::new(false);
    core.belongs(true);
    core.on(Event::Request(A, protect()));
    let refused = core.on(Event::Request(B, Request::Release));
    assert!(matches!(&refused[..], [Action::Reply(B, Reply::Failed(failure))]
        if failure.kind == FailureKind::Refused));
    let leave = Request::Member(crate::protocol::MemberRequest::Leave);
    let busy = core.on(Event::Request(B, leave.clone()));
    assert!(matches!(&busy[..], [Action::Reply(B, Reply::Failed(failure))]
        if failure.kind == FailureKind::Busy));
    let card = crate::protocol::MemberRequest::Card;
    let asked = core.on(Event::Request(B, Request::Member(card.clone())));
    assert_eq!(asked, [Action::Member(B, card)]);
    assert_eq!(core.on(Event::Request(B, Request::ReleaseMember)), [Action::Release]);
    core.on(Event::ProtectionEnded(Ok(serde_json::Value::Null)));
    assert!(matches!(core.on(Event::Request(B, leave))[..], [Action::Member(B, _)]));
    // The backup is lost: the client that reports it is trusted.
    assert_eq!(core.on(Event::Request(B, Request::Release)), [Action::LetOut(Some(B))]);
}

#[test]
fn a_restore_that_fails_here_leaves_the_vm_to_a_successor_unless_it_is_to_be_ended() {
    let mut core = Core::new(true).keeping_vm(true);
    assert_eq!(core.on(Event::RestoreEnded(Err(fail()))), [Action::Resign(fail())]);
    let mut core = Core::new(true).keeping_vm(false);
    let kill = Action::KillHypervisor { discard: false };
    assert_eq!(core.on(Event::RestoreEnded(Err(fail()))), [kill]);
}
