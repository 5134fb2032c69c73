//! Errors of a connection to libvirt.

use std::io;
use std::path::PathBuf;

use thiserror::Error;

/// libvirt's number for an internal error, such as a monitor that was closed.
const INTERNAL_ERROR: i32 = 1;
/// libvirt's number for an operation that failed.
const OPERATION_FAILED: i32 = 9;
/// libvirt's number for a domain that it does not have.
const NO_DOMAIN: i32 = 42;
/// libvirt's number for an operation that the domain's state does not allow: it does not run.
const OPERATION_INVALID: i32 = 55;

/// The reason why libvirt did not do what Firn asked for.
#[derive(Debug, Error)]
pub enum LibvirtError {
    /// The URI names no daemon of this host that runs QEMU.
    #[error("{uri} is not a libvirt of this host that runs QEMU")]
    Uri {
        /// The URI.
        uri: String,
    },
    /// The daemon's socket could not be opened.
    #[error("cannot connect to libvirt at {socket}")]
    Connect {
        /// The socket.
        socket: PathBuf,
        /// The kernel's error.
        #[source]
        source: io::Error,
    },
    /// The socket failed.
    #[error("the connection to libvirt failed")]
    Io(#[from] io::Error),
    /// The daemon closed the connection, or died.
    #[error("libvirt closed the connection")]
    Closed,
    /// The daemon did not reply in time.
    #[error("{call}: no answer from libvirt within {waited_ms} ms")]
    TimedOut {
        /// The call.
        call: &'static str,
        /// How long Firn waited, in milliseconds.
        waited_ms: u128,
    },
    /// A message is not what the protocol promises.
    #[error("a message from libvirt cannot be read: {what}")]
    Message {
        /// The part that is wrong.
        what: &'static str,
    },
    /// The daemon asks for credentials that Firn does not have.
    #[error("libvirt asks for a password, which Firn does not have")]
    Password,
    /// The daemon refused the call.
    #[error("libvirt says: {text}")]
    Refused {
        /// libvirt's error number.
        code: i32,
        /// libvirt's error message.
        text: String,
    },
    /// The domain does not run.
    #[error("domain {name} does not run")]
    NotRunning {
        /// The domain.
        name: String,
    },
}

impl LibvirtError {
    /// Whether the daemon does not have the domain.
    pub fn is_no_domain(&self) -> bool {
        matches!(self, Self::Refused { code: NO_DOMAIN, .. })
    }

    /// Whether a command failed because the domain's monitor is closed, or because it may be.
    pub(crate) fn is_end_of_monitor(&self) -> bool {
        const CODES: [i32; 4] = [INTERNAL_ERROR, OPERATION_FAILED, NO_DOMAIN, OPERATION_INVALID];
        matches!(self, Self::Refused { code, .. } if CODES.contains(code))
    }
}
