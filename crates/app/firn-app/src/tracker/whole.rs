//! Full comparison: decides whether to follow pages, or to compare all of them, which costs less
//! for a small area of which a transaction writes many pages.
//!
//! ```text
//!   following -- a window of transactions in which faults cost more than comparing everything --> comparing
//!       ^                                                                                            |
//!       `-------- after some transactions, more of them each time that comparing was right ----------'
//! ```
//!
//! Counts of pages are the input, decisions are the output: no system calls here. The unit of cost
//! is the comparison of one page, which takes about a tenth of a microsecond.

/// The cost of the first write of a protected page, and of the scan of each commit.
const FAULT: u64 = 8;
const SCAN: u64 = 8;
/// The count of transactions before a decision.
const WINDOW: u64 = 64;
/// The count of transactions for which everything is compared: the first time, and the maximum.
const COMPARING_TRANSACTIONS: (u64, u64) = (1 << 10, 1 << 16);

/// See the module documentation.
#[derive(Clone, Copy, Debug)]
pub(super) struct FullCompare {
    /// The transactions of this window, and the cost of following pages in it.
    seen: u64,
    cost: u64,
    /// The remaining transactions in which everything is compared.
    left: u64,
    stay: u64,
}

impl Default for FullCompare {
    fn default() -> Self {
        Self { seen: 0, cost: 0, left: 0, stay: COMPARING_TRANSACTIONS.0 }
    }
}

impl FullCompare {
    /// Whether everything is compared now.
    pub(super) fn is_comparing(self) -> bool {
        self.left > 0
    }

    /// Counts a transaction in which `faults` pages faulted and `hot` pages were compared, of
    /// `pages` in all. True if everything is compared from now on.
    pub(super) fn count_followed(&mut self, faults: usize, hot: usize, pages: usize) -> bool {
        if pages == 0 {
            return false;
        }
        self.seen += 1;
        self.cost += SCAN + FAULT * faults as u64 + hot as u64;
        if self.seen < WINDOW {
            return false;
        }
        let is_dear = self.cost > WINDOW * pages as u64;
        (self.seen, self.cost) = (0, 0);
        match is_dear {
            true => self.left = self.stay,
            false => self.stay = COMPARING_TRANSACTIONS.0,
        }
        is_dear
    }

    /// Whether pages are followed again after the next transaction.
    pub(super) fn is_last(self) -> bool {
        self.left == 1
    }

    /// There are more pages now: the last decision may be wrong.
    pub(super) fn reset_after_growth(&mut self) {
        *self = Self { left: self.left.min(1), ..Self::default() };
    }

    /// Counts a transaction after which everything was compared. True if pages are followed from
    /// now on.
    pub(super) fn count_compared(&mut self) -> bool {
        self.left = self.left.saturating_sub(1);
        if self.left == 0 {
            self.stay = (self.stay * 2).min(COMPARING_TRANSACTIONS.1);
        }
        self.left == 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// In how many of some transactions everything was looked at.
    fn looked(faults: usize, hot: usize, pages: usize, transactions: u64) -> u64 {
        let (mut whole, mut count) = (FullCompare::default(), 0);
        for _ in 0..transactions {
            match whole.is_comparing() {
                true => {
                    count += 1;
                    let _ = whole.count_compared();
                }
                false => {
                    let _ = whole.count_followed(faults, hot, pages);
                }
            }
        }
        count
    }

    #[test]
    fn a_small_area_that_is_written_all_over_is_looked_at() {
        assert!(looked(5, 0, 20, 10_000) > 9_500);
        assert_eq!(looked(1, 1, 20, 10_000), 0);
        assert_eq!(looked(5, 0, 80, 10_000), 0);
    }

    #[test]
    fn areas_with_more_pages_are_followed_first() {
        let mut whole = FullCompare::default();
        while !whole.count_followed(5, 0, 20) {}
        whole.reset_after_growth();
        assert!(whole.is_comparing() && whole.is_last() && whole.count_compared());
        (0..WINDOW).for_each(|_| assert!(!whole.count_followed(5, 0, 1000)));
        (0..WINDOW).for_each(|_| assert!(!whole.count_followed(0, 0, 0), "nothing to look at"));
    }

    #[test]
    fn it_is_tried_again_less_and_less_often() {
        let mut whole = FullCompare::default();
        let mut stays = Vec::new();
        for _ in 0..8 {
            while !whole.count_followed(5, 0, 20) {}
            let mut stay = 1;
            while !whole.count_compared() {
                stay += 1;
            }
            stays.push(stay);
        }
        assert_eq!(stays, [10, 11, 12, 13, 14, 15, 16, 16].map(|bits| 1_u64 << bits));
        (0..WINDOW).for_each(|_| assert!(!whole.count_followed(0, 0, 20)));
        while !whole.count_followed(5, 0, 20) {}
        assert_eq!(whole.left, COMPARING_TRANSACTIONS.0, "once it was wrong it is short again");
    }
}
