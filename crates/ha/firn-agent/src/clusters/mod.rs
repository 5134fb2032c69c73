//! Clusters: VMs that fail over as one, to the host of their copies. A VM that is protected alone is
//! a cluster of one ([`failover_unit`]).
//!
//! ```text
//!   firn protect web --backup b, at a       firn cluster protect shop, at c
//!     |                                       |                              the record (firn-membership)
//!     | lease: { a, - } <-- the lease -->     | cluster_record ------------> { web: a; db: b }
//!     | epochs to b                           | epochs to c, checkpoints
//!     | vm_record ------------------------------------------------------->  { a, backup b }
//!     |                                       | cluster_record ------------> { web: a, backup c; db: b, backup c }
//!     |                                       |                                      |  a's lease expires
//!     | at b: run_standby <------------------------------------------------ { b, generation + 1 }
//!     |                                       | at c: run_vms <------------ { web: c; db: c; generation + 1 }
//! ```
//!
//! Each host that a record names has one [`ClusterMember`](firn_membership::ClusterMember) for it,
//! which requests the lease and obeys the record ([`host_actions`]). Beside it a reconcile loop
//! ([`reconciler`]) carries out the actions that
//! [`plan_action`](firn_cluster::failover::reconcile::plan_action) plans, one at a time: it keeps
//! the record correct, and has VMs protected again that have lost their copies. All this is in
//! memory only ([`cluster_manager`]).
//!
//! What differs is the coordinator, which makes the global checkpoints:
//!
//! ```text
//!   a VM alone   its primary: each committed epoch is a global checkpoint. `firn failover`
//!                (manual), by the record.
//!   a cluster    the host of the copies, which stores the cluster in a file:
//!     create       get the address of each VM's card                      state: made
//!     protect      all VMs join, and are protected by this host           state: protected, and the
//!                  global checkpoints, several a second (checkpoints)       newest checkpoint
//!     failover     no more of them; all standbys run from the newest,     state: failing over,
//!                  in the next generation                                   failed over
//!     release      each backup agrees, each VM's output is released,      state: made
//!                  each VM leaves
//!   both           forget: all hosts that the record names are gone       the record has ended
//! ```
//!
//! Without `[membership]` there is no record and no lease: the user who requests a failover knows
//! that the primaries are gone.

mod action_text;
pub(crate) mod adoption;
mod ask_vms;
mod checkpoint_task;
mod checkpoints;
mod cluster_lock;
pub(crate) mod cluster_manager;
mod cluster_record;
mod cluster_store;
pub(crate) mod commands;
mod create;
mod failover;
pub(crate) mod failover_unit;
mod forget;
mod host_actions;
mod host_evidence;
pub(crate) mod lease;
pub(crate) mod manual;
mod membership_access;
mod moved_here;
mod observe;
pub(crate) mod peer_answers;
pub(crate) mod planned_move;
mod protect;
mod reconciler;
mod release;
mod remote_vm;
mod reprotect;
mod run_vms;
pub(crate) mod vm_record;
