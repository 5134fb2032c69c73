//! Errors of a monitor connection. Every message names the current command.

use std::io;
use std::path::PathBuf;

use thiserror::Error;

use super::reply::ReplyError;

/// The reason why a QMP command, or the connection, failed.
#[derive(Debug, Error)]
pub enum QmpError {
    /// The monitor's socket could not be opened.
    #[error("cannot connect to the QMP monitor at {path}")]
    Connect {
        /// The socket.
        path: PathBuf,
        /// The kernel's error.
        #[source]
        source: io::Error,
    },
    /// The socket failed.
    #[error("{command}: the QMP connection failed")]
    Io {
        /// The current command.
        command: String,
        /// The kernel's error.
        #[source]
        source: io::Error,
    },
    /// QEMU closed the connection, or died.
    #[error("{command}: QEMU closed the QMP connection before it answered")]
    Closed {
        /// The current command.
        command: String,
    },
    /// QEMU did not reply in time. A monitor that another client holds open fails like this from
    /// the start.
    #[error("{command}: no answer from QEMU within {waited_ms} ms")]
    TimedOut {
        /// The current command.
        command: String,
        /// How long Firn waited, in milliseconds.
        waited_ms: u128,
    },
    /// A line did not end within the limit.
    #[error("{command}: a line from QEMU is longer than {limit_bytes} bytes")]
    LineTooLong {
        /// The current command.
        command: String,
        /// The limit, in bytes.
        limit_bytes: usize,
    },
    /// A line is not QMP.
    #[error("{command}: QEMU's answer cannot be read")]
    Reply {
        /// The current command.
        command: String,
        /// The problem with the line.
        #[source]
        source: ReplyError,
    },
    /// QEMU refused the command.
    #[error("{command}: QEMU says: {desc}")]
    Refused {
        /// The command.
        command: String,
        /// QEMU's error class, such as `GenericError`.
        class: String,
        /// QEMU's error message.
        desc: String,
    },
    /// The command succeeded, but its reply does not have the form that its schema promises.
    #[error("{command}: {what} in QEMU's answer")]
    Unexpected {
        /// The command.
        command: String,
        /// The part that is missing or wrong.
        what: String,
    },
}

impl QmpError {
    /// Whether QEMU refused the command with this error class.
    pub fn has_class(&self, wanted: &str) -> bool {
        matches!(self, Self::Refused { class, .. } if class == wanted)
    }

    /// The error for a reply that lacks a part that its schema promises.
    pub fn unexpected(command: &str, what: impl Into<String>) -> Self {
        Self::Unexpected { command: command.to_owned(), what: what.into() }
    }
}
