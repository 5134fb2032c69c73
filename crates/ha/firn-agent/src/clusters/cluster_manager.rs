//! The clusters of an agent: locks, so that commands about one cluster run one after another, and
//! reconcile loops.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use firn_membership::ClusterMember;
use firn_supervisor::VmName;
use tokio::task::AbortHandle;

use super::cluster_lock::ClusterLocks;
use crate::failover::manager::lock_mutex;

/// The clusters of this agent.
#[derive(Default)]
pub(crate) struct ClusterManager {
    pub(super) locks: ClusterLocks,
    /// The reconcile loops, for clusters of several VMs.
    pub(super) running: Mutex<BTreeMap<VmName, ReconciledCluster>>,
    /// Clusters that could not be run here, and why.
    pub(super) given_up: Mutex<BTreeMap<VmName, String>>,
}

pub(super) struct ReconciledCluster {
    pub(super) post: Arc<ClusterMember>,
    pub(super) task: AbortHandle,
}

impl ClusterManager {
    /// Why a cluster could not be run on this host, if a failover here has failed.
    pub(super) fn give_up_reason(&self, name: &VmName) -> Option<String> {
        lock_mutex(&self.given_up).get(name).cloned()
    }

    /// Forgets an earlier failure, so that this host tries again.
    pub(super) fn clear_given_up(&self, name: &VmName) {
        lock_mutex(&self.given_up).remove(name);
    }
}
