//! What a tracker does for a session.

use std::sync::Arc;

use super::kind::TrackerKind;
use crate::error::Error;
use crate::memory::AreaMemory;
use crate::span::PageSpan;

/// Runs of addresses that a tracker found to be written.
#[derive(Clone, Debug, Default)]
pub struct WrittenRuns {
    runs: Vec<(usize, usize)>,
}

impl WrittenRuns {
    /// Adds a run of bytes that may have been written.
    pub fn push_run(&mut self, start: usize, len: usize) {
        match self.runs.last_mut() {
            Some((last, last_len)) if *last + *last_len == start => *last_len += len,
            _ => self.runs.push((start, len)),
        }
    }

    /// Removes all runs.
    pub fn clear(&mut self) {
        self.runs.clear();
    }

    /// Moves the runs of another list here.
    pub(crate) fn append(&mut self, other: &mut Self) {
        self.runs.append(&mut other.runs);
    }

    pub(crate) fn runs(&self) -> &[(usize, usize)] {
        &self.runs
    }

    /// Sorts the runs by address, and joins them so that each byte occurs once.
    pub(crate) fn join_runs(&mut self) {
        if self.runs.is_sorted_by(|a, b| a.0 + a.1 < b.0) {
            return;
        }
        self.runs.sort_unstable();
        self.runs.dedup_by(|next, kept| {
            let joins = next.0 <= kept.0 + kept.1;
            if joins {
                kept.1 = kept.1.max(next.0 + next.1 - kept.0);
            }
            joins
        });
    }
}

/// Counts of a tracker's events.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TrackerCounts {
    /// Stores performed through a second mapping.
    pub emulated: u64,
    /// Instructions that could not be performed so, whose pages were followed as by PT.
    pub unsupported: u64,
    /// Commits for which the host could not report what was written, so that everything counted as
    /// written.
    pub blind: u64,
    /// Commits for which the host was called, though stores are recorded from below.
    pub called: u64,
    /// Writes that waited for a thread of the library, in large areas of which little is written.
    pub waited: u64,
}

/// A method to find what was written.
///
/// Calls come from one thread at a time, and never while the application writes the memory that is
/// followed.
pub trait Tracker: Send {
    /// The kind of this tracker.
    fn kind(&self) -> TrackerKind;

    /// Whether it reports words as they were written. Other trackers report pages, and a session
    /// can find the words that differ.
    fn reports_words(&self) -> bool {
        false
    }

    /// Whether the session compares reported runs with the last committed copy: then a tracker may
    /// report more than was written, if that is faster. Called once, before any span is followed.
    fn set_comparing(&mut self, compares: bool) {
        let _ = compares;
    }

    /// Begins to follow pages of memory that the application has already. No page counts as written
    /// at first.
    ///
    /// # Errors
    /// If the kernel refuses, or the tracker needs memory of its own.
    fn watch_span(&mut self, span: PageSpan) -> Result<(), Error>;

    /// Allocates memory and begins to follow it.
    ///
    /// # Errors
    /// If the kernel refuses.
    fn allocate_memory(&mut self, bytes: usize) -> Result<Arc<AreaMemory>, Error> {
        let memory = Arc::new(AreaMemory::anonymous(bytes)?);
        self.watch_span(memory.span()).map(|()| memory)
    }

    /// Ends to follow pages: the application may unmap them afterwards. Spans that were followed
    /// may have other pages, too, which are followed as before.
    ///
    /// # Errors
    /// If the kernel refuses, or the tracker cannot: then the pages are followed as before.
    fn forget_span(&mut self, span: PageSpan) -> Result<(), Error> {
        let _ = span;
        let why = "it cannot forget areas".to_owned();
        Err(Error::Unavailable { kind: self.kind(), why })
    }

    /// Adds the runs that may have been written since the last call, and begins a new period.
    ///
    /// # Errors
    /// If the kernel refuses: then what was written is unknown.
    fn collect_writes(&mut self, found: &mut WrittenRuns) -> Result<(), Error>;

    /// Checks that other code has not taken away what the tracker needs.
    ///
    /// # Errors
    /// If writes would not be found any more.
    fn check_working(&self) -> Result<(), Error> {
        Ok(())
    }

    /// What the tracker cannot do here, why, and what would permit it.
    fn restriction(&self) -> Option<&str> {
        None
    }

    /// The counts of events so far.
    fn counts(&self) -> TrackerCounts {
        TrackerCounts::default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_are_joined() {
        let mut found = WrittenRuns::default();
        for (start, len) in [(8, 8), (16, 8), (40, 8), (0, 12), (44, 2)] {
            found.push_run(start, len);
        }
        found.join_runs();
        assert_eq!(found.runs(), [(0, 24), (40, 8)]);
    }
}
