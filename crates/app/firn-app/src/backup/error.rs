//! Errors of backups.

use std::io;
use std::path::PathBuf;
use std::time::Duration;

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
    /// The other host cannot do it now. A retry may succeed.
    #[error("the backup reports: {0}")]
    Failed(String),
    /// The other host refuses. A retry does not help until its configuration is changed.
    #[error("the backup refuses: {0}")]
    Refused(String),
    /// A later session of this name has the backup.
    #[error(
        "a later session of this name, of generation {generation}, has taken over: this one can't commit any more"
    )]
    Superseded {
        /// The generation of the later session.
        generation: u64,
    },
    /// Fewer targets than required have stored a transaction in time. It is committed in the areas,
    /// and is stored when the targets return.
    #[error(
        "transaction {sequence} is stored by {stored} of {targets} backups after {} ms, and {required} must have it: {lacking}",
        .waited.as_millis()
    )]
    NotAcknowledged {
        /// The transaction.
        sequence: u64,
        /// The count of targets that have acknowledged it.
        stored: usize,
        /// The count of targets.
        targets: usize,
        /// The count of targets that must acknowledge it.
        required: usize,
        /// How long the call waited.
        waited: Duration,
        /// The targets that lack it, and why.
        lacking: String,
    },
    /// Too few targets can be read to know which transactions were acknowledged.
    #[error(
        "{readable} of {targets} backups can be read, and {needed} must be, because the others may have transactions that these \
         lack: {missing}; start the others, or discard the state (SessionOptions::discard)"
    )]
    TooFewReadable {
        /// The count of targets that can be read and are not empty.
        readable: usize,
        /// The count of targets.
        targets: usize,
        /// The count of targets that must be read.
        needed: usize,
        /// The other targets, and why they cannot be read.
        missing: String,
    },
    /// The file with the permissions of sessions cannot be used.
    #[error("{path}: {why}")]
    Table {
        /// The file.
        path: PathBuf,
        /// What is wrong, and what to do.
        why: String,
    },
    /// A thread could not be started.
    #[error("cannot start a thread for a backup")]
    Thread(#[source] io::Error),
}

impl BackupError {
    /// Whether a retry could succeed, without a change of any configuration.
    pub(crate) fn is_transient(&self) -> bool {
        matches!(self, Self::Connection { .. } | Self::Failed(_))
    }

    /// The message, with those of all causes.
    pub(crate) fn describe(&self) -> String {
        let mut words = self.to_string();
        let mut cause = std::error::Error::source(self);
        while let Some(error) = cause {
            words = format!("{words}: {error}");
            cause = error.source();
        }
        words
    }

    /// Whether the disk has no space left.
    pub(crate) fn is_out_of_space(&self) -> bool {
        use io::ErrorKind::{FileTooLarge, QuotaExceeded, StorageFull};
        let Self::File { source, .. } = self else { return false };
        matches!(source.kind(), StorageFull | QuotaExceeded | FileTooLarge)
    }
}
