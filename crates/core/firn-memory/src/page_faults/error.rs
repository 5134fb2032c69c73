//! Errors of page-fault handling.

use std::ops::Range;

use firn_types::Page;
use rustix::io::Errno;
use thiserror::Error;

use crate::process::ProcessError;
use crate::tracee::TraceError;

/// Why page faults could not be traced or answered.
#[derive(Debug, Error)]
pub enum PageFaultError {
    /// The hypervisor is gone or cannot be accessed.
    #[error(transparent)]
    Process(#[from] ProcessError),
    /// A call could not be made in the hypervisor.
    #[error(transparent)]
    Trace(#[from] TraceError),
    /// Firn itself gets no userfaultfd to query the features with.
    #[error(
        "userfaultfd is not available: the kernel needs CONFIG_USERFAULTFD, and a sandbox may hide it"
    )]
    Unavailable {
        /// The error of the kernel.
        source: Errno,
    },
    /// The kernel is too old for this.
    #[error(
        "the kernel's userfaultfd lacks {}: Linux 6.1 is needed everywhere, 6.4 to keep protection when a minor fault is \
         answered, 6.7 to scan for writes",
        .missing.join(", ")
    )]
    Features {
        /// The missing features, by the names of the header.
        missing: Vec<&'static str>,
    },
    /// Touches of private memory cannot be traced.
    #[error(
        "the guest's RAM is private memory of the hypervisor, of which only writes can be traced: start the VM with \
         shared RAM (memory-backend-memfd with share=on; `firn run` does that)"
    )]
    Private,
    /// Another userfaultfd has the memory registered.
    #[error(
        "{pages} pages of guest RAM from {first} are registered with another userfaultfd (a QEMU postcopy migration or \
         background snapshot, or a Firn that is still at work)"
    )]
    Taken {
        /// The first page.
        first: Page,
        /// The number of pages.
        pages: usize,
    },
    /// The hypervisor no longer has the memory registered there.
    #[error(
        "{what} {pages} pages of guest RAM from {first} failed: they are not registered (any more), or the hypervisor \
         has unmapped them"
    )]
    NotRegistered {
        /// The operation that failed.
        what: &'static str,
        /// The first page.
        first: Page,
        /// The number of pages.
        pages: usize,
    },
    /// The hypervisor keeps changing its address space.
    #[error(
        "{what} {pages} pages of guest RAM from {first}: the hypervisor has been changing its address space for too long"
    )]
    Busy {
        /// The operation that failed.
        what: &'static str,
        /// The first page.
        first: Page,
        /// The number of pages.
        pages: usize,
    },
    /// The host has no memory for the guest's pages.
    #[error(
        "{what} {pages} pages of guest RAM from {first}: no memory left for them: the tmpfs they lie in (/dev/shm) is \
         full, or the hypervisor's or Firn's cgroup has reached its limit"
    )]
    NoMemory {
        /// The operation that failed.
        what: &'static str,
        /// The first page.
        first: Page,
        /// The number of pages.
        pages: usize,
        /// The error of the kernel.
        source: Errno,
    },
    /// Anything else.
    #[error("{what} {pages} pages of guest RAM from {first} failed")]
    Failed {
        /// The operation that failed.
        what: &'static str,
        /// The first page.
        first: Page,
        /// The number of pages.
        pages: usize,
        /// The error of the kernel.
        source: Errno,
    },
}

impl PageFaultError {
    pub(super) fn from_errno(what: &'static str, part: &Range<Page>, source: Errno) -> Self {
        let (first, pages) = (part.start, Page::count_in(part));
        match source {
            Errno::NOENT => Self::NotRegistered { what, first, pages },
            Errno::BUSY => Self::Taken { first, pages },
            Errno::AGAIN => Self::Busy { what, first, pages },
            Errno::NOMEM | Errno::NOSPC => Self::NoMemory { what, first, pages, source },
            _ => Self::Failed { what, first, pages, source },
        }
    }
}
