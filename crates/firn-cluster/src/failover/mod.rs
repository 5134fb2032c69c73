//! Failures, and how the cluster goes on: leases, fencing, one timeline after another.
//!
//! ```text
//!   the register (one record, changed by compare-and-swap; behind it embedded membership, or one key in etcd)
//!
//!              a primary's lease is over,           every host in `fence` has stopped,
//!              or a VM has failed, or planned       or its lease is over
//!     Runs --------------------------------> Fences -----------------------------------> Runs (the next generation)
//!     | ^                                     generation + 1, layout + 1,                  fence = {}
//!     | |                                     each backup becomes a primary,
//!     +-+                                     fence = all old primaries
//!      a backup's lease is over: layout + 1, another backup; nothing is rolled back
//!      a global checkpoint
//! ```
//!
//! Everything a host does follows from the newest register it knows ([`Guard`]); everything that changes the register follows
//! from the register and from facts that are reported again and again ([`Controller`]). There are no orders that could
//! get lost or come late. A controller that was replaced and doesn't know does no harm: its proposals name a version that is gone.
//!
//! # No split brain
//!
//! 1. A host sends only while it holds its lease, *counted from the moment it asked*, by its own clock, shortened by what
//!    clocks may differ in speed. It looks at the clock for **every frame it lets out** ([`Guard::may_send`]), so a process
//!    that was stopped (SIGSTOP) and wakes finds its lease gone before it sends anything.
//! 2. A host in `fence` isn't given a lease again. Hence, once the granter's clock says that the last one is over, it
//!    can't send; or it says itself that it has stopped.
//! 3. Backups run only what a register with an empty `fence` says.
//! 4. A lease comes with the register, and the register is obeyed before the lease is used.
//!
//! # By hand
//!
//! A person who asks for a failover changes the register by the same rules ([`by_hand`]): it fences the old primary, whose lease has to be
//! over before anything runs. So two never send, whatever the person believes.
//!
//! The clock must go on while the host sleeps (`CLOCK_BOOTTIME`).
//!
//! # All move together
//!
//! A failure takes every VM back to the global checkpoint. The copies of that are at the backups, in memory and ready to run, so
//! every VM goes on *there*, and the surviving old primaries become the new backups. No host is primary of one VM and
//! backup of another: if it were, its failure would take one VM and the copy that another must go back to.
//!
//! Between a failover and the first global checkpoint of the new layout there are no copies to go back to. A second
//! failure in that time ends the cluster ([`Next::Lost`]): it stops, and doesn't go on from something else. An agent
//! that was restarted is another [`Host`](crate::Host): copies in memory are gone with it.

mod by_hand;
mod controller;
mod guard;
mod lease;
mod register;

pub use by_hand::{HandDecision, HandRefusal, by_hand};
pub use controller::{Controller, Next};
pub use guard::{Action, Guard};
pub use lease::{Grants, Lease, Terms};
pub use register::{Place, Register};

#[cfg(test)]
mod tests;
