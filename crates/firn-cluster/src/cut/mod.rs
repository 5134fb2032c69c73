//! One consistent cut of the cluster (VPC IV.B), from epochs that are not synchronized.
//!
//! ```text
//!   initiator                 VMs                                              register
//!       |--- request r ------->|  each marks the epoch that runs: its next cut    |
//!       |                      |  ends it                                         |
//!       |<-- mark of r --------|  ... and it is committed                         |
//!       |  all have answered: the global checkpoint is { VM: epoch }              |
//!       |--- record it, if this is still the timeline --------------------------->|
//!       |<-- recorded ------------------------------------------------------------|
//!       |--- checkpoint r exists: release output, fold, trim --> everybody
//! ```
//!
//! # The messages of a cut
//!
//! Type 1: sent and received on the same side. Type 2: sent before, received after; they are in flight in the checkpoint
//! ([`crate::output`]). Type 3, an *orphan*: sent after, received before; a state in which a VM has something that nobody sent.
//!
//! # Frames between VMs are not held
//!
//! They leave as they are sent. What makes the cut consistent all the same is the rule of Lai and Yang: **every frame carries the number
//! of its sender's newest mark, and a VM that gets a frame with a higher number than its own mark is cut first, which is its mark of
//! that number, and gets the frame then.** It may do so without having seen the request.
//!
//! ```text
//!    VM a   ---[ cut: its mark of r ]--- sends f, with r
//!                                            \
//!    VM b   ---------------------------------- f arrives: [ cut: its mark of r ] f is delivered ---
//! ```
//!
//! Why that is enough. Say f is not in a's part of cut r. Then it was sent after the cut that was a's mark of r, and carries r or more. b
//! is cut, with a mark of r or more, before it gets f. So b's part of cut r, fixed by its mark, is without f as well.
//!
//! VPC holds frames until their epoch is committed (IV.B). That would cost every message between two VMs an interval and a half, is not needed
//! for this, and is not enough for it either: two VMs mark at two moments, and in between the newest committed epoch changes.
//!
//! It needs no clocks and no order between connections. A request lost or late costs time only. A VM is cut once for each request at most, soon
//! after the first of all is: so requests should not come faster than VMs may be cut.
//!
//! # Timelines
//!
//! A rollback begins a new generation. Frames, marks and answers of another generation are dropped, and a global checkpoint
//! is recorded only if the register is still in the generation that made it. So there is one sequence of checkpoints, and what
//! a rollback goes back to is never older than what output was released for.

mod initiator;
mod marker;

pub use initiator::{Action, Initiator, Pace};
pub use marker::{Answer, Arriving, Marker, Stamp};

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::{Epoch, Generation, RequestNumber, Vm};

/// A global checkpoint: one epoch of each VM, together a consistent state of the cluster.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct GlobalCheckpoint {
    /// Its number, counted over the cluster's life.
    pub number: u64,
    /// The timeline that made it.
    pub generation: Generation,
    /// Where the VMs and their backups were (see [`Register::layout`](crate::failover::Register::layout)).
    pub layout: u64,
    /// The request that made it.
    pub request: RequestNumber,
    /// Each VM's epoch.
    pub marks: BTreeMap<Vm, Epoch>,
}

#[cfg(test)]
mod tests;
