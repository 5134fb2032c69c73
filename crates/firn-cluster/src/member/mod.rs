//! A VM's network card as a member of a cluster: what its gate does with each frame, so that one cut of the cluster is consistent and
//! nothing between its VMs is lost or doubled (VPC IV; `docs/design/014-switch.md`).
//!
//! ```text
//!            sent                                                             arrived
//!    VM a --------> Outbox, kept ------------------------> switches ... --------------> Marker: cut first
//!                     |   stamped with a's newest mark    (may drop, double, reorder)      |
//!                     |                                                                 Inbox: once, in order
//!                     |  <------------ "from 7 on, please" ---------------------------    |
//!                     '-- goes with the epoch to the backup: Kept                         '--> VM b
//! ```
//!
//! Here [`crate::output`] and [`crate::cut`] come together for one VM, with what they need of a network that may lose frames: the
//! receiver says where it has a hole, and the sender asks from time to time how far the receiver has come.
//!
//! - [`wire`]: what goes between two gates.
//! - [`Member`]: the gate of a VM that runs.
//! - [`Kept`]: what its backup has of it, from which another [`Member`] begins after a failover.
//!
//! Whoever is no member is outside, also at the same switch. Frames to the outside go as they are, once a global checkpoint is on
//! record. A frame to all goes to each member by itself, and outside; what comes from a member's address without being
//! wrapped is that copy, and is dropped.

use serde::{Deserialize, Serialize};

use crate::switch::Mac;
use crate::{Generation, Vm};

mod gate;
mod kept;
pub mod wire;

pub use gate::{Action, EPOCHS_KEPT_MAX, Frame, Member, Times};
pub use kept::{Kept, OfEpoch};

/// What a VM's gate has to know to be a member.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Membership {
    /// The cluster: whoever is in another one is outside.
    pub cluster: u32,
    /// The VM's number in it.
    pub own: Vm,
    /// The addresses of all its VMs, this one among them.
    pub members: Vec<(Vm, Mac)>,
    /// The timeline that begins.
    pub generation: Generation,
    /// Where the VMs and their backups are.
    pub layout: u64,
}

#[cfg(test)]
mod tests;
