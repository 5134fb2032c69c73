//! Virtual clusters: VMs of several hosts that are checkpointed as one, and fail over as one to
//! this host, their backup.
//!
//! ```text
//!   create    get the address of each VM's card                      state: made
//!   protect   all VMs join, and are protected by this host           state: protected, and the
//!             global checkpoints, several a second (checkpoints)       newest checkpoint
//!   failover  no more of them; all standbys run from the newest,     state: failing over,
//!             in the next generation                                   failed over
//!   release   each backup agrees, each VM's output is released,      state: made
//!             each VM leaves
//!   forget    all hosts that the record names are gone               the record has ended
//! ```
//!
//! The host that is the backup of all VMs makes the global checkpoints, and stores the cluster in a
//! file: its loss stops no VM, and the state that a failover needs is at the host that fails over.
//! Which host may run the VMs is decided apart. Without `[membership]`, the user who requests a
//! failover knows that the primaries are gone. With it, a record decides, output obeys leases, and
//! all VMs fail over without a person (`cluster_record`, `lease`; the planning in `reconcile` is pure).

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
mod forget;
mod host_actions;
mod host_evidence;
pub(crate) mod lease;
pub(crate) mod peer_answers;
mod protect;
mod reconcile;
pub(crate) mod reconciler;
mod release;
mod remote_vm;
mod reprotect;
mod run_vms;
