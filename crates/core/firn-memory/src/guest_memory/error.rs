//! Errors of guest memory.

use std::io;
use std::ops::Range;

use firn_types::{HostVirt, Page};
use thiserror::Error;

use crate::process::ProcessError;

/// An error of guest memory.
#[derive(Debug, Error)]
pub enum MemoryError {
    /// The process cannot be inspected.
    #[error(transparent)]
    Process(#[from] ProcessError),
    /// Map and locations do not match.
    #[error(
        "RAM region {0:?} of the map has no location, or a location names a region that is not in the map"
    )]
    Unlocated(String),
    /// The region's address range is not mapped, or not from one file.
    #[error(
        "RAM region {id:?}: {hva:?} is not the start of {bytes} mapped bytes of one file in process {pid}; is the \
         process id that of the VM?"
    )]
    Unmapped {
        /// The region.
        id: String,
        /// The address at which it should start.
        hva: HostVirt,
        /// Its size.
        bytes: u64,
        /// The process.
        pid: i32,
    },
    /// Other processes cannot access private memory.
    #[error(
        "RAM region {id:?} is private memory of the hypervisor: start the VM with shared RAM \
         (-object memory-backend-memfd,id={id},size=...,share=on -machine memory-backend={id}; `firn run` does that)"
    )]
    Private {
        /// The region.
        id: String,
    },
    /// Only RAM in tmpfs, a memfd or huge pages of 2 MiB can be traced.
    #[error(
        "RAM region {id:?} lies in {path:?}, which is {kind}: only RAM in tmpfs (/dev/shm), a memfd, or huge pages \
         of 2 MiB can be traced"
    )]
    NotShmem {
        /// The region.
        id: String,
        /// The file.
        path: String,
        /// The kind of file system or pages.
        kind: &'static str,
    },
    /// The RAM file cannot be opened.
    #[error("opening {path:?}, the file of RAM region {id:?} in process {pid}, failed")]
    Open {
        /// The region.
        id: String,
        /// The process.
        pid: i32,
        /// The file.
        path: String,
        /// The error of the kernel.
        source: io::Error,
    },
    /// Reading, querying or punching failed.
    #[error("{what} {pages} pages from {first} of guest RAM failed")]
    Io {
        /// The operation that failed.
        what: &'static str,
        /// The first page of it.
        first: Page,
        /// The number of pages.
        pages: usize,
        /// The error of the kernel.
        source: io::Error,
    },
}

impl MemoryError {
    pub(super) fn from_io(
        what: &'static str,
        part: &Range<Page>,
        source: impl Into<io::Error>,
    ) -> Self {
        let (first, pages) = (part.start, Page::count_in(part));
        Self::Io { what, first, pages, source: source.into() }
    }
}
