//! The kinds of trackers, and their names.

use std::fmt;
use std::str::FromStr;

/// The kind of a tracker.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum TrackerKind {
    /// Write-protect, fault, record the page (PT): `mprotect` and SIGSEGV.
    Pages,
    /// Each store is performed through a second mapping, and its words are recorded (Emul).
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
    /// Stores recorded by Firn's plugin in the hypervisor, below the guest (Emul assisted by the
    /// hypervisor): see [`crate::HostTracker::recording_stores`].
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_read_back() {
        for kind in TrackerKind::ALL {
            assert_eq!(kind.name().parse::<TrackerKind>().unwrap(), kind);
        }
        assert!("soft".parse::<TrackerKind>().is_err());
    }
}
