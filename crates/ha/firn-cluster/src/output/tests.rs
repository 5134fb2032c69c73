use proptest::prelude::*;

use super::*;
use crate::{Epoch, FrameNumber, VmId};

const B: FrameDestination = FrameDestination::Vm(VmId(1));

fn seqs(sent: &[SentFrame<u32>]) -> Vec<u64> {
    sent.iter().map(|sent| sent.seq.0).collect()
}

#[test]
fn frames_wait_for_their_own_epoch() {
    let mut outbox = FrameOutbox::new(100);
    outbox.push_frame(Epoch(1), B, 10, 1);
    outbox.push_frame(Epoch(2), B, 11, 1);
    assert_eq!(seqs(&outbox.release_inside(Epoch(0))), [] as [u64; 0]);
    assert_eq!(seqs(&outbox.release_inside(Epoch(1))), [1]);
    assert_eq!(seqs(&outbox.release_inside(Epoch(2))), [2], "none twice");
}

#[test]
fn frames_to_the_outside_wait_for_a_global_checkpoint() {
    let mut outbox = FrameOutbox::new(100);
    outbox.push_frame(Epoch(1), FrameDestination::Outside, 10, 1);
    assert!(outbox.release_inside(Epoch(1)).is_empty());
    assert_eq!(seqs(&outbox.release_outside(Epoch(1))), [1]);
}

#[test]
fn frames_in_flight_are_sent_again_after_a_rollback() {
    let mut outbox = FrameOutbox::new(100);
    for epoch in 1..=4 {
        outbox.push_frame(Epoch(epoch), B, epoch as u32, 1);
    }
    outbox.release_inside(Epoch(4));
    outbox.trim_up_to(B, FrameNumber(1));
    outbox.roll_back(Epoch(3));
    assert_eq!(seqs(&outbox.release_inside(Epoch(3))), [2, 3]);
    assert_eq!(outbox.push_frame(Epoch(4), B, 44, 1), FrameNumber(4), "numbers are used again");
    assert_eq!(seqs(&outbox.released_after(B, FrameNumber(2), 9)), [3]);
    assert_eq!(outbox.frames_of(Epoch(4)), [SentFrame { to: B, seq: FrameNumber(4), frame: 44 }]);
}

#[test]
fn an_unreleased_frame_cannot_be_trimmed() {
    let mut outbox = FrameOutbox::new(100);
    outbox.push_frame(Epoch(1), B, 10, 1);
    outbox.trim_up_to(B, FrameNumber(9));
    assert_eq!(seqs(&outbox.release_inside(Epoch(1))), [1]);
}

#[test]
fn at_the_bound_the_vm_is_not_read_from_until_half_is_free() {
    let mut outbox = FrameOutbox::new(10);
    for epoch in 1..=5 {
        outbox.push_frame(Epoch(epoch), B, 0, 2);
    }
    assert_eq!(outbox.input_flow(), InputFlow::Stop);
    outbox.release_inside(Epoch(5));
    outbox.trim_up_to(B, FrameNumber(2));
    assert_eq!((outbox.input_flow(), outbox.buffered_bytes()), (InputFlow::Stop, 6));
    outbox.trim_up_to(B, FrameNumber(3));
    assert_eq!((outbox.input_flow(), outbox.buffered_bytes()), (InputFlow::Go, 4));
}

#[test]
fn each_frame_is_accepted_once_and_in_order() {
    let mut counters = ReceiveCounters::new(Epoch(0));
    assert_eq!(
        counters.accept_frame(VmId(7), FrameNumber(2)),
        ReceiveDecision::Missing(FrameNumber(1))
    );
    assert_eq!(counters.accept_frame(VmId(7), FrameNumber(1)), ReceiveDecision::Deliver);
    assert_eq!(counters.accept_frame(VmId(7), FrameNumber(1)), ReceiveDecision::Known);
    counters.record_cut(Epoch(1));
    assert_eq!(counters.accept_frame(VmId(7), FrameNumber(2)), ReceiveDecision::Deliver);
    counters.record_cut(Epoch(2));
    assert_eq!(counters.drop_cuts_before(Epoch(1)), [(VmId(7), FrameNumber(1))]);
    counters.roll_back(Epoch(1));
    assert_eq!(counters.accept_frame(VmId(7), FrameNumber(2)), ReceiveDecision::Deliver);
}

proptest! {
    /// After a rollback, a backup's copy of an outbox, which gets each epoch, sends the same frames
    /// again as the primary's own outbox.
    #[test]
    fn the_backups_copy_is_as_good_as_the_primarys(
        sends in prop::collection::vec((0..4_u64, 0..3_u16, any::<bool>()), 0..60),
        trims in prop::collection::vec((0..3_u16, 0..20_u64), 0..4),
        back_to in 0..40_u64,
    ) {
        let (mut primary, mut backup) = (FrameOutbox::new(1000), FrameOutbox::new(1000));
        let mut epoch = Epoch(1);
        for (at, (skip, vm, outside)) in sends.into_iter().enumerate() {
            for _ in 0..skip {
                for sent in primary.frames_of(epoch) {
                    prop_assert_eq!(backup.push_frame(epoch, sent.to, sent.frame, 1), sent.seq);
                }
                epoch = epoch.next();
            }
            let to = if outside { FrameDestination::Outside } else { FrameDestination::Vm(VmId(vm)) };
            primary.push_frame(epoch, to, at, 1);
        }
        let back_to = Epoch(back_to.min(epoch.0 - 1));
        for outbox in [&mut primary, &mut backup] {
            outbox.release_inside(back_to);
            trims.iter().for_each(|&(vm, seq)| outbox.trim_up_to(FrameDestination::Vm(VmId(vm)), FrameNumber(seq)));
            outbox.roll_back(back_to);
        }
        prop_assert_eq!(primary.release_inside(back_to), backup.release_inside(back_to));
        prop_assert_eq!(primary.release_outside(back_to), backup.release_outside(back_to));
        prop_assert_eq!(primary.buffered_bytes(), backup.buffered_bytes());
    }
}
