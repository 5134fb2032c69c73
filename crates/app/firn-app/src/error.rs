//! Errors of a session.

use std::io;
use std::sync::Arc;

use rustix::io::Errno;
use thiserror::Error;

use crate::backup::error::BackupError;
use crate::tracker::kind::TrackerKind;

/// Why a session could not do what its caller requested.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum Error {
    /// A system call failed.
    #[error("{what} failed")]
    System {
        /// The operation that failed.
        what: &'static str,
        /// The kernel's error.
        source: io::Error,
    },
    /// The tracker does not work on this kernel.
    #[error("the tracker {kind} does not work here: {why}")]
    Unavailable {
        /// The tracker.
        kind: TrackerKind,
        /// What the kernel lacks.
        why: String,
    },
    /// The tracker follows only memory that the library allocated.
    #[error(
        "the tracker {kind} cannot follow memory that the application has already: allocate the area"
    )]
    Foreign {
        /// The tracker.
        kind: TrackerKind,
    },
    /// Another session already follows some page of the area.
    #[error(
        "a page of the area {name:?} (addresses {start:#x} to {end:#x}) belongs to another session"
    )]
    Taken {
        /// The area.
        name: String,
        /// Its first address.
        start: usize,
        /// The address after its last.
        end: usize,
    },
    /// Two areas of a session have a byte or a name in common.
    #[error("the area {name:?} overlaps with the area {other:?}, or has its name")]
    Overlap {
        /// The new area.
        name: String,
        /// The existing area.
        other: String,
    },
    /// An area is empty, or has too long a name.
    #[error("the area {name:?} has {len} bytes and a name of {} bytes: 1 byte at least, 255 bytes at most", .name.len())]
    Size {
        /// The area.
        name: String,
        /// Its length.
        len: usize,
    },
    /// The session does not have this area.
    #[error("the session has no such area")]
    NoArea,
    /// A stored area has another size than the area of the same name.
    #[error("the area {name:?} has {len} bytes, and {stored} in the backup")]
    OtherSize {
        /// The area.
        name: String,
        /// Its length.
        len: usize,
        /// Its length in the backup.
        stored: usize,
    },
    /// Too few backups store what was committed, or none returns a state. A transaction that fails
    /// with this error is committed in the areas, but not acknowledged; backups get it when they
    /// return.
    #[error("the backup failed")]
    Backup(#[source] Arc<BackupError>),
    /// The session belongs to the process that this one was forked from.
    #[error(
        "the session {name:?} belongs to process {pid}, and this process is a child of it: open a session here"
    )]
    Forked {
        /// The session.
        name: String,
        /// The process that opened it.
        pid: u32,
    },
    /// Another handler of SIGSEGV was installed after that of the session.
    #[error(
        "a handler of SIGSEGV that was installed later has replaced that of the tracker {kind}: install it before the first \
         session, choose the tracker pt_assisted, or permit it (SessionOptions::later_handler) if it calls the one that it replaced"
    )]
    HandlerReplaced {
        /// The tracker.
        kind: TrackerKind,
    },
    /// The call does not fit the session's state: begin inside of a transaction, or commit and
    /// abort outside of one.
    #[error("{what}: {why}")]
    State {
        /// The call.
        what: &'static str,
        /// Why the session refuses it now.
        why: &'static str,
    },
}

impl Error {
    pub(crate) fn backup(error: BackupError) -> Self {
        Self::Backup(Arc::new(error))
    }

    pub(crate) fn system(what: &'static str) -> impl Fn(Errno) -> Self {
        move |errno| Self::System { what, source: errno.into() }
    }

    pub(crate) fn io(what: &'static str) -> impl Fn(io::Error) -> Self {
        move |source| Self::System { what, source }
    }
}
