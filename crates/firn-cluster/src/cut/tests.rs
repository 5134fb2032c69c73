use std::time::Duration;

use super::*;

const MS: Duration = Duration::from_millis(1);
const G: Generation = Generation(3);
const A: Vm = Vm(0);
const B: Vm = Vm(1);

fn request(count: u32) -> RequestNumber {
    RequestNumber { term: 1, count }
}

fn marker() -> Marker {
    Marker::new(G, 0, A, Epoch(5))
}

fn initiator() -> Initiator {
    let pace = Pace { every: 100 * MS, again_after: 50 * MS, give_up_after: 500 * MS };
    Initiator::new((G, 0), 1, 7, [A, B], pace)
}

fn answer(count: u32, vm: Vm, epoch: u64) -> Answer {
    let marks = vec![(vm, Epoch(epoch))];
    Answer { generation: G, layout: 0, request: request(count), marks }
}

#[test]
fn a_mark_is_the_next_cut_and_answered_for_when_it_is_copied() {
    let mut marker = marker();
    assert!(!marker.wants_cut());
    assert_eq!(marker.requested(G, request(1)), None);
    assert!(marker.wants_cut() && marker.stamp().mark < request(1));
    marker.cut(Epoch(6));
    assert!(!marker.wants_cut() && marker.stamp().mark == request(1));
    assert_eq!(marker.requested(G, request(1)), None, "nobody has a copy");
    marker.committed(Epoch(6));
    assert_eq!(marker.requested(G, request(1)), Some(answer(1, A, 6)));
    marker.cut(Epoch(7));
    marker.committed(Epoch(7));
    assert_eq!(marker.requested(G, request(1)), Some(answer(1, A, 6)), "a mark stays where it is");
    marker.sent(Epoch(8));
    assert_eq!(marker.requested(G, request(2)), None);
    marker.cut(Epoch(8));
    marker.committed(Epoch(9));
    assert_eq!(marker.requested(G, request(2)), Some(answer(2, A, 8)));
    assert_eq!(marker.requested(G, request(1)), None, "it can't be answered truly any more");
    assert_eq!(marker.requested(Generation(2), request(3)), None);
    assert!(!marker.wants_cut());
}

#[test]
fn a_frame_from_behind_a_cut_waits_for_its_receivers() {
    let mut marker = marker();
    let stamp = Stamp { generation: G, mark: request(4) };
    marker.sent(Epoch(6));
    assert_eq!(marker.arriving(stamp), Arriving::AfterCut);
    assert_eq!(marker.arriving(stamp), Arriving::AfterCut, "asking is no cut");
    assert!(marker.wants_cut());
    marker.cut(Epoch(6));
    assert_eq!(marker.arriving(stamp), Arriving::Deliver);
    assert_eq!(marker.stamp(), stamp);
    marker.committed(Epoch(6));
    assert_eq!(marker.requested(G, request(4)), Some(answer(4, A, 6)));
}

#[test]
fn who_has_sent_nothing_since_a_cut_is_not_waited_for() {
    let mut marker = marker();
    for epoch in 6..9 {
        marker.cut(Epoch(epoch));
        marker.committed(Epoch(epoch - 1));
    }
    assert_eq!(marker.requested(G, request(1)), Some(answer(1, A, 7)), "the newest that is copied");
    marker.sent(Epoch(8));
    assert_eq!(marker.requested(G, request(2)), None);
    assert!(!marker.wants_cut(), "it is marked, and not copied");
    marker.committed(Epoch(8));
    assert_eq!(marker.requested(G, request(2)), Some(answer(2, A, 8)));
    marker.sent(Epoch(9));
    let stamp = Stamp { generation: G, mark: request(3) };
    assert_eq!(marker.arriving(stamp), Arriving::AfterCut);
}

#[test]
fn frames_of_other_timelines_are_not_delivered() {
    let mut marker = marker();
    let of = |generation| Stamp { generation: Generation(generation), mark: request(9) };
    assert_eq!(marker.arriving(of(2)), Arriving::Undone);
    assert_eq!(marker.arriving(of(4)), Arriving::Early);
    assert_eq!(marker.stamp().mark, RequestNumber::default());
}

#[test]
fn a_checkpoint_exists_when_all_have_answered_and_it_is_on_record() {
    let mut initiator = initiator();
    let vms = [A, B].into();
    assert_eq!(initiator.tick(MS), [Action::Ask { generation: G, request: request(1), vms }]);
    assert_eq!(initiator.answered(&answer(1, A, 5)), None);
    assert_eq!(initiator.answered(&answer(1, A, 5)), None, "twice the same");
    let vms = [B].into();
    assert_eq!(initiator.tick(60 * MS), [Action::Ask { generation: G, request: request(1), vms }]);
    let marks = [(A, Epoch(5)), (B, Epoch(2))].into();
    let checkpoint =
        GlobalCheckpoint { number: 8, generation: G, layout: 0, request: request(1), marks };
    let record = initiator.answered(&answer(1, B, 2));
    assert_eq!(record, Some(Action::Record(checkpoint.clone())));
    assert_eq!(initiator.recorded(), Some(Action::Announce(checkpoint)));
    assert_eq!(initiator.tick(70 * MS), [], "not due");
    assert!(matches!(initiator.tick(101 * MS)[..], [Action::Ask { .. }]));
}

#[test]
fn an_old_answer_is_no_part_of_a_new_cut() {
    let mut initiator = initiator();
    initiator.tick(MS);
    initiator.answered(&answer(1, A, 5));
    assert!(matches!(initiator.tick(600 * MS)[..], [Action::Ask { .. }]), "given up");
    assert_eq!(initiator.answered(&answer(2, B, 2)), None);
    assert_eq!(initiator.answered(&answer(1, A, 5)), None);
}

#[test]
fn an_initiator_of_an_undone_timeline_retires() {
    let mut initiator = initiator();
    initiator.tick(MS);
    initiator.answered(&answer(1, A, 5));
    initiator.answered(&answer(1, B, 5));
    initiator.refused();
    assert!(initiator.is_retired());
    assert_eq!(initiator.recorded(), None);
    assert_eq!(initiator.tick(9000 * MS), []);
}

#[test]
fn a_copy_at_a_backup_that_is_gone_is_not_marked() {
    let marked = || {
        let mut marker = marker();
        marker.requested(G, request(1));
        marker.cut(Epoch(6));
        marker.committed(Epoch(6));
        marker
    };
    let mut kept = marked();
    kept.rearranged(1, false);
    assert_eq!(kept.requested(G, request(1)), Some(Answer { layout: 1, ..answer(1, A, 6) }));
    let mut lost = marked();
    lost.rearranged(1, true);
    lost.committed(Epoch(8));
    assert_eq!(lost.requested(G, request(1)), None);
    lost.requested(G, request(2));
    lost.cut(Epoch(9));
    lost.committed(Epoch(9));
    assert_eq!(lost.requested(G, request(2)), Some(Answer { layout: 1, ..answer(2, A, 9) }));
}
