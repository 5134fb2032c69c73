//! What can go wrong with page faults.

use std::ops::Range;

use firn_types::Page;
use rustix::io::Errno;
use thiserror::Error;

use crate::process::ProcessError;
use crate::tracee::TraceError;

/// What kept us from tracing or answering page faults.
#[derive(Debug, Error)]
pub enum PageFaultError {
    /// The hypervisor is gone or out of reach.
    #[error(transparent)]
    Process(#[from] ProcessError),
    /// A call could not be made in the hypervisor.
    #[error(transparent)]
    Trace(#[from] TraceError),
    /// Firn itself has no userfaultfd to ask for features.
    #[error(
        "userfaultfd is not available: the kernel needs CONFIG_USERFAULTFD, and a sandbox may hide it"
    )]
    Unavailable {
        /// What the kernel said.
        source: Errno,
    },
    /// The kernel is too old for this.
    #[error(
        "the kernel's userfaultfd lacks {}: Linux 6.1 is needed everywhere, 6.4 to keep protection when a minor fault is \
         answered, 6.7 to scan for writes",
        .missing.join(", ")
    )]
    Features {
        /// What it lacks, by the names of the header.
        missing: Vec<&'static str>,
    },
    /// Touches of private memory cannot be traced.
    #[error(
        "the guest's RAM is private memory of the hypervisor, of which only writes can be traced: start the VM with \
         shared RAM (memory-backend-memfd with share=on; `firn run` does that)"
    )]
    Private,
    /// Somebody else has registered the memory.
    #[error(
        "{pages} pages of guest RAM from {first} are registered with another userfaultfd (a QEMU postcopy migration or \
         background snapshot, or a Firn that is still at work)"
    )]
    Taken {
        /// The first page.
        first: Page,
        /// How many pages.
        pages: usize,
    },
    /// The hypervisor no longer has the memory registered there.
    #[error(
        "{what} {pages} pages of guest RAM from {first} failed: they are not registered (any more), or the hypervisor \
         has unmapped them"
    )]
    NotRegistered {
        /// What was tried.
        what: &'static str,
        /// The first page.
        first: Page,
        /// How many pages.
        pages: usize,
    },
    /// The hypervisor keeps changing its address space.
    #[error(
        "{what} {pages} pages of guest RAM from {first}: the hypervisor has been changing its address space for too long"
    )]
    Busy {
        /// What was tried.
        what: &'static str,
        /// The first page.
        first: Page,
        /// How many pages.
        pages: usize,
    },
    /// The host has no memory for the guest's pages.
    #[error(
        "{what} {pages} pages of guest RAM from {first}: no memory left for them: the tmpfs they lie in (/dev/shm) is \
         full, or the hypervisor's or Firn's cgroup has reached its limit"
    )]
    NoMemory {
        /// What was tried.
        what: &'static str,
        /// The first page.
        first: Page,
        /// How many pages.
        pages: usize,
        /// What the kernel said.
        source: Errno,
    },
    /// Anything else.
    #[error("{what} {pages} pages of guest RAM from {first} failed")]
    Failed {
        /// What was tried.
        what: &'static str,
        /// The first page.
        first: Page,
        /// How many pages.
        pages: usize,
        /// What the kernel said.
        source: Errno,
    },
}

impl PageFaultError {
    pub(super) fn refused(what: &'static str, part: &Range<Page>, source: Errno) -> Self {
        let (first, pages) = (part.start, Page::count(part));
        match source {
            Errno::NOENT => Self::NotRegistered { what, first, pages },
            Errno::BUSY => Self::Taken { first, pages },
            Errno::AGAIN => Self::Busy { what, first, pages },
            Errno::NOMEM | Errno::NOSPC => Self::NoMemory { what, first, pages, source },
            _ => Self::Failed { what, first, pages, source },
        }
    }
}
