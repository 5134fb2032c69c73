//! Failover of a cluster: leases, fencing, and one generation after another.
//!
//! ```text
//!   the record (changed by compare-and-swap; stored by embedded consensus, or as one key in etcd)
//!
//!              a primary's lease is over,           every host in `fence` has stopped,
//!              or a VM has failed, or planned       or its lease is over
//!     Runs --------------------------------> Fences ---------------------> Runs (next generation)
//!     | ^                                     generation + 1, layout + 1,        fence = {}
//!     | |                                     each backup becomes a primary,
//!     +-+                                     fence = all old primaries
//!      a backup's lease is over: layout + 1, another backup; nothing is rolled back
//!      a global checkpoint
//! ```
//!
//! All actions of a host follow from the newest record that it knows ([`HostGuard`]). All changes
//! of the record follow from the record and from facts that are reported again and again
//! ([`FailoverController`]). There are no commands that could get lost or arrive late. A controller
//! that was replaced without knowing it does no harm: its proposals name an outdated version.
//!
//! # No split brain
//!
//! 1. A host sends only while it holds its lease, *counted from the moment of its request*, by its
//!    own clock, shortened by the possible difference of the clocks' speeds. It reads the clock for
//!    **every frame it transmits** ([`HostGuard::may_send`]), so a process that was stopped
//!    (SIGSTOP) and continues finds that its lease is over before it sends anything.
//! 2. A host in `fence` isn't given a lease again. Hence, once the granter's clock shows that the
//!    last one is over, it can't send; or it reports itself that it has stopped.
//! 3. Backups run only the VMs that a record with an empty `fence` names.
//! 4. A lease comes with the record, and the host obeys the record before it uses the lease.
//!
//! # Manual failover
//!
//! A failover that a user requests changes the record by the same rules
//! ([`decide_manual_failover`]): it fences the old primary, whose lease has to be over before any
//! VM runs. So two hosts never send, whatever the user believes.
//!
//! The clock must advance while the host sleeps (`CLOCK_BOOTTIME`).
//!
//! # All VMs fail over as one
//!
//! A failure takes every VM back to the global checkpoint. The backups have it in memory, ready to
//! run, so every VM continues *there*, and the surviving old primaries become the new backups. No
//! host is primary of one VM and backup of another: if it were, its failure would take one VM and
//! the standby to which another must go back.
//!
//! Between a failover and the first global checkpoint of the new layout there are no standbys to go
//! back to. A second failure in that time ends the cluster ([`ControllerDecision::Lost`]): it
//! stops, and doesn't continue from another state. An agent that was restarted is another
//! [`HostId`](crate::HostId): standbys in its memory are lost.

mod controller;
mod guard;
mod lease;
mod manual;
pub mod reconcile;
mod record;

pub use controller::{ControllerDecision, FailoverController};
pub use guard::{GuardAction, HostGuard};
pub use lease::{GrantedLeases, HeldLease, LeaseTerms};
pub use manual::{ManualDecision, ManualRefusal, decide_manual_failover};
pub use record::{FailoverRecord, VmPlacement};

#[cfg(test)]
mod tests;
