//! Failover of single VMs without a person: a VM that another host protects is a cluster of one
//! VM. Its record is named after the VM.
//!
//! ```text
//!   firn protect web --backup b
//!     |                                                       the record of "web"
//!     v                                                         (firn-membership)
//!   acquire_lease: the record exists and names this host,
//!                  and this host holds the lease <--------->  { primary: a, backup: - }
//!   protect: epochs go to b, the lease covers the frames                |
//!   record_committed_backup: b has committed an epoch ----->  { primary: a, backup: b }
//!                                                                       |  a's lease expires
//!   at b: the ClusterMember runs the VM <------------------  { primary: b, generation + 1 }
//! ```
//!
//! Each VM that a record may name has a [`ClusterMember`], which requests the lease and obeys the
//! record. Beside it a reconcile loop carries out one planned action at a time ([`plan_action`]):
//! it keeps the record correct, and protects a VM that has lost its backup by another host. This
//! state is in memory only ([`manager`]): an agent that starts adopts the VMs of its predecessor, unless another
//! host runs them.
//!
//! [`plan_action`]: reconcile::plan_action

pub(crate) mod adoption;
pub(crate) mod host_actions;
pub(crate) mod lease;
pub(crate) mod manager;
pub(crate) mod manual;
mod reconcile;
mod reconciler;
pub(crate) mod record;
