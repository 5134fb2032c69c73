//! The state of a cluster, as one host observes it.

use std::collections::BTreeMap;

use crate::{HostId, VmId};

/// The host that makes the global checkpoints of a cluster, and so knows from which copies its VMs
/// can run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Coordinator {
    /// The host that runs the VM. The cluster has this one VM, and each of its committed epochs is a
    /// global checkpoint.
    Primary,
    /// The host that has the copies of all VMs.
    #[default]
    Backup,
}

/// The state of one VM, as this host observes it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ObservedVm {
    /// The host has no such VM: its user has ended it.
    Nothing,
    /// It has ended.
    Ended {
        /// By itself as intended, or by its user.
        shut_down: bool,
        /// By a panic of its guest.
        has_panicked: bool,
    },
    /// It is a standby.
    Standby {
        /// It receives no more epochs.
        has_ended: bool,
        /// Its primary was stopped, released or shut down.
        is_over: bool,
    },
    /// It runs.
    Runs {
        /// The generation of the lease that its output obeys.
        lease: Option<u32>,
        /// Its epochs are sent.
        is_protected: bool,
        /// The host that has committed epochs of it, if this agent sends them.
        backup: Option<HostId>,
        /// Its output is buffered, whatever the lease allows.
        is_held: bool,
        /// Its hypervisor does not answer.
        is_hung: bool,
    },
}

impl ObservedVm {
    pub(super) fn runs(self) -> bool {
        matches!(self, Self::Runs { .. })
    }

    pub(super) fn is_standby(self) -> bool {
        matches!(self, Self::Standby { .. })
    }

    pub(super) fn has_ended(self) -> bool {
        matches!(self, Self::Nothing | Self::Ended { .. })
    }

    /// Whether its user or its guest has ended it or its protection.
    pub(super) fn has_left(self) -> bool {
        match self {
            Self::Nothing | Self::Ended { shut_down: true, .. } => true,
            Self::Runs { lease, .. } => lease.is_none(),
            _ => false,
        }
    }

    pub(super) fn is_over(self) -> bool {
        matches!(self, Self::Standby { is_over: true, .. })
    }

    pub(super) fn committed_backup(self) -> Option<HostId> {
        match self {
            Self::Runs { backup, .. } => backup,
            _ => None,
        }
    }

    pub(super) fn is_replicated(self) -> bool {
        match self {
            Self::Runs { is_protected, backup, .. } => is_protected || backup.is_some(),
            _ => false,
        }
    }

    pub(super) fn is_held(self) -> bool {
        matches!(self, Self::Runs { is_held: true, .. })
    }

    /// Whether it obeys a lease and runs unprotected.
    pub(super) fn is_ready(self) -> bool {
        matches!(self, Self::Runs { lease: Some(_), .. }) && !self.is_replicated()
    }
}

/// A VM of this host that belongs to the cluster, or is named by its record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LocalVm {
    /// Its number in the record; `None` if the record does not name it.
    pub number: Option<VmId>,
    /// Its state.
    pub state: ObservedVm,
}

/// The state of a cluster, as this host observes it. `V` names a VM at its host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ObservedCluster<V> {
    /// The host that makes the global checkpoints.
    pub coordinator: Coordinator,
    /// The VMs.
    pub vms: BTreeMap<V, LocalVm>,
    /// Where the backup is the coordinator: whether this host has copies from which the whole
    /// cluster could run.
    pub is_kept: bool,
    /// Whether the hosts with the copies are alive, though for a while they have not received the
    /// epochs of a VM that runs here. At first the loss of those hosts would look the same.
    pub is_cut_off: bool,
}

impl<V: Ord> ObservedCluster<V> {
    /// Whether a VM runs here whose epochs are not sent.
    pub fn is_unprotected(&self) -> bool {
        self.vms.values().any(|vm| vm.state.is_ready())
    }

    /// Whether a VM of this host obeys a lease.
    pub fn has_leased_vm(&self) -> bool {
        self.vms.values().any(|vm| matches!(vm.state, ObservedVm::Runs { lease: Some(_), .. }))
    }

    /// Whether this host has copies that receive nothing. Where the primary is the coordinator, a
    /// standby is the whole of the copies.
    pub(super) fn has_copies(&self) -> bool {
        let has_ended =
            |vm: &LocalVm| matches!(vm.state, ObservedVm::Standby { has_ended: true, .. });
        match self.coordinator {
            Coordinator::Primary => self.vms.values().any(has_ended),
            Coordinator::Backup => self.is_kept,
        }
    }
}
