use proptest::prelude::*;

use super::*;
use crate::{Epoch, Seq, Vm};

const B: To = To::Vm(Vm(1));

fn seqs(sent: &[Sent<u32>]) -> Vec<u64> {
    sent.iter().map(|sent| sent.seq.0).collect()
}

#[test]
fn frames_wait_for_their_own_epoch() {
    let mut outbox = Outbox::new(100);
    outbox.push(Epoch(1), B, 10, 1);
    outbox.push(Epoch(2), B, 11, 1);
    assert_eq!(seqs(&outbox.committed(Epoch(0))), [] as [u64; 0]);
    assert_eq!(seqs(&outbox.committed(Epoch(1))), [1]);
    assert_eq!(seqs(&outbox.committed(Epoch(2))), [2], "none twice");
}

#[test]
fn frames_to_the_outside_wait_for_a_global_checkpoint() {
    let mut outbox = Outbox::new(100);
    outbox.push(Epoch(1), To::Outside, 10, 1);
    assert!(outbox.committed(Epoch(1)).is_empty());
    assert_eq!(seqs(&outbox.globally(Epoch(1))), [1]);
}

#[test]
fn what_was_in_flight_is_sent_again_after_a_rollback() {
    let mut outbox = Outbox::new(100);
    for epoch in 1..=4 {
        outbox.push(Epoch(epoch), B, epoch as u32, 1);
    }
    outbox.committed(Epoch(4));
    outbox.trim(B, Seq(1));
    outbox.roll_back(Epoch(3));
    assert_eq!(seqs(&outbox.committed(Epoch(3))), [2, 3]);
    assert_eq!(outbox.push(Epoch(4), B, 44, 1), Seq(4), "numbers are used again");
    assert_eq!(seqs(&outbox.again(B, Seq(2), 9)), [3]);
    assert_eq!(outbox.frames_of(Epoch(4)), [Sent { to: B, seq: Seq(4), frame: 44 }]);
}

#[test]
fn what_has_not_left_cannot_be_trimmed() {
    let mut outbox = Outbox::new(100);
    outbox.push(Epoch(1), B, 10, 1);
    outbox.trim(B, Seq(9));
    assert_eq!(seqs(&outbox.committed(Epoch(1))), [1]);
}

#[test]
fn at_the_bound_the_vm_is_not_read_from_until_half_is_free() {
    let mut outbox = Outbox::new(10);
    for epoch in 1..=5 {
        outbox.push(Epoch(epoch), B, 0, 2);
    }
    assert_eq!(outbox.flow(), Flow::Stop);
    outbox.committed(Epoch(5));
    outbox.trim(B, Seq(2));
    assert_eq!((outbox.flow(), outbox.bytes()), (Flow::Stop, 6));
    outbox.trim(B, Seq(3));
    assert_eq!((outbox.flow(), outbox.bytes()), (Flow::Go, 4));
}

#[test]
fn an_inbox_takes_each_frame_once_and_in_order() {
    let mut inbox = Inbox::new(Epoch(0));
    assert_eq!(inbox.accept(Vm(7), Seq(2)), Accept::Missing(Seq(1)));
    assert_eq!(inbox.accept(Vm(7), Seq(1)), Accept::Deliver);
    assert_eq!(inbox.accept(Vm(7), Seq(1)), Accept::Known);
    inbox.cut(Epoch(1));
    assert_eq!(inbox.accept(Vm(7), Seq(2)), Accept::Deliver);
    inbox.cut(Epoch(2));
    assert_eq!(inbox.globally(Epoch(1)), [(Vm(7), Seq(1))]);
    inbox.roll_back(Epoch(1));
    assert_eq!(inbox.accept(Vm(7), Seq(2)), Accept::Deliver);
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
        let (mut primary, mut backup) = (Outbox::new(1000), Outbox::new(1000));
        let mut epoch = Epoch(1);
        for (at, (skip, vm, outside)) in sends.into_iter().enumerate() {
            for _ in 0..skip {
                for sent in primary.frames_of(epoch) {
                    prop_assert_eq!(backup.push(epoch, sent.to, sent.frame, 1), sent.seq);
                }
                epoch = epoch.next();
            }
            let to = if outside { To::Outside } else { To::Vm(Vm(vm)) };
            primary.push(epoch, to, at, 1);
        }
        let back_to = Epoch(back_to.min(epoch.0 - 1));
        for outbox in [&mut primary, &mut backup] {
            outbox.committed(back_to);
            trims.iter().for_each(|&(vm, seq)| outbox.trim(To::Vm(Vm(vm)), Seq(seq)));
            outbox.roll_back(back_to);
        }
        prop_assert_eq!(primary.committed(back_to), backup.committed(back_to));
        prop_assert_eq!(primary.globally(back_to), backup.globally(back_to));
        prop_assert_eq!(primary.bytes(), backup.bytes());
    }
}
