//! The right to change a cluster at this host: one lock for each cluster.
//!
//! Seeding the copies of one cluster may take an hour, during which its lock is held. The failover
//! of another cluster must not wait for that, so no lock covers all clusters.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use firn_supervisor::VmName;
use tokio::sync::OwnedMutexGuard;

use super::checkpoint_task::CheckpointTask;
use super::cluster_manager::lock_mutex;

/// The lock of one cluster, with the task that makes its global checkpoints.
pub(super) type ClusterLock = OwnedMutexGuard<Option<CheckpointTask>>;

type LockSlot = Arc<tokio::sync::Mutex<Option<CheckpointTask>>>;

/// The locks of all clusters.
#[derive(Default)]
pub(super) struct ClusterLocks(Mutex<BTreeMap<VmName, LockSlot>>);

impl ClusterLocks {
    /// Locks a cluster; waits until no other task changes it.
    pub(super) async fn lock_cluster(&self, name: &VmName) -> ClusterLock {
        let slot = self.slot_of(name);
        slot.lock_owned().await
    }

    /// Locks a cluster; `None` if another task changes it now.
    pub(super) fn try_lock(&self, name: &VmName) -> Option<ClusterLock> {
        self.slot_of(name).try_lock_owned().ok()
    }

    fn slot_of(&self, name: &VmName) -> LockSlot {
        let mut slots = lock_mutex(&self.0);
        slots.retain(|_, slot| is_needed(slot));
        Arc::clone(slots.entry(name.clone()).or_default())
    }
}

/// Whether a lock is held or waited for, or global checkpoints are made.
fn is_needed(slot: &LockSlot) -> bool {
    Arc::strong_count(slot) > 1 || slot.try_lock().map_or(true, |cutting| cutting.is_some())
}

/// Ends the task that makes global checkpoints, if there is one.
pub(super) async fn end_checkpoints(sole: &mut ClusterLock) {
    if let Some(cutting) = sole.take() {
        cutting.end_task().await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn one_cluster_does_not_wait_for_another() {
        let (locks, name) = (ClusterLocks::default(), |name: &str| VmName::new(name).unwrap());
        let shop = locks.lock_cluster(&name("shop")).await;
        assert!(locks.try_lock(&name("shop")).is_none());
        let bank = locks.try_lock(&name("bank")).unwrap();
        drop(shop);
        drop(locks.try_lock(&name("shop")).unwrap());
        drop(bank);
        locks.slot_of(&name("third"));
        assert_eq!(lock_mutex(&locks.0).len(), 1, "those that are not needed are dropped");
    }
}
