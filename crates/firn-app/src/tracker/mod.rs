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
use crate::memory::Memory;
use crate::span::Span;

pub(crate) use auto::choose;

/// The kind of a tracker.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Kind {
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

impl Kind {
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

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Kind {
    type Err = UnknownKind;

    fn from_str(name: &str) -> Result<Self, UnknownKind> {
        let known = Self::ALL.into_iter().find(|kind| kind.name() == name);
        known.ok_or_else(|| UnknownKind(name.to_owned()))
    }
}

/// No tracker has this name.
#[derive(Debug, thiserror::Error)]
#[error("no tracker has the name {0:?}: there are pt, emul, pt_assisted, scan, compare (and auto)")]
pub struct UnknownKind(String);

/// Runs of addresses that a tracker found to be written.
#[derive(Clone, Debug, Default)]
pub struct Found {
    runs: Vec<(usize, usize)>,
}

impl Found {
    /// Adds a run of bytes that may have been written.
    pub fn push(&mut self, start: usize, len: usize) {
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
    pub(crate) fn normalize(&mut self) {
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
pub struct Counts {
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
    fn kind(&self) -> Kind;

    /// Whether it reports words as they were written. Other trackers report pages, and a session
    /// can find the words that differ.
    fn tells_words(&self) -> bool {
        false
    }

    /// Whether the session compares reported runs with the last committed copy: then a tracker may
    /// report more than was written, if that is faster. Called once, before any span is followed.
    fn compares(&mut self, compares: bool) {
        let _ = compares;
    }

    /// Begins to follow pages of memory that the application has already. No page counts as written
    /// at first.
    ///
    /// # Errors
    /// If the kernel refuses, or the tracker needs memory of its own.
    fn watch(&mut self, span: Span) -> Result<(), Error>;

    /// Allocates memory and begins to follow it.
    ///
    /// # Errors
    /// If the kernel refuses.
    fn allocate(&mut self, bytes: usize) -> Result<Arc<Memory>, Error> {
        let memory = Arc::new(Memory::anonymous(bytes)?);
        self.watch(memory.span()).map(|()| memory)
    }

    /// Adds the runs that may have been written since the last call, and begins a new period.
    ///
    /// # Errors
    /// If the kernel refuses: then what was written is unknown.
    fn collect(&mut self, found: &mut Found) -> Result<(), Error>;

    /// The counts of events so far.
    fn counts(&self) -> Counts {
        Counts::default()
    }
}

/// Opens a tracker.
pub(crate) fn open(kind: Kind) -> Result<Box<dyn Tracker>, Error> {
    Ok(match kind {
        Kind::Pages => Box::new(pages::Pages::default()),
        Kind::Emulate => Box::new(emulate::Emulate::default()),
        Kind::Assisted => Box::new(assisted::Assisted::open()?),
        Kind::Scan => scan::open()?,
        Kind::Compare => Box::new(compare::Compare::default()),
        Kind::Host | Kind::Stores | Kind::External => {
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
        let mut found = Found::default();
        for (start, len) in [(8, 8), (16, 8), (40, 8), (0, 12), (44, 2)] {
            found.push(start, len);
        }
        found.normalize();
        assert_eq!(found.runs(), [(0, 24), (40, 8)]);
    }

    #[test]
    fn names_are_read_back() {
        for kind in Kind::ALL {
            assert_eq!(kind.name().parse::<Kind>().unwrap(), kind);
        }
        assert!("soft".parse::<Kind>().is_err());
    }
}
