//! The pure cores of virtual clusters: several VMs on several hosts that survive the loss of a host together.
//!
//! ```text
//!             host 1                               host 2                        backup
//!   +------------------------+         +------------------------+      +----------------------+
//!   | VM a                   |         | VM b                   |      | copies of a and b,   |
//!   |  | writes     | frames |         |  | writes     | frames |      | ready to run         |
//!   |  v            v        |         |  v            v        |      +----------------------+
//!   | predict     switch     |         | predict     switch     |        ^  epoch::Backup
//!   |  |            v        | frames  |  |            v        |        |
//!   |  |          output ----|---------|--|--------> output     |        |
//!   |  v            ^        |         |  v            ^        |        |
//!   | epoch --------+        |         | epoch --------+        |--------+  pages, device state, frames
//!   +----|-------------------+         +----|-------------------+
//!        +------ cut: one consistent epoch of each VM ---- failover: one register, leases
//! ```
//!
//! - [`predict`]: which pages start an epoch writable, and which of them need not be sent.
//! - [`epoch`]: cut, buffer, transfer, acknowledge, commit; what happens when the backup is slow.
//! - [`output`]: frames are held until nothing can undo them; those in flight belong to the checkpoint.
//! - [`switch`]: where frames go.
//! - [`cut`]: one consistent cut from epochs that are not synchronized.
//! - [`member`]: a VM's network card as part of the cut, over a network that loses frames.
//! - [`failover`]: who may run and send.
//!
//! Each takes events and returns actions. None does I/O, starts a thread or looks at a clock: time arrives with the
//! events, as a duration since any fixed moment. So one test tries every order of everything for a small cluster, and another
//! plays large ones from a seed (`tests/it`). The protocol as a whole is told in `docs/design/003-virtual-clusters.md`.

#![forbid(unsafe_code)]

pub mod cut;
pub mod epoch;
pub mod failover;
pub mod member;
pub mod output;
pub mod predict;
pub mod switch;
mod words;

pub use words::{Epoch, Generation, Host, RequestNumber, Seq, Vm};
