//! What can go wrong with backups.

use std::io;
use std::path::PathBuf;

use thiserror::Error;

/// Why a backup does not take, or give, what it should.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum BackupError {
    /// The log cannot be read or written.
    #[error("{what} {path}")]
    File {
        /// What was tried.
        what: &'static str,
        /// The log.
        path: PathBuf,
        /// What the kernel said.
        source: io::Error,
    },
    /// Another process writes the log.
    #[error("{path} is in use by another process")]
    InUse {
        /// The log.
        path: PathBuf,
    },
    /// The file is no log, or of another version.
    #[error("{path} is no log of firn-app, or of another version")]
    NoLog {
        /// The file.
        path: PathBuf,
    },
    /// The log is another session's.
    #[error("{path} is the log of the session {found:?}, not of {expected:?}")]
    OtherSession {
        /// The log.
        path: PathBuf,
        /// Whose it is.
        found: String,
        /// Whose it should be.
        expected: String,
    },
    /// A record is damaged, and was not cut short.
    #[error(
        "{path} is damaged at byte {offset}: {why}; a transaction that was acknowledged may be lost (`truncate -s {offset} {path}` \
         gives up this one and all after it)"
    )]
    Damaged {
        /// The log.
        path: PathBuf,
        /// Where the damaged record starts.
        offset: u64,
        /// What is wrong with it.
        why: &'static str,
    },
    /// A record that makes no sense.
    #[error("a record makes no sense: {0}")]
    Malformed(&'static str),
    /// Keys or certificates cannot be used.
    #[error("TLS: {0}")]
    Tls(String),
    /// The other host cannot be reached, or the connection broke.
    #[error("the connection to {address}")]
    Connection {
        /// Where.
        address: String,
        /// What the kernel, or TLS, said.
        source: io::Error,
    },
    /// The other host says no.
    #[error("the backup refuses: {0}")]
    Refused(String),
    /// The helper thread is gone.
    #[error("the backup's helper thread is gone")]
    Gone,
}

impl BackupError {
    /// Whether trying again could help.
    pub(crate) fn is_passing(&self) -> bool {
        matches!(self, Self::Connection { .. })
    }

    /// Whether there was no room on the disk.
    pub(crate) fn is_for_want_of_room(&self) -> bool {
        use io::ErrorKind::{FileTooLarge, QuotaExceeded, StorageFull};
        let Self::File { source, .. } = self else { return false };
        matches!(source.kind(), StorageFull | QuotaExceeded | FileTooLarge)
    }
}
