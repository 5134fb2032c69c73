//! Errors of backups.

use std::io;
use std::path::PathBuf;

use thiserror::Error;

/// Why a backup does not store or return a state.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum BackupError {
    /// The log cannot be read or written.
    #[error("{what} {path}")]
    File {
        /// The operation that failed.
        what: &'static str,
        /// The log.
        path: PathBuf,
        /// The kernel's error.
        source: io::Error,
    },
    /// Another process writes the log.
    #[error("{path} is in use by another process")]
    InUse {
        /// The log.
        path: PathBuf,
    },
    /// The file is no log, or a log of another version.
    #[error("{path} is no log of firn-app, or of another version")]
    NoLog {
        /// The file.
        path: PathBuf,
    },
    /// The log belongs to another session.
    #[error("{path} is the log of the session {found:?}, not of {expected:?}")]
    OtherSession {
        /// The log.
        path: PathBuf,
        /// The session it belongs to.
        found: String,
        /// The session that opened it.
        expected: String,
    },
    /// A record is damaged, and not merely truncated.
    #[error(
        "{path} is damaged at byte {offset}: {why}; a transaction that was acknowledged may be lost (`truncate -s {offset} {path}` \
         gives up this one and all after it)"
    )]
    Damaged {
        /// The log.
        path: PathBuf,
        /// The offset at which the damaged record starts.
        offset: u64,
        /// The fault in the record.
        why: &'static str,
    },
    /// A record that cannot be decoded or applied.
    #[error("malformed record: {0}")]
    Malformed(&'static str),
    /// Keys or certificates cannot be used.
    #[error("TLS: {0}")]
    Tls(String),
    /// The other host cannot be reached, or the connection broke.
    #[error("the connection to {address}")]
    Connection {
        /// The address.
        address: String,
        /// The kernel's error, or that of TLS.
        source: io::Error,
    },
    /// The other host refuses.
    #[error("the backup refuses: {0}")]
    Refused(String),
    /// The helper thread has ended.
    #[error("the backup's helper thread has ended")]
    Gone,
}

impl BackupError {
    /// Whether a retry could succeed.
    pub(crate) fn is_transient(&self) -> bool {
        matches!(self, Self::Connection { .. })
    }

    /// Whether the disk has no space left.
    pub(crate) fn is_out_of_space(&self) -> bool {
        use io::ErrorKind::{FileTooLarge, QuotaExceeded, StorageFull};
        let Self::File { source, .. } = self else { return false };
        matches!(source.kind(), StorageFull | QuotaExceeded | FileTooLarge)
    }
}
