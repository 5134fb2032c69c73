//! The failover state of an agent, for single VMs.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use firn_cluster::HostId;
use firn_cluster::failover::LeaseTerms;
use firn_control::api::ProtectVmRequest;
use firn_membership::{ClusterMember, MembershipStore};
use firn_supervisor::VmName;
use serde_json::Value;
use tokio::task::AbortHandle;

/// Polls in the time of one lease: lease requests of a VM, and runs of its reconcile loop.
pub(crate) const POLLS_PER_LEASE: u32 = 5;

/// Time between two tries, where another component has to act first.
pub(super) const RETRY_INTERVAL: Duration = Duration::from_millis(100);

/// Failover state of this agent, for the VMs of its host.
#[derive(Default)]
pub(crate) struct FailoverManager {
    pub(super) local_node: OnceLock<LocalNode>,
    pub(super) reconcilers: Mutex<BTreeMap<VmName, ReconciledVm>>,
    /// VMs that could not be run on this host.
    pub(super) given_up: Mutex<BTreeSet<VmName>>,
    /// Why a VM has no backup.
    pub(super) troubles: Mutex<BTreeMap<VmName, String>>,
    /// The supervisor's answer when a VM was run on this host.
    pub(super) failover_facts: Mutex<BTreeMap<VmName, Value>>,
    /// The request by which a VM was protected last.
    pub(super) protect_requests: Mutex<BTreeMap<VmName, ProtectVmRequest>>,
}

/// This host's access to membership: the store, the terms of leases, and this host's number.
#[derive(Clone)]
pub(crate) struct LocalNode {
    pub members: Arc<dyn MembershipStore>,
    pub terms: LeaseTerms,
    pub host: HostId,
}

pub(super) struct ReconciledVm {
    pub(super) post: Arc<ClusterMember>,
    pub(super) task: AbortHandle,
}

pub(crate) fn lock_mutex<T>(of: &Mutex<T>) -> MutexGuard<'_, T> {
    of.lock().unwrap_or_else(PoisonError::into_inner)
}

impl FailoverManager {
    /// Why a VM is not protected, though it should be.
    pub(crate) fn unprotected_reason(&self, vm: &VmName) -> Option<String> {
        lock_mutex(&self.troubles).get(vm).cloned()
    }

    /// Forgets failures of a VM whose record a user has ended.
    pub(crate) fn forget_vm(&self, vm: &VmName) {
        lock_mutex(&self.given_up).remove(vm);
        lock_mutex(&self.troubles).remove(vm);
    }

    /// Returns the access to membership: `None` without membership, or before this host has joined.
    pub(crate) fn local_node(&self) -> Option<LocalNode> {
        self.local_node.get().cloned()
    }
}
