//! The times of a failover.
//!
//! ```text
//!   the last request of a host for its lease
//!     |=========== lease ===========|
//!     |============================ silence ============================|
//!     |                             |                                   |
//!     |          it sends nothing any more: its VMs fail over now       its VMs fail over,
//!     |          if it has given up its lease, or its agent's process   whatever has happened
//!     |          is known to have ended
//! ```
//!
//! The lease alone makes a failover safe, and can be short. The silence avoids a failover for a host
//! that has only stalled: it requests its lease again, and its output leaves again.

use std::time::Duration;

use firn_cluster::failover::LeaseTerms;

/// The longest stall that the agent of a host does not notice by itself. An agent that has stalled for
/// longer drops the frames that its switch had received before: their lease may be over. One that has
/// stalled for less may still transmit them, so no other host runs its VMs earlier.
pub const STALL_MAX: Duration = Duration::from_millis(700);

/// The shortest time that something may be missing until a host acts on it, where no client waits.
const PATIENCE_MIN: Duration = Duration::from_secs(5);

/// The times of a failover.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FailoverTiming {
    /// The terms of leases.
    pub lease: LeaseTerms,
    /// The time since its last request for a lease after which a host is considered lost without
    /// further evidence.
    pub silence: Duration,
}

impl FailoverTiming {
    /// How long the lease of a primary has to be over until its VMs fail over without evidence that
    /// it is lost.
    pub fn unexplained_delay(&self) -> Duration {
        self.silence.saturating_sub(self.lease.ttl).max(STALL_MAX)
    }

    /// The time in which hosts find each other again after a loss: the base of deadlines, and of
    /// actions that only replace a backup.
    pub fn patience(&self) -> Duration {
        self.lease.ttl.max(self.silence).max(PATIENCE_MIN)
    }
}

/// Evidence about the processes of other hosts' agents.
pub trait AgentEvidence: Send + Sync + 'static {
    /// Whether the agent of the host of that name is known to have ended. It is not if the host
    /// only fails to answer.
    fn has_ended(&self, host: &str) -> bool;
}

/// No evidence: a lost host is noticed by its silence alone.
#[derive(Clone, Copy, Debug)]
pub struct NoEvidence;

impl AgentEvidence for NoEvidence {
    fn has_ended(&self, _host: &str) -> bool {
        false
    }
}
