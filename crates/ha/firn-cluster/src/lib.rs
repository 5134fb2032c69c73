//! Virtual cluster cores: the pure cores of clusters of several VMs on several hosts, which survive
//! the loss of a host as one.
//!
//! ```text
//!             host 1                               host 2                        backup
//!   +------------------------+         +------------------------+      +----------------------+
//!   | VM a                   |         | VM b                   |      | standbys of a and b, |
//!   |  | writes     | frames |         |  | writes     | frames |      | ready to run         |
//!   |  v            v        |         |  v            v        |      +----------------------+
//!   | predict     switch     |         | predict     switch     |        ^  epoch::BackupEpochs
//!   |  |            v        | frames  |  |            v        |        |
//!   |  |          output ----|---------|--|--------> output     |        |
//!   |  v            ^        |         |  v            ^        |        |
//!   | epoch --------+        |         | epoch --------+        |--------+  pages, devices, frames
//!   +----|-------------------+         +----|-------------------+
//!        +------ cut: one consistent epoch of each VM ---- failover: one record, leases
//! ```
//!
//! - [`predict`]: which pages start an epoch writable, and which of them need not be sent.
//! - [`epoch`]: cut, buffer, transfer, acknowledge, commit; throttles the VM when the backup is
//!   slow.
//! - [`output`]: buffers frames until no failover can undo them; in-flight frames belong to the
//!   checkpoint.
//! - [`switch`]: decides where frames go.
//! - [`cut`]: makes one consistent cut from epochs that are not synchronized.
//! - [`member`]: a VM's network card as part of the cut, over a network that loses frames.
//! - [`failover`]: decides which host may run VMs and send.
//!
//! Each module takes events and returns actions. None does I/O, starts a thread or reads a clock:
//! time arrives with the events, as a duration since any fixed moment. So one test tries every
//! order of all events for a small cluster, and another simulates large clusters from a seed
//! (`tests/it`). `docs/design/003-virtual-clusters.md` describes the protocol as a whole.

#![forbid(unsafe_code)]

pub mod cut;
pub mod epoch;
pub mod failover;
mod ids;
pub mod member;
pub mod output;
pub mod predict;
pub mod switch;

pub use ids::{Epoch, FrameNumber, Generation, HostId, RequestNumber, VmId};
