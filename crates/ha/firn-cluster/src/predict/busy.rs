//! Busy detector: decides whether a guest writes so much that its page faults would take more of
//! its time than copying the written pages in the pause.
//!
//! ```text
//!            so many pages were written         no longer so for some epochs, or no comparison
//!   at rest -----------------------------> busy -----------------------------------> at rest
//!      ^                                    |
//!      |  RETEST_CUTS cuts                    |  too many pages are copied, or copying costs more
//!      '------------------ resting <--------'  than the faults that it saves
//! ```
//!
//! The last case is a guest that goes through its memory and does not come back: its written pages
//! are copied again and again, and no fault is saved.

use std::ops::Range;

use super::IDLE_EPOCHS_MAX;

/// The cost of a page fault, in page copies.
const FAULT_COPIES: usize = 5;
/// The number of cuts until a guest is tested again, after copying cost more than it saved.
const RETEST_CUTS: usize = 64;
/// The maximum cost beyond the savings, at first, and after large savings, in multiples of the
/// number of pages that makes a guest busy.
const CREDIT_FACTORS: (usize, usize) = (8, 16);

/// Detects a busy guest.
#[derive(Clone, Debug, Default)]
pub(super) struct BusyDetector {
    /// The counts of pages in an epoch of a busy guest: from the minimum that it writes, up to the
    /// maximum that may be copied in a pause.
    page_counts: Range<usize>,
    /// The guest counts as busy for this number of cuts.
    left: usize,
    /// The guest does not count as busy for this number of cuts.
    rest: usize,
    /// The remaining credit, in page copies.
    credit: usize,
}

/// An epoch after its comparison with the one before.
#[derive(Clone, Copy, Debug)]
pub(super) struct ComparedEpoch {
    /// The number of pages copied in the pause.
    pub(super) copied: usize,
    /// The number of pages written.
    pub(super) written: usize,
    /// The number of saved faults: pages that were left writable and have changed.
    pub(super) spared: usize,
    /// The number of pages that were left writable and are unchanged.
    pub(super) same: usize,
}

impl BusyDetector {
    pub(super) fn new(page_counts: Range<usize>) -> Self {
        Self { page_counts, ..Self::default() }
    }

    pub(super) fn is_busy(&self) -> bool {
        self.left > 0
    }

    /// Records a cut.
    pub(super) fn record_cut(&mut self) {
        self.left = self.left.saturating_sub(1);
        self.rest = self.rest.saturating_sub(1);
    }

    /// Records the comparison of an epoch. `true` if the guest was busy and is no longer.
    pub(super) fn record_comparison(&mut self, epoch: ComparedEpoch) -> bool {
        let Range { start, end } = self.page_counts;
        let is_too_much = epoch.copied.max(epoch.written) >= end;
        let is_worth_it = !self.is_busy() || self.charge_epoch(epoch);
        if self.is_busy() && (is_too_much || !is_worth_it) {
            self.end_busy();
            return true;
        }
        if epoch.written >= start && !is_too_much && self.rest == 0 {
            if !self.is_busy() {
                self.credit = CREDIT_FACTORS.0 * start;
            }
            // One more, because the next cut is counted before it is compared.
            self.left = IDLE_EPOCHS_MAX + 1;
        }
        false
    }

    /// Charges the cost of an epoch. Returns whether copying is still worthwhile.
    fn charge_epoch(&mut self, epoch: ComparedEpoch) -> bool {
        let credit_max = CREDIT_FACTORS.1 * self.page_counts.start;
        let credit = (self.credit + FAULT_COPIES * epoch.spared).checked_sub(epoch.same);
        self.credit = credit.unwrap_or_default().min(credit_max);
        credit.is_some()
    }

    /// Ends the busy state, for some time.
    pub(super) fn end_busy(&mut self) {
        (self.left, self.rest) = (0, RETEST_CUTS);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const QUIET: ComparedEpoch = ComparedEpoch { copied: 5, written: 5, spared: 0, same: 0 };
    const MANY: ComparedEpoch = ComparedEpoch { copied: 100, written: 100, spared: 0, same: 0 };

    fn busy() -> BusyDetector {
        let mut busy = BusyDetector::new(100..1000);
        assert!(!busy.record_comparison(QUIET) && !busy.is_busy());
        assert!(!busy.record_comparison(MANY) && busy.is_busy());
        busy
    }

    #[test]
    fn it_lapses_whether_or_not_anybody_compares() {
        let mut busy = busy();
        (0..=IDLE_EPOCHS_MAX).for_each(|_| {
            assert!(busy.is_busy());
            busy.record_cut();
        });
        assert!(!busy.is_busy());
        assert!(!busy.record_comparison(MANY) && busy.is_busy(), "and begins again");
    }

    #[test]
    fn a_guest_that_rewrites_its_pages_stays_busy() {
        let mut busy = busy();
        for round in 0..100 {
            let spared = if round % 4 == 0 { 100 } else { 0 };
            let epoch = ComparedEpoch { copied: 100, written: spared, spared, same: 100 - spared };
            assert!(!busy.record_comparison(epoch), "{round}");
            busy.record_cut();
        }
        assert!(busy.is_busy());
    }

    #[test]
    fn a_guest_that_does_not_is_left_alone_for_a_while() {
        let mut busy = busy();
        let epoch = |same| ComparedEpoch { copied: 100 + same, written: 100, spared: 0, same };
        let cuts = (1..).find(|times| busy.record_comparison(epoch(100 * times))).unwrap();
        assert!(cuts < 5 && !busy.is_busy(), "{cuts}");
        (0..RETEST_CUTS).for_each(|_| {
            assert!(!busy.record_comparison(MANY) && !busy.is_busy());
            busy.record_cut();
        });
        assert!(!busy.record_comparison(MANY) && busy.is_busy());
    }

    #[test]
    fn the_pages_copied_in_a_pause_have_a_limit() {
        let mut busy = busy();
        assert!(!busy.record_comparison(ComparedEpoch {
            copied: 999,
            written: 200,
            spared: 799,
            same: 0
        }));
        assert!(busy.record_comparison(ComparedEpoch {
            copied: 1000,
            written: 200,
            spared: 799,
            same: 0
        }));
        assert!(!busy.is_busy());
    }
}
