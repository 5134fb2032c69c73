//! The right to change a cluster at this host: one lock for each cluster.
//!
//! Seeding the copies of one cluster may take an hour, during which its lock is held. The failover
//! of another cluster must not wait for that, so no lock covers all clusters.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use firn_supervisor::VmName;
use tokio::sync::OwnedMutexGuard;

use super::cuts::Cutting;
use crate::failover::lock;

/// The lock of one cluster, with the task that makes its global checkpoints.
pub(super) type Sole = OwnedMutexGuard<Option<Cutting>>;

type Slot = Arc<tokio::sync::Mutex<Option<Cutting>>>;

/// The locks of all clusters.
#[derive(Default)]
pub(super) struct Locks(Mutex<BTreeMap<VmName, Slot>>);

impl Locks {
    /// Locks a cluster; waits until no other task changes it.
    pub(super) async fn lock(&self, name: &VmName) -> Sole {
        let slot = self.slot(name);
        slot.lock_owned().await
    }

    /// Locks a cluster; `None` if another task changes it now.
    pub(super) fn try_lock(&self, name: &VmName) -> Option<Sole> {
        self.slot(name).try_lock_owned().ok()
    }

    fn slot(&self, name: &VmName) -> Slot {
        let mut slots = lock(&self.0);
        slots.retain(|_, slot| is_needed(slot));
        Arc::clone(slots.entry(name.clone()).or_default())
    }
}

/// Whether a lock is held or waited for, or global checkpoints are made.
fn is_needed(slot: &Slot) -> bool {
    Arc::strong_count(slot) > 1 || slot.try_lock().map_or(true, |cutting| cutting.is_some())
}

/// Ends the task that makes global checkpoints, if there is one.
pub(super) async fn end(sole: &mut Sole) {
    if let Some(cutting) = sole.take() {
        cutting.end().await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn one_cluster_does_not_wait_for_another() {
        let (locks, name) = (Locks::default(), |name: &str| VmName::new(name).unwrap());
        let shop = locks.lock(&name("shop")).await;
        assert!(locks.try_lock(&name("shop")).is_none());
        let bank = locks.try_lock(&name("bank")).unwrap();
        drop(shop);
        drop(locks.try_lock(&name("shop")).unwrap());
        drop(bank);
        locks.slot(&name("third"));
        assert_eq!(lock(&locks.0).len(), 1, "those that are not needed are dropped");
    }
}
