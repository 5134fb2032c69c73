//! Primary and backup together, over a link that loses, delays, duplicates and reorders messages.

use std::time::Duration;

use proptest::prelude::*;

use super::*;

const MS: Duration = Duration::from_millis(1);
const BASE: Epoch = Epoch(0);

fn limits() -> EpochLimits {
    EpochLimits { buffer_pages: 1000, pages_per_epoch: 500, ..EpochLimits::default() }
}

fn cut(primary: &mut PrimaryEpochs, now: Duration, pages: u64) {
    assert_eq!(primary.request_cut(now), [PrimaryAction::Cut(primary.running_epoch())]);
    primary.finish_cut(now, pages);
}

fn piece(epoch: u64) -> EpochPieceHeader {
    EpochPieceHeader { epoch: Epoch(epoch), index: 0, pieces: 1, is_last_epoch: false }
}

#[test]
fn the_non_volatile_copy_is_one_behind() {
    let mut backup = BackupEpochs::new(BASE, 9);
    backup.receive_piece(piece(1));
    assert_eq!(backup.progress(), EpochProgress { complete: Epoch(1), committed: BASE });
    backup.receive_piece(piece(3));
    assert_eq!(backup.progress().complete, Epoch(1), "2 is missing");
    backup.receive_piece(piece(2));
    assert_eq!(backup.progress(), EpochProgress { complete: Epoch(3), committed: Epoch(2) });
    assert!(backup.roll_back_to(Epoch(3)).is_err());
    let restored = RollbackPlan { fold: vec![Epoch(1), Epoch(2)], discard: vec![Epoch(3)] };
    assert_eq!(backup.roll_back_to(Epoch(2)), Ok(restored));
}

#[test]
fn a_marked_epoch_is_kept_until_a_newer_global_checkpoint() {
    let mut backup = BackupEpochs::new(BASE, 9);
    (1..=5).for_each(|epoch| assert_eq!(backup.receive_piece(piece(epoch)), PieceHandling::Store));
    assert_eq!(backup.fold_up_to(Epoch(2)), Ok(vec![Epoch(1), Epoch(2)]));
    assert_eq!(backup.fold_up_to(Epoch(1)), Ok(vec![]), "an older one comes late");
    assert_eq!(backup.receive_piece(piece(2)), PieceHandling::Drop);
    let gone = RollbackError { wanted: Epoch(1), base: Epoch(2), committed: Epoch(4) };
    assert_eq!(backup.clone().roll_back_to(Epoch(1)), Err(gone));
    let restored = RollbackPlan { fold: vec![], discard: vec![Epoch(3), Epoch(4), Epoch(5)] };
    assert_eq!(backup.roll_back_to(Epoch(2)), Ok(restored));
}

#[test]
fn a_backup_keeps_a_bounded_number_of_epochs() {
    let mut backup = BackupEpochs::new(BASE, 2);
    assert_eq!(backup.receive_piece(piece(3)), PieceHandling::Refuse);
    (1..=2).for_each(|epoch| assert_eq!(backup.receive_piece(piece(epoch)), PieceHandling::Store));
    backup.fold_up_to(Epoch(1)).unwrap();
    assert_eq!(backup.receive_piece(piece(3)), PieceHandling::Store);
}

#[test]
fn pieces_that_make_no_sense_are_refused() {
    let mut backup = BackupEpochs::new(BASE, 9);
    assert_eq!(
        backup.receive_piece(EpochPieceHeader { index: 1, ..piece(1) }),
        PieceHandling::Refuse
    );
    assert_eq!(
        backup.receive_piece(EpochPieceHeader { pieces: 0, ..piece(1) }),
        PieceHandling::Refuse
    );
    backup.receive_piece(EpochPieceHeader { pieces: 2, ..piece(1) });
    assert_eq!(
        backup.receive_piece(EpochPieceHeader { pieces: 3, index: 2, ..piece(1) }),
        PieceHandling::Refuse
    );
}

#[test]
fn at_the_bound_the_epoch_stretches_and_the_vm_is_slowed_then_stopped() {
    let mut primary = PrimaryEpochs::new(limits(), BASE, Duration::ZERO);
    cut(&mut primary, 50 * MS, 900);
    assert_eq!(primary.advance_time(150 * MS, 300), [], "stretched: 300 more don't fit");
    assert_eq!(
        primary.advance_time(551 * MS, 300)[1..],
        [PrimaryAction::SetSpeed(GuestSpeed::Slowed)]
    );
    assert_eq!(
        primary.advance_time(560 * MS, 1000),
        [PrimaryAction::SetSpeed(GuestSpeed::Stopped)]
    );
    let done = EpochProgress { complete: Epoch(1), committed: BASE };
    assert_eq!(primary.record_progress(600 * MS, done), [PrimaryAction::Free(Epoch(1))]);
    let expected = [PrimaryAction::SetSpeed(GuestSpeed::Free), PrimaryAction::Cut(Epoch(2))];
    assert_eq!(primary.advance_time(601 * MS, 1000), expected);
}

/// Otherwise the duration of the pauses would be added to the interval in each epoch, and a frame
/// waits for one and a half intervals.
#[test]
fn the_duration_of_a_cut_is_part_of_the_interval() {
    let limits = EpochLimits { interval_min: 100 * MS, interval_max: 100 * MS, ..limits() };
    let mut primary = PrimaryEpochs::new(limits, BASE, Duration::ZERO);
    for (epoch, took) in [(1, 30 * MS), (2, 50 * MS), (3, 10 * MS)] {
        let due = epoch as u32 * 100 * MS;
        assert_eq!(primary.next_cut(), Some(due));
        assert_eq!(primary.advance_time(due - MS, 0), []);
        assert_eq!(primary.advance_time(due, 0), [PrimaryAction::Cut(Epoch(epoch))]);
        primary.finish_cut(due + took, 1);
        let progress = EpochProgress { complete: Epoch(epoch), committed: Epoch(epoch - 1) };
        primary.record_progress(due + took, progress);
    }
    // A pause that takes longer leaves the VM half an interval nevertheless.
    primary.advance_time(400 * MS, 0);
    primary.finish_cut(499 * MS, 1);
    assert_eq!(primary.next_cut(), Some(549 * MS));
}

#[test]
fn an_epoch_larger_than_the_buffer_is_still_cut_once_the_buffer_is_empty() {
    let mut primary = PrimaryEpochs::new(limits(), BASE, Duration::ZERO);
    assert_eq!(primary.advance_time(50 * MS, 5000), [PrimaryAction::Cut(Epoch(1))]);
}

#[test]
fn an_unacknowledged_piece_is_sent_again() {
    let mut primary = PrimaryEpochs::new(limits(), BASE, Duration::ZERO);
    cut(&mut primary, 50 * MS, 1);
    let again = PrimaryAction::Send { epoch: Epoch(1), last: false };
    assert!(!primary.advance_time(60 * MS, 0).contains(&again));
    assert!(primary.advance_time(550 * MS, 0).contains(&again));
}

#[test]
fn the_last_epoch_is_committed_at_once() {
    let mut primary = PrimaryEpochs::new(limits(), BASE, Duration::ZERO);
    let mut backup = BackupEpochs::new(BASE, 9);
    primary.begin_final_cut(MS);
    assert_eq!(primary.finish_cut(MS, 3), [PrimaryAction::Send { epoch: Epoch(1), last: true }]);
    backup.receive_piece(EpochPieceHeader { is_last_epoch: true, ..piece(1) });
    let actions = primary.record_progress(2 * MS, backup.progress());
    assert_eq!(actions, [PrimaryAction::Free(Epoch(1)), PrimaryAction::Committed(Epoch(1))]);
    assert_eq!(primary.advance_time(900 * MS, 0), [], "the VM stays paused");
}

#[test]
fn after_a_move_that_is_called_off_epochs_go_on() {
    let mut primary = PrimaryEpochs::new(limits(), BASE, Duration::ZERO);
    let mut backup = BackupEpochs::new(BASE, 9);
    primary.begin_final_cut(MS);
    primary.finish_cut(MS, 3);
    backup.receive_piece(EpochPieceHeader { is_last_epoch: true, ..piece(1) });
    primary.record_progress(2 * MS, backup.progress());
    primary.cancel_final_cut(900 * MS);
    assert_eq!(primary.advance_time(901 * MS, 0), [], "an interval passes first");
    let due = 900 * MS + limits().interval_max;
    assert_eq!(primary.advance_time(due, 0), [PrimaryAction::Cut(Epoch(2))]);
    assert_eq!(primary.finish_cut(due, 1), [PrimaryAction::Send { epoch: Epoch(2), last: false }]);
    backup.receive_piece(piece(2));
    assert_eq!(backup.progress(), EpochProgress { complete: Epoch(2), committed: Epoch(1) });
}

/// An epoch in flight, or an acknowledgement.
#[derive(Clone, Copy, Debug)]
enum Message {
    Epoch(Epoch),
    Progress(EpochProgress),
}

struct Pair {
    primary: PrimaryEpochs,
    backup: BackupEpochs,
    link: Vec<Message>,
    cuts: Vec<Duration>,
}

impl Pair {
    fn act(&mut self, now: Duration, pages: u64, actions: Vec<PrimaryAction>) {
        for action in actions {
            match action {
                PrimaryAction::Cut(_) => {
                    self.cuts.push(now);
                    let after = self.primary.finish_cut(now, pages);
                    self.act(now, pages, after);
                }
                PrimaryAction::Send { epoch, .. } => self.link.push(Message::Epoch(epoch)),
                PrimaryAction::Free(_)
                | PrimaryAction::Committed(_)
                | PrimaryAction::SetSpeed(_) => {}
            }
        }
    }

    fn deliver(&mut self, now: Duration, message: Message) {
        match message {
            Message::Epoch(epoch) => {
                if self.backup.receive_piece(piece(epoch.0)) != PieceHandling::Refuse {
                    self.link.push(Message::Progress(self.backup.progress()));
                }
            }
            Message::Progress(progress) => {
                let actions = self.primary.record_progress(now, progress);
                self.act(now, 0, actions);
            }
        }
    }

    fn check(&self, now: Duration, limits: &EpochLimits) -> Result<(), TestCaseError> {
        let committed = self.backup.progress().committed;
        prop_assert!(
            self.primary.committed_epoch() <= committed,
            "the primary is ahead of its backup"
        );
        prop_assert!(self.primary.buffered_pages() <= limits.buffer_pages);
        // An error that occurred T_e ago or later isn't in the state that would be restored.
        if committed > BASE {
            let cut_at = self.cuts[committed.0 as usize - 1];
            prop_assert!(now - cut_at >= limits.error_latency_max, "an error could be restored");
        }
        Ok(())
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    #[test]
    fn nothing_is_lost_and_no_unnoticed_error_is_restored(
        steps in prop::collection::vec((0..5_u8, any::<prop::sample::Index>(), 0..400_u64), 1..300),
    ) {
        let limits = limits();
        let mut pair = Pair {
            primary: PrimaryEpochs::new(limits, BASE, Duration::ZERO),
            backup: BackupEpochs::new(BASE, 5),
            link: Vec::new(),
            cuts: Vec::new(),
        };
        let mut now = Duration::ZERO;
        for (kind, which, pages) in steps {
            if kind <= 1 || pair.link.is_empty() {
                now += 10 * MS;
                let actions = pair.primary.advance_time(now, pages);
                pair.act(now, pages, actions);
            } else {
                let at = which.index(pair.link.len());
                let message = pair.link[at];
                if kind != 2 { pair.link.swap_remove(at); } // 2: delivered, and will be once more
                if kind != 3 { pair.deliver(now, message); } // 3: lost
            }
            let marked = pair.backup.progress().committed;
            if pages % 7 == 0 { pair.backup.fold_up_to(marked).unwrap(); }
            pair.check(now, &limits)?;
        }
        for _ in 0..200 {
            now += 100 * MS;
            let actions = pair.primary.advance_time(now, 100);
            pair.act(now, 100, actions);
            std::mem::take(&mut pair.link).into_iter().for_each(|message| pair.deliver(now, message));
            std::mem::take(&mut pair.link).into_iter().for_each(|message| pair.deliver(now, message));
            let marked = pair.primary.committed_epoch();
            pair.backup.fold_up_to(marked).unwrap();
        }
        prop_assert!(pair.primary.committed_epoch() >= Epoch(30), "it got stuck at {:?}", pair.primary);
    }
}
