//! Trackers: methods to find what a transaction wrote. One trait, and one module for each tracker.
//!
//! | tracker | first write of a page costs | a commit costs | reports | memory |
//! |---|---|---|---|---|
//! | [`TrackerKind::Pages`] (PT) | a signal, `mprotect` | `mprotect` | pages | any |
//! | [`TrackerKind::Emulate`] (Emul) | each write: a signal | nothing | words | allocated |
//! | [`TrackerKind::Assisted`] (PT by the kernel) | a fault inside the kernel | one scan | pages | any |
//! | [`TrackerKind::Scan`] | a fault inside the kernel, and maybe a copy | one scan | pages | any, or allocated |
//! | [`TrackerKind::Compare`] | nothing | reading everything | words | any |
//! | [`TrackerKind::Host`] | a fault on the host | one call to Firn | pages | any |
//! | [`TrackerKind::Stores`] | nothing (each store of the guest: a check of its address) | a store | words | any |
//!
//! A tracker whose list comes from elsewhere, for example a hypervisor that writes it into memory
//! of the application, is one more implementation of [`Tracker`]: `watch_span` requests the list,
//! `collect_writes` reads it.

mod assisted;
mod auto;
mod compare;
mod emulate;
mod hot;
mod pages;
mod scan;
mod whole;

use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

use crate::error::Error;
use crate::memory::AreaMemory;
use crate::span::PageSpan;

pub(crate) use auto::choose_tracker;

/// The kind of a tracker.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum TrackerKind {
    /// Write-protect, fault, note the page (PT): `mprotect` and SIGSEGV.
    Pages,
    /// Each store is performed through a second mapping, and its words are noted (Emul).
    Emulate,
    /// Write protection whose faults the kernel itself handles and remembers (PT assisted by the
    /// operating system).
    Assisted,
    /// Page-table entries, read at commit.
    Scan,
    /// All bytes are compared at commit with the last committed copy.
    Compare,
    /// Page tracking by Firn on the host, below the guest (PT assisted by the hypervisor): see
    /// [`crate::HostTracker`].
    Host,
    /// Stores noted by Firn's plugin in the hypervisor, below the guest (Emul assisted by the
    /// hypervisor): see [`crate::HostTracker::noting_stores`].
    Stores,
    /// A tracker that the caller provides: see [`crate::Session::open_with`].
    External,
}

impl TrackerKind {
    /// All kinds that a session can open by itself.
    pub const ALL: [Self; 5] =
        [Self::Pages, Self::Emulate, Self::Assisted, Self::Scan, Self::Compare];

    /// The name in options, figures and messages.
    pub fn name(self) -> &'static str {
        match self {
            Self::Pages => "pt",
            Self::Emulate => "emul",
            Self::Assisted => "pt_assisted",
            Self::Scan => "scan",
            Self::Compare => "compare",
            Self::Host => "pt_host",
            Self::Stores => "emul_host",
            Self::External => "external",
        }
    }
}

impl fmt::Display for TrackerKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for TrackerKind {
    type Err = UnknownTracker;

    fn from_str(name: &str) -> Result<Self, UnknownTracker> {
        let known = Self::ALL.into_iter().find(|kind| kind.name() == name);
        known.ok_or_else(|| UnknownTracker(name.to_owned()))
    }
}

/// No tracker has this name.
#[derive(Debug, thiserror::Error)]
#[error("no tracker has the name {0:?}: there are pt, emul, pt_assisted, scan, compare (and auto)")]
pub struct UnknownTracker(String);

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
    /// Commits for which the host was called, though stores are noted from below.
    pub called: u64,
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

    /// Adds the runs that may have been written since the last call, and begins a new period.
    ///
    /// # Errors
    /// If the kernel refuses: then what was written is unknown.
    fn collect_writes(&mut self, found: &mut WrittenRuns) -> Result<(), Error>;

    /// The counts of events so far.
    fn counts(&self) -> TrackerCounts {
        TrackerCounts::default()
    }
}

/// Opens a tracker.
pub(crate) fn open_tracker(kind: TrackerKind) -> Result<Box<dyn Tracker>, Error> {
    Ok(match kind {
        TrackerKind::Pages => Box::new(pages::PageTracker::default()),
        TrackerKind::Emulate => Box::new(emulate::EmulationTracker::default()),
        TrackerKind::Assisted => Box::new(assisted::AssistedTracker::open()?),
        TrackerKind::Scan => scan::open_scan()?,
        TrackerKind::Compare => Box::new(compare::CompareTracker::default()),
        TrackerKind::Host | TrackerKind::Stores | TrackerKind::External => {
            let why = "it is opened by Session::open_with".to_owned();
            return Err(Error::Unavailable { kind, why });
        }
    })
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

    #[test]
    fn names_are_read_back() {
        for kind in TrackerKind::ALL {
            assert_eq!(kind.name().parse::<TrackerKind>().unwrap(), kind);
        }
        assert!("soft".parse::<TrackerKind>().is_err());
    }
}
