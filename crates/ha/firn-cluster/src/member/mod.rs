//! Cluster member: a VM's network card as part of a cluster. It handles each frame so that the cut
//! of the cluster is consistent, and no frame between its VMs is lost or duplicated (VPC IV;
//! `docs/design/014-switch.md`).
//!
//! ```text
//!         send_frame                                             receive_frame
//!    VM a ----------> FrameOutbox, stored ------> switches ... ------------> CutMarker: cut first
//!                      |  stamped with a's mark   (may drop, duplicate, reorder)   |
//!                      |                                            ReceiveCounters: once, in order
//!                      |  <----------- "send again from 7 on" -------------        |
//!                      '-- with the epoch to the backup: StandbyNic                '--> VM b
//! ```
//!
//! This module combines [`crate::output`] and [`crate::cut`] for one VM, and adds what they need in
//! a network that may lose frames: the receiver reports missing frames, and the sender asks from
//! time to time for the newest frame that the receiver has.
//!
//! - [`wire`]: the messages between two members.
//! - [`MemberNic`]: the card of a VM that runs.
//! - [`StandbyNic`]: the backup's copy of it, from which another [`MemberNic`] begins after a
//!   failover.
//!
//! Every VM or host that is no member is outside, also if it is at the same switch. Frames to the
//! outside leave unchanged, once a global checkpoint is recorded. A broadcast frame goes to each
//! member separately, and to the outside. A frame from a member's address that is not wrapped is
//! that outside copy, and is dropped.

use serde::{Deserialize, Serialize};

use crate::switch::MacAddress;
use crate::{Generation, VmId};

mod nic;
mod standby_nic;
pub mod wire;

pub use nic::{EPOCHS_KEPT_MAX, MemberAction, MemberNic, MemberTimes, StoredFrame};
pub use standby_nic::{NicEpoch, StandbyNic};

/// The facts that a VM's card needs to be a member.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ClusterMembership {
    /// The cluster. A VM of another cluster is outside.
    pub cluster: u32,
    /// The VM's number in it.
    pub own: VmId,
    /// The addresses of all its VMs, this one among them.
    pub members: Vec<(VmId, MacAddress)>,
    /// The generation that begins.
    pub generation: Generation,
    /// The layout: where the VMs and their backups are.
    pub layout: u64,
}

#[cfg(test)]
mod tests;
