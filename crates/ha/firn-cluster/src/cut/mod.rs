//! Consistent cut of the cluster (VPC IV.B), from epochs that are not synchronized.
//!
//! ```text
//!   initiator                 VMs                                         record
//!       |--- request r ------->|  each marks the running epoch: its next    |
//!       |                      |  cut ends it                               |
//!       |<-- mark of r --------|  ... and it is committed                   |
//!       |  all have answered: the global checkpoint is { VM: epoch }        |
//!       |--- record it, if this is still the generation ------------------->|
//!       |<-- recorded ------------------------------------------------------|
//!       |--- checkpoint r exists: release output, fold, trim --> all VMs
//! ```
//!
//! # The messages of a cut
//!
//! Type 1: sent and received on the same side. Type 2: sent before, received after; such messages
//! are in flight in the checkpoint ([`crate::output`]). Type 3, an *orphan*: sent after, received
//! before; a state in which a VM has a message that no VM has sent.
//!
//! # Frames between VMs are not buffered
//!
//! They leave as they are sent. The rule of Lai and Yang makes the cut consistent nevertheless:
//! **every frame carries the number of its sender's newest mark. A VM that gets a frame with a
//! higher number than its own mark is cut first, this cut is its mark of that number, and then it
//! gets the frame.** A VM may do so without having received the request.
//!
//! ```text
//!    VM a   ---[ cut: its mark of r ]--- sends f, with r
//!                                            \
//!    VM b   ----------------------------- f arrives: [ cut: its mark of r ] f is delivered ---
//! ```
//!
//! Why that is enough. Assume that f is not in a's part of cut r. Then f was sent after the cut
//! that was a's mark of r, and carries r or more. b is cut, with a mark of r or more, before it
//! gets f. So b's part of cut r, which its mark fixes, is without f as well.
//!
//! VPC holds frames until their epoch is committed (IV.B). That would delay every message between
//! two VMs by an interval and a half. It is not needed for consistency, and is not enough for it
//! either: two VMs mark at two moments, and in between the newest committed epoch changes.
//!
//! The rule needs no clocks and no order between connections. A request that is lost or late costs
//! only time. A VM is cut at most once for each request, soon after the first VM of all: so
//! requests should not come faster than VMs may be cut.
//!
//! # Generations
//!
//! A rollback begins a new generation. Frames, marks and answers of another generation are dropped,
//! and a global checkpoint is recorded only if the record is still in the generation that made it.
//! So there is one sequence of checkpoints, and the state to which a rollback goes back is never
//! older than the one for which output was released.

mod initiator;
mod marker;

pub use initiator::{CheckpointInitiator, InitiatorAction, RequestTiming};
pub use marker::{CutMarker, FrameStamp, MarkAnswer, StampDecision};

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::{Epoch, Generation, RequestNumber, VmId};

/// A global checkpoint: one epoch of each VM, together a consistent state of the cluster.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct GlobalCheckpoint {
    /// Its number, counted from the beginning of the cluster.
    pub number: u64,
    /// The generation that made it.
    pub generation: Generation,
    /// The layout: where the VMs and their backups were (see
    /// [`FailoverRecord::layout`](crate::failover::FailoverRecord::layout)).
    pub layout: u64,
    /// The request that made it.
    pub request: RequestNumber,
    /// Each VM's epoch.
    pub marks: BTreeMap<VmId, Epoch>,
}

#[cfg(test)]
mod tests;
