//! One consistent cut of the cluster (VPC IV.B), from epochs that are not synchronized.
//!
//! ```text
//!   initiator                 hosts                                            register
//!       |--- request r ------->|  each marks the newest committed epoch of        |
//!       |<-- marks of r -------|  each of its VMs, once                           |
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
//! # Holding frames is not enough
//!
//! A VM's frames leave when their epoch is committed, so a receiver can't have got what its sender's newest committed copy
//! hasn't sent. But two hosts mark at two moments, and in between the sender's newest committed copy changes:
//!
//! ```text
//!    VM a   ---[mark r: epoch 1]---- epoch 2 is committed: frame f leaves
//!                                                       \
//!    VM b   ------------------------------------ f received, that epoch is committed ---[mark r: it has f]---
//! ```
//!
//! The cut has b with f and a before it sent f. So one more rule is needed, which is that of Lai and Yang, put on released
//! frames: **every frame carries the number of its sender's newest mark at the moment it leaves, and a host that gets a frame
//! with a higher number than its own marks first, and delivers then.** It may do so without having seen the request.
//!
//! Why that is enough. Say f is not in a's part of cut r. Then its epoch was committed after a's host marked r, so it left
//! after that mark, and carries r or more. The host of b marks r before it delivers f: what it marks is committed already, and
//! can't include f. Then b's part of cut r, fixed by that mark, is without f as well.
//!
//! It needs no clocks, no order between connections, and no pause. A request lost or late costs time only.
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
