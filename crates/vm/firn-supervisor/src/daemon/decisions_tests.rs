use super::*;
use crate::records::store_target::{StoreCredentials, StoreTarget};
use proptest::prelude::*;
use serde_json::json;

const A: ClientId = ClientId(1);
const B: ClientId = ClientId(2);

const HOW: FailoverRequest = FailoverRequest { lease: None, member: None, accept_stopped: false };

fn request(cancel_with_client: bool) -> SaveRequest {
    SaveRequest {
        image: "/web.firn".into(),
        choices: Default::default(),
        keys: Vec::new(),
        store: None,
        cancel_with_client,
    }
}

fn saving(cancel_with_client: bool) -> SupervisorCore {
    let mut core = SupervisorCore::new(false);
    let begun = core.handle_event(SupervisorEvent::Request(
        A,
        SupervisorRequest::Checkpoint(request(cancel_with_client)),
    ));
    assert!(matches!(begun[..], [SupervisorAction::BeginSave { then_stop: false, .. }]));
    core
}

fn kinds(actions: &[SupervisorAction]) -> Vec<Option<FailureKind>> {
    let kind = |action: &SupervisorAction| match action {
        SupervisorAction::Reply(_, SupervisorReply::Failed(failure)) => Some(failure.kind),
        _ => None,
    };
    actions.iter().map(kind).collect()
}

fn stop(force: bool) -> SupervisorRequest {
    SupervisorRequest::Stop(StopRequest { force, ..StopRequest::default() })
}

fn fail() -> Failure {
    Failure::new(FailureKind::Other, "no space left")
}

#[test]
fn a_request_for_an_image_in_a_store_has_an_object() {
    for (make, ends) in [
        (SupervisorRequest::StoredCheckpoint as fn(SaveRequest) -> SupervisorRequest, false),
        (SupervisorRequest::StoredSuspend, true),
    ] {
        let mut core = SupervisorCore::new(false);
        let refused = core.handle_event(SupervisorEvent::Request(A, make(request(false))));
        assert_eq!(kinds(&refused), [Some(FailureKind::Usage)]);
        assert!(core.is_idle());
        let location = "s3://vms/web.firn".to_owned();
        let store = StoreTarget { location, credentials: StoreCredentials::from_env() };
        let stored = SaveRequest { store: Some(Box::new(store)), ..request(false) };
        let begun = core.handle_event(SupervisorEvent::Request(A, make(stored.clone())));
        assert_eq!(begun, [SupervisorAction::BeginSave { request: stored, then_stop: ends }]);
    }
}

#[test]
fn a_request_for_a_sealed_image_has_a_key() {
    for (make, ends) in [
        (SupervisorRequest::SealedCheckpoint as fn(SaveRequest) -> SupervisorRequest, false),
        (SupervisorRequest::SealedSuspend, true),
    ] {
        let mut core = SupervisorCore::new(false);
        let refused = core.handle_event(SupervisorEvent::Request(A, make(request(false))));
        assert_eq!(kinds(&refused), [Some(FailureKind::Usage)]);
        assert!(core.is_idle());
        let mut sealed = request(false);
        let key = firn_image::ImageKey::from_bytes([7; 32]);
        sealed.choices.seal = Some(firn_image::ImageSeal { key, wraps: Vec::new() });
        let begun = core.handle_event(SupervisorEvent::Request(A, make(sealed.clone())));
        assert_eq!(begun, [SupervisorAction::BeginSave { request: sealed, then_stop: ends }]);
    }
}

#[test]
fn a_vm_whose_disks_are_served_is_not_left() {
    let mut core = SupervisorCore::new(false).with_served_disks(true);
    let actions = core.handle_event(SupervisorEvent::Request(A, SupervisorRequest::Detach));
    assert!(
        matches!(&actions[..], [SupervisorAction::Reply(A, SupervisorReply::Failed(_))]),
        "{actions:?}"
    );
    assert_eq!(core.handle_event(SupervisorEvent::Terminate), []);
    assert!(core.is_idle());
}

#[test]
fn a_vm_whose_cards_have_filters_is_not_left() {
    let mut core = SupervisorCore::new(false);
    core.set_filtered(true);
    let refused = core.handle_event(SupervisorEvent::Request(A, SupervisorRequest::Detach));
    assert_eq!(kinds(&refused), [Some(FailureKind::Refused)]);
    assert_eq!(core.handle_event(SupervisorEvent::Terminate), []);
    assert!(core.is_idle());
    core.set_filtered(false);
    assert_eq!(core.handle_event(SupervisorEvent::Terminate), [SupervisorAction::DetachVm]);
}

#[test]
fn sigterm_ends_a_protection_and_leaves_if_no_filter_stays() {
    for stays in [true, false] {
        let mut core = protecting();
        core.set_filtered(true);
        assert_eq!(core.handle_event(SupervisorEvent::Terminate), [SupervisorAction::CancelSave]);
        core.set_filtered(stays);
        let actions = core.handle_event(SupervisorEvent::ProtectionEnded(Err(fail())));
        assert_eq!(!actions.contains(&SupervisorAction::DetachVm), stays, "{actions:?}");
        assert_eq!(core.is_idle(), stays);
    }
}

#[test]
fn a_checkpoint_is_reported_to_its_client_and_to_watchers() {
    let mut core = saving(false);
    let now = OperationProgress::new("saving", 1, 2);
    assert_eq!(
        core.handle_event(SupervisorEvent::Progress(now.clone())),
        [progress_reply(A, &now)]
    );
    assert_eq!(
        core.handle_event(SupervisorEvent::Request(B, SupervisorRequest::Watch)),
        [progress_reply(B, &now)]
    );
    let ended = core.handle_event(SupervisorEvent::SaveEnded(Ok(json!(7))));
    assert_eq!(ended, [done_reply(A, json!(7)), done_reply(B, json!(7))]);
    assert_eq!(core.progress(), None);
}

#[test]
fn two_checkpoints_at_once_are_one_too_many() {
    let mut core = saving(false);
    let refused = core
        .handle_event(SupervisorEvent::Request(B, SupervisorRequest::Checkpoint(request(false))));
    assert_eq!(kinds(&refused), [Some(FailureKind::Busy)]);
}

fn protect() -> SupervisorRequest {
    let to = "unix:/standby".parse().unwrap();
    SupervisorRequest::Protect(ProtectRequest {
        to,
        interval_ms: 100,
        predicts: true,
        alone: false,
        lease: None,
    })
}

fn protecting() -> SupervisorCore {
    let mut core = SupervisorCore::new(false);
    let begun = core.handle_event(SupervisorEvent::Request(A, protect()));
    assert!(matches!(begun[..], [SupervisorAction::BeginProtection(_)]));
    core
}

#[test]
fn a_protected_vm_is_busy_until_it_is_released() {
    let mut core = protecting();
    assert_eq!(core.handle_event(SupervisorEvent::Protected(json!(1))), [done_reply(A, json!(1))]);
    let checkpoint = SupervisorRequest::Checkpoint(request(false));
    for refused in [protect(), checkpoint, SupervisorRequest::Detach] {
        let refused = core.handle_event(SupervisorEvent::Request(B, refused));
        assert_eq!(kinds(&refused), [Some(FailureKind::Busy)]);
    }
    assert_eq!(
        core.handle_event(SupervisorEvent::Request(B, SupervisorRequest::Release)),
        [SupervisorAction::Release]
    );
    let let_out = SupervisorAction::ReleaseOutput(None);
    assert_eq!(
        core.handle_event(SupervisorEvent::ProtectionEnded(Ok(json!(2)))),
        [let_out, done_reply(B, json!(2))]
    );
    assert!(core.is_idle());
}

#[test]
fn buffered_output_leaves_only_on_request() {
    let ended =
        |core: &mut SupervisorCore, how| core.handle_event(SupervisorEvent::ProtectionEnded(how));
    let lets_out =
        |actions: &[SupervisorAction]| actions.contains(&SupervisorAction::ReleaseOutput(None));
    let mut core = protecting();
    assert!(!lets_out(&ended(&mut core, Err(fail()))), "its standby may run");
    assert_eq!(
        core.handle_event(SupervisorEvent::Request(B, SupervisorRequest::Release)),
        [SupervisorAction::ReleaseOutput(Some(B))]
    );
    let mut core = protecting();
    core.handle_event(SupervisorEvent::Terminate);
    assert!(!lets_out(&ended(&mut core, Ok(json!(1)))), "the VM is let go of");
    let SupervisorRequest::Protect(request) = protect() else { unreachable!() };
    let request = SupervisorRequest::Protect(ProtectRequest { alone: true, ..request });
    use FailureKind::{Ended, Lost, Other, Refused};
    for (kind, begins, leaves) in [
        (Lost, true, true),
        (Lost, false, false),
        (Other, true, false),
        (Refused, true, false),
        (Ended, true, false),
    ] {
        let mut core = SupervisorCore::new(false);
        core.handle_event(SupervisorEvent::Request(A, request.clone()));
        if begins {
            core.handle_event(SupervisorEvent::Protected(json!(1)));
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
    assert_eq!(
        core.handle_event(SupervisorEvent::ProtectionEnded(Err(fail()))),
        [failure_reply(A, fail())]
    );
    assert!(core.is_idle());
}

#[test]
fn a_protected_vm_is_released_before_it_is_stopped() {
    let mut core = protecting();
    assert_eq!(
        core.handle_event(SupervisorEvent::Request(B, stop(false))),
        [SupervisorAction::StopProtection]
    );
    let ended = core.handle_event(SupervisorEvent::ProtectionEnded(Ok(json!(2))));
    assert!(
        matches!(ended[..], [SupervisorAction::Reply(A, _), SupervisorAction::EndHypervisor(_)]),
        "{ended:?}"
    );
}

/// The guest may ignore the power button.
#[test]
fn a_vm_whose_power_button_is_pressed_stays_protected_until_it_ends() {
    let mut core = protecting();
    core.handle_event(SupervisorEvent::Protected(json!(1)));
    let request = StopRequest { powerdown_s: Some(1), ..StopRequest::default() };
    let asked = core.handle_event(SupervisorEvent::Request(B, SupervisorRequest::Stop(request)));
    assert_eq!(asked, [SupervisorAction::EndHypervisor(request)]);
    assert_eq!(core.handle_event(SupervisorEvent::StopFailed(fail())), [failure_reply(B, fail())]);
    assert_eq!(
        core.handle_event(SupervisorEvent::Request(A, SupervisorRequest::Release)),
        [SupervisorAction::Release]
    );
}

#[test]
fn only_a_standby_is_failed_over_to() {
    let refused = SupervisorCore::new(false)
        .handle_event(SupervisorEvent::Request(A, SupervisorRequest::Failover(HOW)));
    assert_eq!(kinds(&refused), [Some(FailureKind::Usage)]);
    let mut core = SupervisorCore::new_standby();
    assert_eq!(
        core.handle_event(SupervisorEvent::Request(A, SupervisorRequest::Failover(HOW))),
        [SupervisorAction::BeginFailover(A, HOW)]
    );
    assert_eq!(
        core.handle_event(SupervisorEvent::RestoreEnded(Ok(json!(1)))),
        [done_reply(A, json!(1))]
    );
    assert!(core.is_idle());
}

#[test]
fn a_standby_ends_at_once_when_it_is_stopped() {
    let mut core = SupervisorCore::new_standby();
    let kill = SupervisorAction::KillHypervisor { discard: false };
    assert_eq!(core.handle_event(SupervisorEvent::Request(A, stop(false))), [kill]);
    let record = SupervisorAction::RecordEnd { exit: ProcessExit::Stopped, reason: None };
    let ended = core.handle_event(SupervisorEvent::HypervisorGone(ProcessExit::Signal(9)));
    assert_eq!(ended, [record, done_reply(A, json!(null))]);
}

#[test]
fn a_refused_failover_is_reported_once_and_can_be_repeated() {
    let mut core = SupervisorCore::new_standby();
    assert_eq!(
        core.handle_event(SupervisorEvent::Request(A, SupervisorRequest::Failover(HOW))),
        [SupervisorAction::BeginFailover(A, HOW)]
    );
    assert_eq!(
        core.handle_event(SupervisorEvent::FailoverRefused(A, fail())),
        [failure_reply(A, fail())]
    );
    assert_eq!(
        core.handle_event(SupervisorEvent::Request(B, SupervisorRequest::Failover(HOW))),
        [SupervisorAction::BeginFailover(B, HOW)]
    );
    assert_eq!(
        core.handle_event(SupervisorEvent::RestoreEnded(Ok(json!(1)))),
        [done_reply(B, json!(1))]
    );
}

#[test]
fn a_failover_without_hypervisor_reports_the_known_cause() {
    let mut core = SupervisorCore::new_standby();
    core.handle_event(SupervisorEvent::Request(A, SupervisorRequest::Failover(HOW)));
    let wait = [SupervisorAction::CancelSave, SupervisorAction::StartGrace];
    assert_eq!(core.handle_event(SupervisorEvent::HypervisorGone(ProcessExit::Signal(9))), wait);
    let ended = core.handle_event(SupervisorEvent::RestoreEnded(Err(fail())));
    assert!(ended.contains(&failure_reply(A, fail())), "{ended:?}");
}

#[test]
fn a_failed_checkpoint_leaves_an_idle_supervisor() {
    let mut core = saving(false);
    assert_eq!(
        core.handle_event(SupervisorEvent::SaveEnded(Err(fail()))),
        [failure_reply(A, fail())]
    );
    let again = core
        .handle_event(SupervisorEvent::Request(B, SupervisorRequest::Checkpoint(request(false))));
    assert!(matches!(again[..], [SupervisorAction::BeginSave { .. }]));
}

#[test]
fn a_dead_client_cancels_its_checkpoint_only_if_requested() {
    assert_eq!(saving(false).handle_event(SupervisorEvent::ClientGone(A)), []);
    assert_eq!(saving(true).handle_event(SupervisorEvent::ClientGone(B)), []);
    assert_eq!(
        saving(true).handle_event(SupervisorEvent::ClientGone(A)),
        [SupervisorAction::CancelSave]
    );
}

#[test]
fn a_suspend_ends_the_vm_and_answers_when_it_has_ended() {
    let mut core = SupervisorCore::new(false);
    let begun =
        core.handle_event(SupervisorEvent::Request(A, SupervisorRequest::Suspend(request(false))));
    assert!(matches!(begun[..], [SupervisorAction::BeginSave { then_stop: true, .. }]));
    let quit =
        SupervisorAction::EndHypervisor(StopRequest { force: true, ..StopRequest::default() });
    assert_eq!(core.handle_event(SupervisorEvent::SaveEnded(Ok(json!(7)))), [quit]);
    let record = SupervisorAction::RecordEnd { exit: ProcessExit::Stopped, reason: None };
    assert_eq!(
        core.handle_event(SupervisorEvent::HypervisorGone(ProcessExit::Code(0))),
        [record, done_reply(A, json!(7))]
    );
}

#[test]
fn a_failed_suspend_does_not_end_the_vm() {
    let mut core = SupervisorCore::new(false);
    core.handle_event(SupervisorEvent::Request(A, SupervisorRequest::Suspend(request(false))));
    assert_eq!(
        core.handle_event(SupervisorEvent::SaveEnded(Err(fail()))),
        [failure_reply(A, fail())]
    );
    assert_eq!(
        core.handle_event(SupervisorEvent::Request(A, SupervisorRequest::Watch)),
        [SupervisorAction::ReplyStatus(A)]
    );
}

#[test]
fn stopping_during_a_checkpoint_needs_force() {
    let mut core = saving(false);
    let refused = core.handle_event(SupervisorEvent::Request(B, stop(false)));
    assert_eq!(kinds(&refused), [Some(FailureKind::Busy)]);
    let forced = core.handle_event(SupervisorEvent::Request(B, stop(true)));
    assert_eq!(
        forced,
        [SupervisorAction::CancelSave, SupervisorAction::KillHypervisor { discard: false }]
    );
    core.handle_event(SupervisorEvent::HypervisorGone(ProcessExit::Signal(9)));
    let ended = core.handle_event(SupervisorEvent::SaveEnded(Err(fail())));
    let record = SupervisorAction::RecordEnd { exit: ProcessExit::Stopped, reason: None };
    assert_eq!(ended, [record, failure_reply(A, fail()), done_reply(B, serde_json::Value::Null)]);
}

#[test]
fn every_client_that_requested_a_stop_receives_a_reply() {
    let mut core = SupervisorCore::new(false);
    core.handle_event(SupervisorEvent::Request(A, stop(false)));
    assert_eq!(core.handle_event(SupervisorEvent::Request(B, stop(false))), []);
    let ended = core.handle_event(SupervisorEvent::HypervisorGone(ProcessExit::Code(0)));
    assert_eq!(ended.len(), 3);
}

#[test]
fn a_guest_that_ignores_its_power_button_runs_on() {
    let mut core = SupervisorCore::new(false);
    core.handle_event(SupervisorEvent::Request(A, stop(false)));
    assert_eq!(core.handle_event(SupervisorEvent::StopFailed(fail())), [failure_reply(A, fail())]);
    assert!(matches!(
        core.handle_event(SupervisorEvent::Request(A, SupervisorRequest::Detach))[..],
        [SupervisorAction::DetachVm, _]
    ));
}

#[test]
fn a_hypervisor_that_dies_during_a_save_is_recorded_once_the_save_is_wound_up() {
    let mut core = saving(false);
    let gone = core.handle_event(SupervisorEvent::HypervisorGone(ProcessExit::Signal(11)));
    assert_eq!(gone, [SupervisorAction::CancelSave, SupervisorAction::StartGrace]);
    let record = SupervisorAction::RecordEnd { exit: ProcessExit::Signal(11), reason: None };
    assert_eq!(
        core.handle_event(SupervisorEvent::SaveEnded(Err(fail()))),
        [record, failure_reply(A, fail())]
    );
}

#[test]
fn an_operation_ended_by_the_hypervisors_death_reports_that_death() {
    let exit = ProcessExit::Signal(9);
    let record = SupervisorAction::RecordEnd { exit, reason: None };
    let reply = |what: &str| {
        let text = format!("the VM ended while it was being {what} (killed by signal 9)");
        failure_reply(A, Failure::new(FailureKind::Ended, text))
    };
    for cut_short in [cancelled(), ended()] {
        let mut core = saving(false);
        core.handle_event(SupervisorEvent::HypervisorGone(exit));
        let over = core.handle_event(SupervisorEvent::SaveEnded(Err(cut_short)));
        assert_eq!(over, [record.clone(), reply("saved")]);
    }
    let mut core = saving(false);
    assert_eq!(core.handle_event(SupervisorEvent::SaveEnded(Err(ended()))), []);
    assert_eq!(
        core.handle_event(SupervisorEvent::HypervisorGone(exit)),
        [record.clone(), reply("saved")]
    );
    let mut core = SupervisorCore::new(true);
    core.handle_event(SupervisorEvent::Request(A, SupervisorRequest::Watch));
    assert_eq!(core.handle_event(SupervisorEvent::RestoreEnded(Err(ended()))), []);
    assert_eq!(
        core.handle_event(SupervisorEvent::HypervisorGone(exit)),
        [record.clone(), reply("restored")]
    );
    let mut core = SupervisorCore::new(true);
    core.handle_event(SupervisorEvent::Request(A, SupervisorRequest::Watch));
    core.handle_event(SupervisorEvent::HypervisorGone(exit));
    assert_eq!(
        core.handle_event(SupervisorEvent::RestoreEnded(Err(ended()))),
        [record, reply("restored")]
    );
}

#[test]
fn a_failed_restore_reports_its_cause_though_the_hypervisor_died() {
    let mut core = SupervisorCore::new(true);
    core.handle_event(SupervisorEvent::Request(A, SupervisorRequest::Watch));
    let exit = ProcessExit::Signal(9);
    assert_eq!(
        core.handle_event(SupervisorEvent::HypervisorGone(exit)),
        [SupervisorAction::CancelSave, SupervisorAction::StartGrace]
    );
    let reason = Some(fail());
    let record = SupervisorAction::RecordEnd { exit, reason };
    assert_eq!(
        core.handle_event(SupervisorEvent::RestoreEnded(Err(fail()))),
        [record, failure_reply(A, fail())]
    );
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
    assert_eq!(core.handle_event(SupervisorEvent::GraceOver), []);
    core.handle_event(SupervisorEvent::HypervisorGone(ProcessExit::Signal(11)));
    let over = core.handle_event(SupervisorEvent::GraceOver);
    assert_eq!(kinds(&over), [None, Some(FailureKind::Ended)]);
}

#[test]
fn a_restore_that_cannot_continue_ends_its_vm_with_a_reason() {
    let mut core = SupervisorCore::new(true);
    assert_eq!(core.handle_event(SupervisorEvent::Request(A, SupervisorRequest::Watch)), []);
    assert_eq!(
        core.handle_event(SupervisorEvent::RestoreEnded(Err(fail()))),
        [SupervisorAction::KillHypervisor { discard: false }]
    );
    let reason = Some(fail());
    let exit = ProcessExit::Signal(9);
    let record = SupervisorAction::RecordEnd { exit, reason };
    assert_eq!(
        core.handle_event(SupervisorEvent::HypervisorGone(exit)),
        [record, failure_reply(A, fail())]
    );
}

#[test]
fn no_detach_while_pages_are_missing() {
    let mut core = SupervisorCore::new(true);
    let refused = core.handle_event(SupervisorEvent::Request(A, SupervisorRequest::Detach));
    assert_eq!(kinds(&refused), [Some(FailureKind::Busy)]);
    assert_eq!(core.handle_event(SupervisorEvent::Terminate), []);
    assert_eq!(
        core.handle_event(SupervisorEvent::RestoreEnded(Ok(json!(1)))),
        [SupervisorAction::DetachVm]
    );
}

#[test]
fn sigterm_cancels_a_save_and_leaves() {
    let mut core = saving(false);
    assert_eq!(core.handle_event(SupervisorEvent::Terminate), [SupervisorAction::CancelSave]);
    assert_eq!(core.handle_event(SupervisorEvent::Terminate), []);
    assert_eq!(
        core.handle_event(SupervisorEvent::SaveEnded(Err(fail()))),
        [failure_reply(A, fail()), SupervisorAction::DetachVm]
    );
}

#[test]
fn a_merge_ends_before_the_vm_is_stopped() {
    let mut core = SupervisorCore::new(false);
    let begun = core.handle_event(SupervisorEvent::Request(A, SupervisorRequest::CommitDisks));
    assert_eq!(begun, [SupervisorAction::BeginMerge { all: true }]);
    let refused = core
        .handle_event(SupervisorEvent::Request(B, SupervisorRequest::Checkpoint(request(false))));
    assert_eq!(kinds(&refused), [Some(FailureKind::Busy)]);
    assert_eq!(
        core.handle_event(SupervisorEvent::Request(B, stop(false))),
        [SupervisorAction::CancelSave]
    );
    let cancelled = Failure::new(FailureKind::Interrupted, "cancelled");
    let ended = core.handle_event(SupervisorEvent::MergeEnded(Err(cancelled.clone())));
    let end = SupervisorAction::EndHypervisor(StopRequest::default());
    assert_eq!(ended, [failure_reply(A, cancelled), end]);
}

/// The client ids are filled in later: each request comes from a client of its own.
fn any_event() -> impl Strategy<Value = SupervisorEvent> {
    let nobody = ClientId(0);
    let request = prop_oneof![
        Just(SupervisorRequest::Status),
        Just(SupervisorRequest::Watch),
        Just(SupervisorRequest::Detach),
        any::<bool>().prop_map(stop),
        Just(protect()),
        Just(SupervisorRequest::Release),
        Just(SupervisorRequest::MergeDisks),
        Just(SupervisorRequest::CommitDisks),
        Just(SupervisorRequest::CommandLine),
        Just(SupervisorRequest::CheckOperations),
        Just(SupervisorRequest::AddKeys { keys: Vec::new() }),
        Just(SupervisorRequest::Failover(HOW)),
        Just(SupervisorRequest::ReleaseMember),
        Just(SupervisorRequest::Member(crate::records::control_protocol::MemberRequest::Leave)),
        any::<bool>().prop_map(|cancel| SupervisorRequest::Checkpoint(request(cancel))),
        any::<bool>().prop_map(|cancel| SupervisorRequest::Suspend(request(cancel))),
    ];
    prop_oneof![
        3 => request.prop_map(move |request| SupervisorEvent::Request(nobody, request)),
        1 => Just(SupervisorEvent::SaveEnded(Ok(json!(1)))),
        1 => Just(SupervisorEvent::SaveEnded(Err(fail()))),
        1 => Just(SupervisorEvent::SaveEnded(Err(ended()))),
        1 => Just(SupervisorEvent::MergeEnded(Ok(json!(1)))),
        1 => Just(SupervisorEvent::MergeEnded(Err(fail()))),
        1 => Just(SupervisorEvent::MergeEnded(Err(ended()))),
        1 => Just(SupervisorEvent::RestoreEnded(Ok(json!(1)))),
        1 => Just(SupervisorEvent::RestoreEnded(Err(fail()))),
        1 => Just(SupervisorEvent::RestoreEnded(Err(ended()))),
        1 => Just(SupervisorEvent::Protected(json!(1))),
        1 => Just(SupervisorEvent::ProtectionEnded(Ok(json!(1)))),
        1 => Just(SupervisorEvent::ProtectionEnded(Err(fail()))),
        1 => Just(SupervisorEvent::ProtectionEnded(Err(ended()))),
        1 => Just(SupervisorEvent::StopFailed(fail())),
        1 => Just(SupervisorEvent::GuardGone(ProcessRole::Guard)),
        1 => Just(SupervisorEvent::GuardDue(ProcessRole::Watcher)),
        1 => Just(SupervisorEvent::Terminate),
    ]
}

/// According to the record it runs elsewhere: its operation ends here, and the reason is reported.
#[test]
fn a_vm_that_runs_elsewhere_is_ended_with_a_reason() {
    let fence = || SupervisorRequest::Fence { why: "it runs on b".to_owned() };
    let kill = SupervisorAction::KillHypervisor { discard: false };
    let mut protecting = SupervisorCore::new(false);
    protecting.handle_event(SupervisorEvent::Request(A, protect()));
    for mut core in [SupervisorCore::new(false), SupervisorCore::new(true), protecting] {
        let actions = core.handle_event(SupervisorEvent::Request(B, fence()));
        assert_eq!(actions, [kill.clone(), done_reply(B, serde_json::Value::Null)]);
        let mut actions =
            core.handle_event(SupervisorEvent::HypervisorGone(ProcessExit::Signal(9)));
        actions.extend(core.handle_event(SupervisorEvent::GraceOver));
        let why = Some(Failure::new(FailureKind::Lost, "it runs on b"));
        let record = SupervisorAction::RecordEnd { exit: ProcessExit::Signal(9), reason: why };
        assert!(actions.contains(&record), "{actions:?}");
    }
    let refused = SupervisorCore::new_standby().handle_event(SupervisorEvent::Request(A, fence()));
    assert!(
        matches!(&refused[..], [SupervisorAction::Reply(A, SupervisorReply::Failed(_))]),
        "{refused:?}"
    );
}

#[test]
fn a_lease_does_not_release_buffered_output() {
    let mut core = SupervisorCore::new(false);
    assert_eq!(
        core.handle_event(SupervisorEvent::Request(A, SupervisorRequest::GoOn)),
        [SupervisorAction::ResumeOutput(A)]
    );
    core.handle_event(SupervisorEvent::Request(A, protect()));
    let refused = core.handle_event(SupervisorEvent::Request(B, SupervisorRequest::GoOn));
    assert!(
        matches!(&refused[..], [SupervisorAction::Reply(B, SupervisorReply::Failed(_))]),
        "{refused:?}"
    );
}

proptest! {
    /// Every request gets one last reply, whatever happens meanwhile and however the VM ends.
    #[test]
    fn every_client_receives_a_reply(
        events in proptest::collection::vec(any_event(), 0..40),
        begun in 0..3_u8,
    ) {
        let ending = [SupervisorEvent::HypervisorGone(ProcessExit::Signal(9)), SupervisorEvent::GraceOver];
        let mut core = match begun {
            0 => SupervisorCore::new_standby(),
            restoring => SupervisorCore::new(restoring == 1),
        };
        let mut waiting = BTreeSet::new();
        let mut over = false;
        for (number, event) in events.into_iter().chain(ending).enumerate() {
            if over {
                break;
            }
            let event = match event {
                SupervisorEvent::Request(_, request) => {
                    waiting.insert(ClientId(number as u64));
                    SupervisorEvent::Request(ClientId(number as u64), request)
                }
                event => event,
            };
            for action in core.handle_event(event) {
                match action {
                    SupervisorAction::Reply(client, reply) if reply.is_last() => {
                        prop_assert!(waiting.remove(&client), "{client:?} was not waiting");
                    }
                    SupervisorAction::ReleaseOutput(Some(client)) => prop_assert!(waiting.remove(&client)),
                    SupervisorAction::ReplyStatus(client)
                    | SupervisorAction::CommandLine(client)
                    | SupervisorAction::CheckOperations(client)
                    | SupervisorAction::AddKeys { client, .. }
                    | SupervisorAction::Member(client, _) => {
                        prop_assert!(waiting.remove(&client));
                    }
                    SupervisorAction::DetachVm | SupervisorAction::RecordEnd { .. } => over = true,
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
    let mut core = SupervisorCore::new(false);
    core.set_member(true);
    core.handle_event(SupervisorEvent::Request(A, protect()));
    let refused = core.handle_event(SupervisorEvent::Request(B, SupervisorRequest::Release));
    assert!(matches!(&refused[..], [SupervisorAction::Reply(B, SupervisorReply::Failed(failure))]
        if failure.kind == FailureKind::Refused));
    let leave = SupervisorRequest::Member(crate::records::control_protocol::MemberRequest::Leave);
    let busy = core.handle_event(SupervisorEvent::Request(B, leave.clone()));
    assert!(matches!(&busy[..], [SupervisorAction::Reply(B, SupervisorReply::Failed(failure))]
        if failure.kind == FailureKind::Busy));
    let card = crate::records::control_protocol::MemberRequest::Card;
    let asked =
        core.handle_event(SupervisorEvent::Request(B, SupervisorRequest::Member(card.clone())));
    assert_eq!(asked, [SupervisorAction::Member(B, card)]);
    assert_eq!(
        core.handle_event(SupervisorEvent::Request(B, SupervisorRequest::ReleaseMember)),
        [SupervisorAction::Release]
    );
    core.handle_event(SupervisorEvent::ProtectionEnded(Ok(serde_json::Value::Null)));
    assert!(matches!(
        core.handle_event(SupervisorEvent::Request(B, leave))[..],
        [SupervisorAction::Member(B, _)]
    ));
    // The backup is lost: the client that reports it is trusted.
    assert_eq!(
        core.handle_event(SupervisorEvent::Request(B, SupervisorRequest::Release)),
        [SupervisorAction::ReleaseOutput(Some(B))]
    );
}

#[test]
fn a_restore_that_fails_here_leaves_the_vm_to_a_successor_unless_it_is_to_be_ended() {
    let mut core = SupervisorCore::new(true).with_vm_left_to_successor(true);
    assert_eq!(
        core.handle_event(SupervisorEvent::RestoreEnded(Err(fail()))),
        [SupervisorAction::Resign(fail())]
    );
    let mut core = SupervisorCore::new(true).with_vm_left_to_successor(false);
    let kill = SupervisorAction::KillHypervisor { discard: false };
    assert_eq!(core.handle_event(SupervisorEvent::RestoreEnded(Err(fail()))), [kill]);
}
