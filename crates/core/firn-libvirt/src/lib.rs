//! A client of libvirt's daemon: the monitor of a domain as a QMP socket.
//!
//! libvirt holds the only monitor of its domains, and executes QMP commands for others. Firn speaks
//! libvirt's RPC, in which neither library nor program of libvirt takes part:
//!
//! ```text
//!   Firn's QMP client <-- socket pair --> MonitorBridge, a thread <-- libvirt-sock --> daemon <--> QEMU
//!        one line per command, descriptors, events        one RPC call at a time, events
//! ```
//!
//! | module | holds |
//! |---|---|
//! | `address` | where a domain is: its daemon's socket, its UUID |
//! | `xdr`, `message` | the encoding of calls, replies and events |
//! | `connection` | one connection: calls, and events that arrive in between |
//! | `domain` | domains by name, their XML, their start and end |
//! | `definition` | the XML of a domain that is restored from an image |
//! | `bridge` | QMP on one side, RPC on the other |
//!
//! The daemon's messages are untrusted input: lengths are limited, and waits have a deadline.

#![forbid(unsafe_code)]

mod address;
mod bridge;
mod connection;
mod definition;
mod domain;
mod error;
mod message;
#[cfg(test)]
mod testing;
mod xdr;

pub use address::{DaemonAddress, DomainAddress};
pub use bridge::open_monitor;
pub use connection::LibvirtConnection;
pub use definition::{DefinitionError, DiskReplacement, DomainChanges, DomainIdentity, has_mark};
pub use domain::{Domain, find_domain};
pub use error::LibvirtError;
