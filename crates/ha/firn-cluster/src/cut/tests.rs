use std::time::Duration;

use super::*;

const MS: Duration = Duration::from_millis(1);
const G: Generation = Generation(3);
const A: VmId = VmId(0);
const B: VmId = VmId(1);

fn request(count: u32) -> RequestNumber {
    RequestNumber { term: 1, count }
}

fn marker() -> CutMarker {
    CutMarker::new(G, 0, A, Epoch(5))
}

fn initiator() -> CheckpointInitiator {
    let pace =
        RequestTiming { cut_interval: 100 * MS, retry_after: 50 * MS, give_up_after: 500 * MS };
    CheckpointInitiator::new((G, 0), 1, 7, [A, B], pace)
}

fn answer(count: u32, vm: VmId, epoch: u64) -> MarkAnswer {
    let marks = vec![(vm, Epoch(epoch))];
    MarkAnswer { generation: G, layout: 0, request: request(count), marks }
}

#[test]
fn a_mark_is_the_next_cut_and_answered_for_when_it_is_copied() {
    let mut marker = marker();
    assert!(!marker.is_cut_needed());
    assert_eq!(marker.request_mark(G, request(1)), None);
    assert!(marker.is_cut_needed() && marker.current_stamp().mark < request(1));
    marker.record_cut(Epoch(6));
    assert!(!marker.is_cut_needed() && marker.current_stamp().mark == request(1));
    assert_eq!(marker.request_mark(G, request(1)), None, "nobody has a copy");
    marker.record_commit(Epoch(6));
    assert_eq!(marker.request_mark(G, request(1)), Some(answer(1, A, 6)));
    marker.record_cut(Epoch(7));
    marker.record_commit(Epoch(7));
    assert_eq!(
        marker.request_mark(G, request(1)),
        Some(answer(1, A, 6)),
        "a mark stays where it is"
    );
    marker.record_sent(Epoch(8));
    assert_eq!(marker.request_mark(G, request(2)), None);
    marker.record_cut(Epoch(8));
    marker.record_commit(Epoch(9));
    assert_eq!(marker.request_mark(G, request(2)), Some(answer(2, A, 8)));
    assert_eq!(marker.request_mark(G, request(1)), None, "it can't be answered truly any more");
    assert_eq!(marker.request_mark(Generation(2), request(3)), None);
    assert!(!marker.is_cut_needed());
}

#[test]
fn a_frame_from_behind_a_cut_waits_for_its_receivers() {
    let mut marker = marker();
    let stamp = FrameStamp { generation: G, mark: request(4) };
    marker.record_sent(Epoch(6));
    assert_eq!(marker.check_frame(stamp), StampDecision::AfterCut);
    assert_eq!(marker.check_frame(stamp), StampDecision::AfterCut, "asking is no cut");
    assert!(marker.is_cut_needed());
    marker.record_cut(Epoch(6));
    assert_eq!(marker.check_frame(stamp), StampDecision::Deliver);
    assert_eq!(marker.current_stamp(), stamp);
    marker.record_commit(Epoch(6));
    assert_eq!(marker.request_mark(G, request(4)), Some(answer(4, A, 6)));
}

#[test]
fn a_silent_member_is_not_awaited() {
    let mut marker = marker();
    for epoch in 6..9 {
        marker.record_cut(Epoch(epoch));
        marker.record_commit(Epoch(epoch - 1));
    }
    assert_eq!(
        marker.request_mark(G, request(1)),
        Some(answer(1, A, 7)),
        "the newest that is copied"
    );
    marker.record_sent(Epoch(8));
    assert_eq!(marker.request_mark(G, request(2)), None);
    assert!(!marker.is_cut_needed(), "it is marked, and not copied");
    marker.record_commit(Epoch(8));
    assert_eq!(marker.request_mark(G, request(2)), Some(answer(2, A, 8)));
    marker.record_sent(Epoch(9));
    let stamp = FrameStamp { generation: G, mark: request(3) };
    assert_eq!(marker.check_frame(stamp), StampDecision::AfterCut);
}

#[test]
fn frames_of_other_timelines_are_not_delivered() {
    let mut marker = marker();
    let of = |generation| FrameStamp { generation: Generation(generation), mark: request(9) };
    assert_eq!(marker.check_frame(of(2)), StampDecision::Undone);
    assert_eq!(marker.check_frame(of(4)), StampDecision::Early);
    assert_eq!(marker.current_stamp().mark, RequestNumber::default());
}

#[test]
fn a_checkpoint_exists_when_all_have_answered_and_it_is_on_record() {
    let mut initiator = initiator();
    let vms = [A, B].into();
    assert_eq!(
        initiator.advance_time(MS),
        [InitiatorAction::Ask { generation: G, request: request(1), vms }]
    );
    assert_eq!(initiator.record_answer(&answer(1, A, 5)), None);
    assert_eq!(initiator.record_answer(&answer(1, A, 5)), None, "twice the same");
    let vms = [B].into();
    assert_eq!(
        initiator.advance_time(60 * MS),
        [InitiatorAction::Ask { generation: G, request: request(1), vms }]
    );
    let marks = [(A, Epoch(5)), (B, Epoch(2))].into();
    let checkpoint =
        GlobalCheckpoint { number: 8, generation: G, layout: 0, request: request(1), marks };
    let record = initiator.record_answer(&answer(1, B, 2));
    assert_eq!(record, Some(InitiatorAction::Record(checkpoint.clone())));
    assert_eq!(initiator.confirm_recorded(), Some(InitiatorAction::Announce(checkpoint)));
    assert_eq!(initiator.advance_time(70 * MS), [], "not due");
    assert!(matches!(initiator.advance_time(101 * MS)[..], [InitiatorAction::Ask { .. }]));
}

#[test]
fn an_old_answer_is_no_part_of_a_new_cut() {
    let mut initiator = initiator();
    initiator.advance_time(MS);
    initiator.record_answer(&answer(1, A, 5));
    assert!(
        matches!(initiator.advance_time(600 * MS)[..], [InitiatorAction::Ask { .. }]),
        "given up"
    );
    assert_eq!(initiator.record_answer(&answer(2, B, 2)), None);
    assert_eq!(initiator.record_answer(&answer(1, A, 5)), None);
}

#[test]
fn an_initiator_of_an_undone_timeline_retires() {
    let mut initiator = initiator();
    initiator.advance_time(MS);
    initiator.record_answer(&answer(1, A, 5));
    initiator.record_answer(&answer(1, B, 5));
    initiator.retire_refused();
    assert!(initiator.is_retired());
    assert_eq!(initiator.confirm_recorded(), None);
    assert_eq!(initiator.advance_time(9000 * MS), []);
}

#[test]
fn a_copy_at_a_backup_that_is_gone_is_not_marked() {
    let marked = || {
        let mut marker = marker();
        marker.request_mark(G, request(1));
        marker.record_cut(Epoch(6));
        marker.record_commit(Epoch(6));
        marker
    };
    let mut kept = marked();
    kept.change_layout(1, false);
    assert_eq!(kept.request_mark(G, request(1)), Some(MarkAnswer { layout: 1, ..answer(1, A, 6) }));
    let mut lost = marked();
    lost.change_layout(1, true);
    lost.record_commit(Epoch(8));
    assert_eq!(lost.request_mark(G, request(1)), None);
    lost.request_mark(G, request(2));
    lost.record_cut(Epoch(9));
    lost.record_commit(Epoch(9));
    assert_eq!(lost.request_mark(G, request(2)), Some(MarkAnswer { layout: 1, ..answer(2, A, 9) }));
}
