//! Whether following pages is worth it, or looking at all of them costs less: a small area of which a transaction writes many.
//!
//! ```text
//!   following ---- a window of transactions in which faults cost more than looking at everything ----> looking
//!       ^                                                                                                 |
//!       `------------ after a while, a longer one each time that it was right to look -------------------'
//! ```
//!
//! Numbers of pages go in, decisions come out: no kernel here. Costs are in comparisons of a page, which take about a tenth of a
//! microsecond.

/// The first write of a page that is protected, and the scan of each commit.
const FAULT: u64 = 8;
const SCAN: u64 = 8;
/// Transactions that are looked at before a decision.
const WINDOW: u64 = 64;
/// Transactions for which everything is looked at, the first time and at last.
const STAY: (u64, u64) = (1 << 10, 1 << 16);

/// See the module documentation.
#[derive(Clone, Copy, Debug)]
pub(super) struct Whole {
    /// Transactions of this window, and what following cost in it.
    seen: u64,
    cost: u64,
    /// How many transactions are left in which everything is looked at.
    left: u64,
    stay: u64,
}

impl Default for Whole {
    fn default() -> Self {
        Self { seen: 0, cost: 0, left: 0, stay: STAY.0 }
    }
}

impl Whole {
    /// Whether everything is looked at now.
    pub(super) fn is_looking(self) -> bool {
        self.left > 0
    }

    /// A transaction in which so many pages faulted, and so many were compared as they are hot, of so many in all. True if
    /// everything is looked at from now on.
    pub(super) fn followed(&mut self, faults: usize, hot: usize, pages: usize) -> bool {
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
            false => self.stay = STAY.0,
        }
        is_dear
    }

    /// Whether pages are followed after the next transaction.
    pub(super) fn is_last(self) -> bool {
        self.left == 1
    }

    /// There is more to look at: what was decided may be wrong now.
    pub(super) fn grew(&mut self) {
        *self = Self { left: self.left.min(1), ..Self::default() };
    }

    /// A transaction after which everything was looked at. True if pages are followed from now on.
    pub(super) fn looked(&mut self) -> bool {
        self.left = self.left.saturating_sub(1);
        if self.left == 0 {
            self.stay = (self.stay * 2).min(STAY.1);
        }
        self.left == 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// In how many of some transactions everything was looked at.
    fn looked(faults: usize, hot: usize, pages: usize, transactions: u64) -> u64 {
        let (mut whole, mut count) = (Whole::default(), 0);
        for _ in 0..transactions {
            match whole.is_looking() {
                true => {
                    count += 1;
                    let _ = whole.looked();
                }
                false => {
                    let _ = whole.followed(faults, hot, pages);
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
    fn more_to_look_at_is_followed_first() {
        let mut whole = Whole::default();
        while !whole.followed(5, 0, 20) {}
        whole.grew();
        assert!(whole.is_looking() && whole.is_last() && whole.looked());
        (0..WINDOW).for_each(|_| assert!(!whole.followed(5, 0, 1000)));
        (0..WINDOW).for_each(|_| assert!(!whole.followed(0, 0, 0), "nothing to look at"));
    }

    #[test]
    fn it_is_tried_again_less_and_less_often() {
        let mut whole = Whole::default();
        let mut stays = Vec::new();
        for _ in 0..8 {
            while !whole.followed(5, 0, 20) {}
            let mut stay = 1;
            while !whole.looked() {
                stay += 1;
            }
            stays.push(stay);
        }
        assert_eq!(stays, [10, 11, 12, 13, 14, 15, 16, 16].map(|bits| 1_u64 << bits));
        (0..WINDOW).for_each(|_| assert!(!whole.followed(0, 0, 20)));
        while !whole.followed(5, 0, 20) {}
        assert_eq!(whole.left, STAY.0, "once it was wrong it is short again");
    }
}
