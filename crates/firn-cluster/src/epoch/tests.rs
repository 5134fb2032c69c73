//! Primary and backup together, over a link that loses, delays, duplicates and reorders messages.

use std::time::Duration;

use proptest::prelude::*;

use super::*;

const MS: Duration = Duration::from_millis(1);
const BASE: Epoch = Epoch(0);

fn limits() -> Limits {
    Limits { buffer_pages: 1000, pages_per_epoch: 500, ..Limits::default() }
}

fn cut(primary: &mut Primary, now: Duration, pages: u64) {
    assert_eq!(primary.cut_now(now), [Action::Cut(primary.epoch())]);
    primary.copied(now, pages);
}

fn piece(epoch: u64) -> Piece {
    Piece { epoch: Epoch(epoch), index: 0, of: 1, last: false }
}

#[test]
fn the_non_volatile_copy_is_one_behind() {
    let mut backup = Backup::new(BASE, 9);
    backup.arrived(piece(1));
    assert_eq!(backup.progress(), Progress { complete: Epoch(1), committed: BASE });
    backup.arrived(piece(3));
    assert_eq!(backup.progress().complete, Epoch(1), "2 is missing");
    backup.arrived(piece(2));
    assert_eq!(backup.progress(), Progress { complete: Epoch(3), committed: Epoch(2) });
    assert!(backup.restore(Epoch(3)).is_err());
    let restored = Restore { fold: vec![Epoch(1), Epoch(2)], discard: vec![Epoch(3)] };
    assert_eq!(backup.restore(Epoch(2)), Ok(restored));
}

#[test]
fn a_marked_epoch_can_be_had_until_a_newer_global_checkpoint_exists() {
    let mut backup = Backup::new(BASE, 9);
    (1..=5).for_each(|epoch| assert_eq!(backup.arrived(piece(epoch)), Arrival::Store));
    assert_eq!(backup.globally(Epoch(2)), Ok(vec![Epoch(1), Epoch(2)]));
    assert_eq!(backup.globally(Epoch(1)), Ok(vec![]), "an older one comes late");
    assert_eq!(backup.arrived(piece(2)), Arrival::Known);
    let gone = RestoreError { wanted: Epoch(1), base: Epoch(2), committed: Epoch(4) };
    assert_eq!(backup.clone().restore(Epoch(1)), Err(gone));
    let restored = Restore { fold: vec![], discard: vec![Epoch(3), Epoch(4), Epoch(5)] };
    assert_eq!(backup.restore(Epoch(2)), Ok(restored));
}

#[test]
fn a_backup_keeps_a_bounded_number_of_epochs() {
    let mut backup = Backup::new(BASE, 2);
    assert_eq!(backup.arrived(piece(3)), Arrival::Refused);
    (1..=2).for_each(|epoch| assert_eq!(backup.arrived(piece(epoch)), Arrival::Store));
    backup.globally(Epoch(1)).unwrap();
    assert_eq!(backup.arrived(piece(3)), Arrival::Store);
}

#[test]
fn pieces_that_make_no_sense_are_refused() {
    let mut backup = Backup::new(BASE, 9);
    assert_eq!(backup.arrived(Piece { index: 1, ..piece(1) }), Arrival::Refused);
    assert_eq!(backup.arrived(Piece { of: 0, ..piece(1) }), Arrival::Refused);
    backup.arrived(Piece { of: 2, ..piece(1) });
    assert_eq!(backup.arrived(Piece { of: 3, index: 2, ..piece(1) }), Arrival::Refused);
}

#[test]
fn at_the_bound_the_epoch_stretches_and_the_vm_is_slowed_then_stopped() {
    let mut primary = Primary::new(limits(), BASE, Duration::ZERO);
    cut(&mut primary, 50 * MS, 900);
    assert_eq!(primary.tick(150 * MS, 300), [], "stretched: 300 more don't fit");
    assert_eq!(primary.tick(551 * MS, 300)[1..], [Action::Pace(Pace::Slowed)]);
    assert_eq!(primary.tick(560 * MS, 1000), [Action::Pace(Pace::Stopped)]);
    let done = Progress { complete: Epoch(1), committed: BASE };
    assert_eq!(primary.acknowledged(600 * MS, done), [Action::Free(Epoch(1))]);
    let expected = [Action::Pace(Pace::Free), Action::Cut(Epoch(2))];
    assert_eq!(primary.tick(601 * MS, 1000), expected);
}

/// Otherwise the duration of the pauses would be added to the interval in each epoch, and a frame
/// waits for one and a half intervals.
#[test]
fn what_a_cut_takes_does_not_add_to_the_interval() {
    let limits = Limits { interval_min: 100 * MS, interval_max: 100 * MS, ..limits() };
    let mut primary = Primary::new(limits, BASE, Duration::ZERO);
    for (epoch, took) in [(1, 30 * MS), (2, 50 * MS), (3, 10 * MS)] {
        let due = epoch as u32 * 100 * MS;
        assert_eq!(primary.due(), Some(due));
        assert_eq!(primary.tick(due - MS, 0), []);
        assert_eq!(primary.tick(due, 0), [Action::Cut(Epoch(epoch))]);
        primary.copied(due + took, 1);
        let progress = Progress { complete: Epoch(epoch), committed: Epoch(epoch - 1) };
        primary.acknowledged(due + took, progress);
    }
    // A pause that takes longer leaves the VM half an interval nevertheless.
    primary.tick(400 * MS, 0);
    primary.copied(499 * MS, 1);
    assert_eq!(primary.due(), Some(549 * MS));
}

#[test]
fn an_epoch_larger_than_the_buffer_is_still_cut_once_the_buffer_is_empty() {
    let mut primary = Primary::new(limits(), BASE, Duration::ZERO);
    assert_eq!(primary.tick(50 * MS, 5000), [Action::Cut(Epoch(1))]);
}

#[test]
fn what_is_not_acknowledged_is_sent_again() {
    let mut primary = Primary::new(limits(), BASE, Duration::ZERO);
    cut(&mut primary, 50 * MS, 1);
    let again = Action::Send { epoch: Epoch(1), last: false };
    assert!(!primary.tick(60 * MS, 0).contains(&again));
    assert!(primary.tick(550 * MS, 0).contains(&again));
}

#[test]
fn the_last_epoch_is_committed_at_once() {
    let mut primary = Primary::new(limits(), BASE, Duration::ZERO);
    let mut backup = Backup::new(BASE, 9);
    primary.finish(MS);
    assert_eq!(primary.copied(MS, 3), [Action::Send { epoch: Epoch(1), last: true }]);
    backup.arrived(Piece { last: true, ..piece(1) });
    let actions = primary.acknowledged(2 * MS, backup.progress());
    assert_eq!(actions, [Action::Free(Epoch(1)), Action::Committed(Epoch(1))]);
    assert_eq!(primary.tick(900 * MS, 0), [], "the VM stays paused");
}

/// An epoch in flight, or an acknowledgement.
#[derive(Clone, Copy, Debug)]
enum Message {
    Epoch(Epoch),
    Progress(Progress),
}

struct Pair {
    primary: Primary,
    backup: Backup,
    link: Vec<Message>,
    cuts: Vec<Duration>,
}

impl Pair {
    fn act(&mut self, now: Duration, pages: u64, actions: Vec<Action>) {
        for action in actions {
            match action {
                Action::Cut(_) => {
                    self.cuts.push(now);
                    let after = self.primary.copied(now, pages);
                    self.act(now, pages, after);
                }
                Action::Send { epoch, .. } => self.link.push(Message::Epoch(epoch)),
                Action::Free(_) | Action::Committed(_) | Action::Pace(_) => {}
            }
        }
    }

    fn deliver(&mut self, now: Duration, message: Message) {
        match message {
            Message::Epoch(epoch) => {
                if self.backup.arrived(piece(epoch.0)) != Arrival::Refused {
                    self.link.push(Message::Progress(self.backup.progress()));
                }
            }
            Message::Progress(progress) => {
                let actions = self.primary.acknowledged(now, progress);
                self.act(now, 0, actions);
            }
        }
    }

    fn check(&self, now: Duration, limits: &Limits) -> Result<(), TestCaseError> {
        let committed = self.backup.progress().committed;
        prop_assert!(self.primary.committed() <= committed, "the primary is ahead of its backup");
        prop_assert!(self.primary.buffered() <= limits.buffer_pages);
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
            primary: Primary::new(limits, BASE, Duration::ZERO),
            backup: Backup::new(BASE, 5),
            link: Vec::new(),
            cuts: Vec::new(),
        };
        let mut now = Duration::ZERO;
        for (kind, which, pages) in steps {
            if kind <= 1 || pair.link.is_empty() {
                now += 10 * MS;
                let actions = pair.primary.tick(now, pages);
                pair.act(now, pages, actions);
            } else {
                let at = which.index(pair.link.len());
                let message = pair.link[at];
                if kind != 2 { pair.link.swap_remove(at); } // 2: delivered, and will be once more
                if kind != 3 { pair.deliver(now, message); } // 3: lost
            }
            let marked = pair.backup.progress().committed;
            if pages % 7 == 0 { pair.backup.globally(marked).unwrap(); }
            pair.check(now, &limits)?;
        }
        for _ in 0..200 {
            now += 100 * MS;
            let actions = pair.primary.tick(now, 100);
            pair.act(now, 100, actions);
            std::mem::take(&mut pair.link).into_iter().for_each(|message| pair.deliver(now, message));
            std::mem::take(&mut pair.link).into_iter().for_each(|message| pair.deliver(now, message));
            let marked = pair.primary.committed();
            pair.backup.globally(marked).unwrap();
        }
        prop_assert!(pair.primary.committed() >= Epoch(30), "it got stuck at {:?}", pair.primary);
    }
}
