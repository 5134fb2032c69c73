//! Identifiers of a virtual cluster: VMs, hosts, epochs, generations, frames and requests.

use std::fmt;

use serde::{Deserialize, Serialize};

/// A VM of the cluster.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct VmId(pub u16);

/// The agent of a host, from its start to its end. After a restart it has another number, because
/// the standbys that it had are lost.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct HostId(pub u16);

/// An epoch of one VM. Its checkpoint is the state at its end. Epochs of different VMs are not
/// synchronized.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
)]
#[serde(transparent)]
pub struct Epoch(pub u64);

/// A generation of the cluster: each rollback and each planned failover begins the next one.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
)]
#[serde(transparent)]
pub struct Generation(pub u32);

/// The sequence number of a frame among all that one VM ever sent to one destination; the first is
/// 1.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
)]
#[serde(transparent)]
pub struct FrameNumber(pub u64);

/// The number of a request for a cut. Requests of one initiator are counted; a later initiator has
/// a higher term.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
)]
pub struct RequestNumber {
    /// The initiator's term of leadership.
    pub term: u32,
    /// Its count within the term.
    pub count: u32,
}

impl Epoch {
    /// The epoch after this one.
    pub fn next(self) -> Self {
        Self(self.0 + 1)
    }

    /// The epoch before this one; the first epoch has none and returns itself.
    pub fn previous(self) -> Self {
        Self(self.0.saturating_sub(1))
    }
}

impl Generation {
    /// The generation that a rollback of this one begins.
    pub fn next(self) -> Self {
        Self(self.0 + 1)
    }
}

impl FrameNumber {
    /// The number after this one.
    pub fn next(self) -> Self {
        Self(self.0 + 1)
    }
}

impl RequestNumber {
    /// The next request of the same initiator.
    pub fn next(self) -> Self {
        Self { count: self.count + 1, ..self }
    }
}

impl fmt::Display for VmId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "VM {}", self.0)
    }
}

impl fmt::Display for HostId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "host {}", self.0)
    }
}

impl fmt::Display for Epoch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "epoch {}", self.0)
    }
}
