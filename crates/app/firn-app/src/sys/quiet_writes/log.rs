//! The log of runs of pages that were written.

use std::sync::atomic::{AtomicU64, Ordering};

use rustix::io::Errno;

use crate::span::{PAGE, PageSpan};
use crate::sys::mapping::OwnedMapping;

/// The count of runs that the log holds.
const LOG_RUNS: usize = 1022;
/// The words before the runs: the count of runs so far, and whether runs are missing.
const HEADER_WORDS: usize = 2;

/// The runs that were written, in a mapping of its own. One thread adds runs, another takes them.
/// A run is a word: the address of its first page, plus its count of pages.
#[derive(Debug)]
pub(super) struct RunLog(OwnedMapping);

impl RunLog {
    pub(super) fn new() -> Result<Self, Errno> {
        let words = HEADER_WORDS + LOG_RUNS;
        OwnedMapping::map_anonymous(words * size_of::<u64>()).map(Self)
    }

    fn header(&self) -> &[AtomicU64] {
        self.0.atomic_words(0, HEADER_WORDS)
    }

    fn run_word(&self, number: u64) -> &AtomicU64 {
        let at = HEADER_WORDS + number as usize % LOG_RUNS;
        &self.0.atomic_words(at * size_of::<u64>(), 1)[0]
    }

    /// The count of runs that were recorded so far.
    pub(super) fn recorded(&self) -> u64 {
        self.header()[0].load(Ordering::Acquire)
    }

    /// Records a run. `taken` is the count of runs that were taken so far.
    pub(super) fn record(&self, run: PageSpan, taken: u64) {
        let number = self.header()[0].load(Ordering::Relaxed);
        if number - taken >= LOG_RUNS as u64 {
            self.header()[1].store(1, Ordering::Release);
            return;
        }
        let word = run.start() as u64 | run.page_count() as u64;
        self.run_word(number).store(word, Ordering::Relaxed);
        self.header()[0].store(number + 1, Ordering::Release);
    }

    pub(super) fn take_overflow(&self) -> bool {
        self.header()[1].swap(0, Ordering::AcqRel) != 0
    }

    pub(super) fn run(&self, number: u64) -> PageSpan {
        let word = self.run_word(number).load(Ordering::Relaxed) as usize;
        let start = word / PAGE * PAGE;
        PageSpan::covering_range(start..start + word % PAGE * PAGE)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pages(first: usize, count: usize) -> PageSpan {
        PageSpan::covering_range(first * PAGE..(first + count) * PAGE)
    }

    #[test]
    fn the_log_reports_that_it_was_full() {
        let log = RunLog::new().unwrap();
        (0..LOG_RUNS).for_each(|page| log.record(pages(page + 1, 1 + page % 512), 0));
        assert!(!log.take_overflow());
        assert_eq!(log.run(700), pages(701, 1 + 700 % 512));
        log.record(pages(7, 1), 0);
        assert!(log.take_overflow() && !log.take_overflow());
        assert_eq!(log.recorded(), LOG_RUNS as u64);
        log.record(pages(9, 2), LOG_RUNS as u64);
        assert_eq!(log.run(LOG_RUNS as u64), pages(9, 2));
    }
}
