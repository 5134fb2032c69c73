//! What can be wrong with guest memory.

use std::io;
use std::ops::Range;

use firn_types::{HostVirt, Page};
use thiserror::Error;

use crate::process::ProcessError;

/// What is wrong with guest memory.
#[derive(Debug, Error)]
pub enum MemoryError {
    /// The process cannot be looked at.
    #[error(transparent)]
    Process(#[from] ProcessError),
    /// Map and locations do not go together.
    #[error(
        "RAM region {0:?} of the map has no location, or a location names a region that is not in the map"
    )]
    Unlocated(String),
    /// Nothing, or not one thing, is mapped where the region should be.
    #[error(
        "RAM region {id:?}: {hva:?} is not the start of {bytes} mapped bytes of one file in process {pid}; is the \
         process id that of the VM?"
    )]
    Unmapped {
        /// The region.
        id: String,
        /// Where it should start.
        hva: HostVirt,
        /// Its size.
        bytes: u64,
        /// The process.
        pid: i32,
    },
    /// Private memory cannot be seen from outside.
    #[error(
        "RAM region {id:?} is private memory of the hypervisor: start the VM with shared RAM \
         (-object memory-backend-memfd,id={id},size=...,share=on -machine memory-backend={id}; `firn run` does that)"
    )]
    Private {
        /// The region.
        id: String,
    },
    /// Only memory files can be traced.
    #[error(
        "RAM region {id:?} lies in {path:?}, which is {kind}: only RAM in tmpfs (/dev/shm) or a memfd with base pages \
         can be traced"
    )]
    NotShmem {
        /// The region.
        id: String,
        /// The file.
        path: String,
        /// What it is instead.
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
        /// What the kernel said.
        source: io::Error,
    },
    /// Reading, asking or punching failed.
    #[error("{what} {pages} pages from {first} of guest RAM failed")]
    Io {
        /// What was tried.
        what: &'static str,
        /// The first page of it.
        first: Page,
        /// How many pages.
        pages: usize,
        /// What the kernel said.
        source: io::Error,
    },
}

impl MemoryError {
    pub(super) fn io(what: &'static str, part: &Range<Page>, source: impl Into<io::Error>) -> Self {
        let (first, pages) = (part.start, Page::count(part));
        Self::Io { what, first, pages, source: source.into() }
    }
}
