//! Client journal: the numbers that were acknowledged to a client, and those that were requested
//! and not answered.
//!
//! A client appends numbers to its own value, each once. So it can check what is stored later: all
//! acknowledged numbers, in order, and each unanswered number at most once.

use std::collections::BTreeSet;
use std::fmt::Write as _;

use anyhow::{Context as _, Result, ensure};

/// The journal of one client.
#[derive(Clone, Debug, Default)]
pub(super) struct WriteJournal {
    acknowledged: Vec<u64>,
    unanswered: BTreeSet<u64>,
    next: u64,
}

impl WriteJournal {
    /// The next number to write, which counts as unanswered.
    pub(super) fn next_number(&mut self) -> u64 {
        self.next += 1;
        self.unanswered.insert(self.next);
        self.next
    }

    /// Records that a number was acknowledged.
    pub(super) fn record_acknowledged(&mut self, number: u64) {
        self.unanswered.remove(&number);
        self.acknowledged.push(number);
    }

    pub(super) fn acknowledged(&self) -> usize {
        self.acknowledged.len()
    }

    /// The text that the client appends for a number.
    pub(super) fn entry_text(number: u64) -> String {
        let mut text = String::new();
        let _ = write!(text, "{number} ");
        text
    }

    /// Counts the acknowledged numbers that are not stored.
    ///
    /// # Errors
    /// If something is stored that can't be: twice, in another order, or never requested.
    pub(super) fn count_lost(&self, there: &str) -> Result<usize> {
        let words = there.split_whitespace();
        let number = |word: &str| word.parse().with_context(|| format!("a torn number: {word:?}"));
        let there: Vec<u64> = words.map(number).collect::<Result<_>>()?;
        let mut seen = BTreeSet::new();
        let twice = there.iter().find(|it| !seen.insert(**it));
        ensure!(twice.is_none(), "{twice:?} was written once, and is stored twice");
        let known: Vec<u64> =
            there.into_iter().filter(|it| !self.unanswered.contains(it)).collect();
        ensure!(known.is_sorted(), "numbers that were written one after another are in disorder");
        let strange = known.iter().find(|it| self.acknowledged.binary_search(it).is_err());
        ensure!(strange.is_none(), "{strange:?} is stored, and was never requested");
        Ok(self.acknowledged.len() - known.len())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// 1, 2 and 4 were acknowledged, 3 and 5 were not answered.
    fn journal() -> WriteJournal {
        let mut journal = WriteJournal::default();
        for number in 1..=5 {
            assert_eq!(journal.next_number(), number);
        }
        [1, 2, 4].into_iter().for_each(|it| journal.record_acknowledged(it));
        journal
    }

    #[test]
    fn an_unacknowledged_entry_may_be_missing() {
        for there in ["1 2 4 ", "1 2 3 4 5 ", "1 2 4 5 3"] {
            assert_eq!(journal().count_lost(there).unwrap(), 0, "{there}");
        }
    }

    #[test]
    fn a_missing_acknowledged_entry_is_an_error() {
        assert_eq!(journal().count_lost("1 2 ").unwrap(), 1);
        assert_eq!(journal().count_lost("").unwrap(), 3);
        assert_eq!(journal().count_lost("2 3 4").unwrap(), 1);
    }

    #[test]
    fn an_impossible_journal_is_an_error() {
        for there in ["1 2 4 4", "1 2 3 3 4", "2 1 4", "1 2 4 6", "1 2 x"] {
            assert!(journal().count_lost(there).is_err(), "{there}");
        }
    }
}
