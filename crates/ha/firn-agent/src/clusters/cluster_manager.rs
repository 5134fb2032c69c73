//! The failover state of an agent. It is in memory only: an agent that starts adopts the VMs of its
//! predecessor, unless another host runs them.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use firn_cluster::{Generation, HostId};
use firn_control::api::ProtectVmRequest;
use firn_membership::{ClusterMember, FailoverTiming, MembershipStore};
use firn_supervisor::VmName;
use serde_json::Value;
use tokio::task::AbortHandle;

use super::cluster_lock::ClusterLocks;
use super::failover_unit::FailoverUnit;

/// Polls in the time of one lease: lease requests, and runs of a reconcile loop.
pub(super) const POLLS_PER_LEASE: u32 = 5;

/// Time between two tries, where another component has to act first.
pub(super) const RETRY_INTERVAL: Duration = Duration::from_millis(100);

/// Failover state of this agent, for the VMs of its host.
#[derive(Default)]
pub(crate) struct ClusterManager {
    pub(super) local_node: OnceLock<LocalNode>,
    /// So that commands about one cluster run one after another.
    pub(super) locks: ClusterLocks,
    pub(super) reconcilers: Mutex<BTreeMap<FailoverUnit, RunningReconciler>>,
    /// What could not be run on this host, and why.
    pub(super) given_up: Mutex<BTreeMap<FailoverUnit, String>>,
    /// The generation in which this host has given up the lease of a VM that died: a report of that
    /// may arrive late, so this host requests no lease in that generation any more.
    pub(super) reported_losses: Mutex<BTreeMap<FailoverUnit, Generation>>,
    /// VMs that were moved here, and that a task has protected again by their old hosts.
    pub(super) protecting_again: Mutex<BTreeSet<VmName>>,
    /// Why a unit has no backup.
    pub(super) troubles: Mutex<BTreeMap<FailoverUnit, String>>,
    /// The supervisor's answer when a VM was run on this host.
    pub(super) failover_facts: Mutex<BTreeMap<VmName, Value>>,
    /// The request by which a VM was protected last.
    pub(super) protect_requests: Mutex<BTreeMap<VmName, ProtectVmRequest>>,
}

/// This host's access to membership: the store, the times of a failover, and this host's number.
#[derive(Clone)]
pub(crate) struct LocalNode {
    pub members: Arc<dyn MembershipStore>,
    pub timing: FailoverTiming,
    pub host: HostId,
}

pub(super) struct RunningReconciler {
    pub(super) member: Arc<ClusterMember>,
    pub(super) task: AbortHandle,
}

pub(crate) fn lock_mutex<T>(of: &Mutex<T>) -> MutexGuard<'_, T> {
    of.lock().unwrap_or_else(PoisonError::into_inner)
}

impl ClusterManager {
    /// Why a VM is not protected, though it should be.
    pub(crate) fn unprotected_reason(&self, vm: &VmName) -> Option<String> {
        lock_mutex(&self.troubles).get(&FailoverUnit::Vm(vm.clone())).cloned()
    }

    /// Why a unit could not be run on this host, if a failover here has failed.
    pub(super) fn give_up_reason(&self, unit: &FailoverUnit) -> Option<String> {
        lock_mutex(&self.given_up).get(unit).cloned()
    }

    /// Forgets an earlier failure, so that this host tries again.
    pub(super) fn clear_given_up(&self, unit: &FailoverUnit) {
        lock_mutex(&self.given_up).remove(unit);
    }

    /// Forgets all failures of the VM or cluster of that name, whose record a user has ended.
    pub(super) fn forget_failures(&self, name: &VmName) {
        for unit in [FailoverUnit::Vm(name.clone()), FailoverUnit::Cluster(name.clone())] {
            self.clear_given_up(&unit);
            lock_mutex(&self.troubles).remove(&unit);
        }
    }

    /// Whether this host holds the lease of a VM that runs here, alone or in a cluster.
    pub(crate) fn holds_lease(
        &self,
        vm: &VmName,
        cluster: Option<&VmName>,
        generation: u32,
    ) -> bool {
        let unit = match cluster {
            Some(cluster) => FailoverUnit::Cluster(cluster.clone()),
            None => FailoverUnit::Vm(vm.clone()),
        };
        let member = lock_mutex(&self.reconcilers).get(&unit).map(|it| Arc::clone(&it.member));
        member.is_some_and(|member| member.may_send_in(Generation(generation)))
    }

    /// Returns the access to membership: `None` without membership, or before this host has joined.
    pub(super) fn local_node(&self) -> Option<LocalNode> {
        self.local_node.get().cloned()
    }
}
