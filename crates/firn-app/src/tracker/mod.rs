//! How a session knows what was written: one trait, one module for each way.
//!
//! | tracker | first write of a page costs | a commit costs | tells | memory |
//! |---|---|---|---|---|
//! | [`Kind::Pages`] (PT) | a signal, `mprotect` | `mprotect` | pages | any |
//! | [`Kind::Emulate`] (Emul) | each write: a signal | nothing | words | allocated |
//! | [`Kind::Assisted`] (PT by the kernel) | a fault inside the kernel | one scan | pages | any |
//! | [`Kind::Scan`] | a fault inside the kernel, and maybe a copy | one scan | pages | any, or allocated |
//! | [`Kind::Compare`] | nothing | reading everything | words | any |
//! | [`Kind::Host`] | a fault on the host | one call to Firn | pages | any |
//! | [`Kind::Stores`] | nothing (each store of the guest: a look at its address) | a store | words | any |
//!
//! A tracker whose list comes from elsewhere, a hypervisor that writes it into memory of the application, is one more
//! implementation of [`Tracker`]: `watch` asks for the list, `collect` reads it.

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

/// Which tracker.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Kind {
    /// Write-protect, fault, note the page (PT): `mprotect` and SIGSEGV.
    Pages,
    /// Perform each store through a second mapping and note its words (Emul).
    Emulate,
    /// Write protection that the kernel itself answers and remembers (PT assisted by the operating system).
    Assisted,
    /// Page-table entries, read at commit.
    Scan,
    /// All bytes, compared at commit with the last committed copy.
    Compare,
    /// Page tracking by Firn on the host, below the guest (PT assisted by the hypervisor): see [`crate::Host`].
    Host,
    /// Stores noted by Firn's plugin in the hypervisor, below the guest (Emul assisted by the hypervisor): see
    /// [`crate::Host::noting_stores`].
    Stores,
    /// Somebody else's list: see [`crate::Session::open_with`].
    External,
}

impl Kind {
    /// All that a session can open by itself.
    pub const ALL: [Self; 5] =
        [Self::Pages, Self::Emulate, Self::Assisted, Self::Scan, Self::Compare];

    /// Its name in options, figures and messages.
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

/// No tracker is called so.
#[derive(Debug, thiserror::Error)]
#[error("no tracker is called {0:?}; there are pt, emul, pt_assisted, scan, compare (and auto)")]
pub struct UnknownKind(String);

/// What a tracker noticed: runs of addresses.
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

    /// Forgets all of them.
    pub fn clear(&mut self) {
        self.runs.clear();
    }

    pub(crate) fn runs(&self) -> &[(usize, usize)] {
        &self.runs
    }

    /// By address, each byte once.
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

/// What happened besides.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Stores performed through a second mapping.
    pub emulated: u64,
    /// Instructions that could not be, whose pages were followed as by PT.
    pub unsupported: u64,
    /// Commits for which the host could not tell what was written, so that everything counted.
    pub blind: u64,
    /// Commits for which the host was called, though stores are noted from below.
    pub called: u64,
}

/// Something that knows what was written.
///
/// Calls come from one thread at a time, and never while the application writes the memory that is followed.
pub trait Tracker: Send {
    /// Which it is.
    fn kind(&self) -> Kind;

    /// Whether it tells words as they were written. The others tell pages, and a session can find the words that differ.
    fn tells_words(&self) -> bool {
        false
    }

    /// Whether the session compares what it is told with the last committed copy: then a tracker may tell more than was
    /// written, if that is quicker. Called once, before anything is followed.
    fn compares(&mut self, compares: bool) {
        let _ = compares;
    }

    /// Starts to follow pages of memory that the application has already. Nothing counts as written.
    ///
    /// # Errors
    /// If the kernel refuses, or the tracker needs memory of its own.
    fn watch(&mut self, span: Span) -> Result<(), Error>;

    /// Starts to follow memory that the library allocates for the purpose.
    ///
    /// # Errors
    /// If the kernel refuses.
    fn allocate(&mut self, bytes: usize) -> Result<Arc<Memory>, Error> {
        let memory = Arc::new(Memory::anonymous(bytes)?);
        self.watch(memory.span()).map(|()| memory)
    }

    /// Adds what may have been written since the last call, and starts anew.
    ///
    /// # Errors
    /// If the kernel refuses: what was written is then unknown.
    fn collect(&mut self, found: &mut Found) -> Result<(), Error>;

    /// What happened so far.
    fn counts(&self) -> Counts {
        Counts::default()
    }
}

/// Makes a tracker.
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
