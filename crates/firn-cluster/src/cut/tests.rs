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
    Marker::new(G, 0, [(A, Epoch(5))])
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
fn a_mark_stays_where_it_is() {
    let mut marker = marker();
    assert_eq!(marker.requested(G, request(1)), Some(answer(1, A, 5)));
    marker.committed(A, Epoch(6));
    assert_eq!(marker.requested(G, request(1)), Some(answer(1, A, 5)));
    assert_eq!(marker.requested(G, request(2)), Some(answer(2, A, 6)));
    assert_eq!(marker.requested(G, request(1)), None, "it can't be answered truly any more");
    assert_eq!(marker.requested(Generation(2), request(3)), None);
}

#[test]
fn a_frame_from_behind_a_mark_makes_its_receiver_mark_first() {
    let mut marker = marker();
    let stamp = Stamp { generation: G, mark: request(4) };
    assert_eq!(marker.arriving(stamp), Arriving::DeliverMarked(answer(4, A, 5)));
    assert_eq!(marker.arriving(stamp), Arriving::Deliver);
    marker.committed(A, Epoch(6));
    assert_eq!(marker.requested(G, request(4)), Some(answer(4, A, 5)));
    assert_eq!(marker.stamp(), stamp);
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
    let mut marker = Marker::new(G, 0, [(A, Epoch(5)), (B, Epoch(6))]);
    marker.requested(G, request(1));
    marker.rearranged(1, [A]);
    let answer = |count, marks: &[(Vm, Epoch)]| {
        Some(Answer { generation: G, layout: 1, request: request(count), marks: marks.to_vec() })
    };
    assert_eq!(marker.requested(G, request(1)), answer(1, &[(B, Epoch(6))]));
    marker.committed(A, Epoch(8));
    assert_eq!(marker.requested(G, request(1)), answer(1, &[(B, Epoch(6))]));
    assert_eq!(marker.requested(G, request(2)), answer(2, &[(A, Epoch(8)), (B, Epoch(6))]));
}
