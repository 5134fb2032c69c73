//! The end of a cluster: its VMs continue, each by itself.

use std::sync::Arc;

use firn_control::{ClusterState, ClusterVm, StoredCluster};
use firn_supervisor::{Failure, FailureKind, MemberRequest, SupervisorRequest, VmName};

use super::ask_vms::{ask_all_vms, ask_each_vm};
use super::cluster_lock::{self, ClusterLock};
use super::cluster_record;
use super::cluster_store::ClusterStore;
use super::membership_access::has_membership;
use super::remote_vm::{ASK_WAIT, RELEASE_WAIT};
use super::run_vms::wait_settled;
use crate::agent::Agent;
use crate::vms::LocalVms;

pub(super) async fn release_cluster(
    agent: &Arc<Agent>,
    name: &VmName,
) -> Result<StoredCluster, Failure> {
    let mut sole = agent.clusters.locks.lock_cluster(name).await;
    let record = ClusterStore::from_paths(&agent.paths).require_cluster(name)?;
    match record.state {
        ClusterState::FailedOver if has_membership(agent) => {
            // They obey the cluster's lease, though no host has copies of them.
            let left = release_members(agent, &record).await;
            left.and(cluster_record::end_record(agent, name).await).map(|()| record)
        }
        ClusterState::FailingOver | ClusterState::FailedOver => {
            let text = format!("the VMs of {name} run on this host, each for itself");
            Err(Failure::new(FailureKind::Usage, text))
        }
        ClusterState::Made | ClusterState::Protected => end_cluster(agent, &mut sole, record).await,
    }
}

async fn end_cluster(
    agent: &Arc<Agent>,
    sole: &mut ClusterLock,
    mut record: StoredCluster,
) -> Result<StoredCluster, Failure> {
    cluster_lock::end_checkpoints(sole).await;
    // From here on no host runs the VMs from its checkpoints, so each may be released by itself.
    (record.state, record.checkpoint) = (ClusterState::Made, None);
    ClusterStore::from_paths(&agent.paths).store_cluster(&record)?;
    let left = release_members(agent, &record).await;
    left.and(cluster_record::end_record(agent, &record.name).await)?;
    stop_standbys(agent, &record).await?;
    Ok(record)
}

/// Undoes a protection that failed. If the cluster had a record before, the record stays, and the
/// VMs continue to obey its lease.
pub(super) async fn undo_protection(
    agent: &Arc<Agent>,
    sole: &mut ClusterLock,
    record: StoredCluster,
    was_there: bool,
) {
    let name = record.name.clone();
    let undone = match was_there {
        true => drop_copies(agent, sole, &name).await,
        false => end_cluster(agent, sole, record).await.map(drop),
    };
    if let Err(left) = undone {
        tracing::warn!("cluster {name}: {left}");
    }
}

/// Drops the copies on this host: no record counts them as backups.
pub(super) async fn drop_copies(
    agent: &Arc<Agent>,
    sole: &mut ClusterLock,
    name: &VmName,
) -> Result<(), Failure> {
    cluster_lock::end_checkpoints(sole).await;
    let records = ClusterStore::from_paths(&agent.paths);
    let mut record = records.require_cluster(name)?;
    (record.state, record.checkpoint) = (ClusterState::Made, None);
    records.store_cluster(&record)?;
    stop_standbys(agent, &record).await
}

/// Loads the stored cluster. If its record has ended, its copies are dropped first.
pub(super) async fn load_current(
    agent: &Arc<Agent>,
    sole: &mut ClusterLock,
    name: &VmName,
) -> Result<Option<StoredCluster>, Failure> {
    let records = ClusterStore::from_paths(&agent.paths);
    let kept = records.load_cluster(name)?;
    let state = kept.as_ref().map(|record| record.state);
    let counts = matches!(state, Some(ClusterState::Protected | ClusterState::FailingOver));
    if !counts || !cluster_record::has_record_ended(agent, name).await? {
        return Ok(kept);
    }
    drop_copies(agent, sole, name).await?;
    records.load_cluster(name)
}

async fn stop_standbys(agent: &Arc<Agent>, record: &StoredCluster) -> Result<(), Failure> {
    for ClusterVm { vm, .. } in record.vms.clone() {
        agent.run_blocking(move |vms| stop_standby(vms, &vm)).await?;
    }
    Ok(())
}

/// Stops a standby of a cluster. After its VM continues alone it never runs, and would be in the
/// way of the next standby.
fn stop_standby(vms: &dyn LocalVms, vm: &VmName) -> Result<(), Failure> {
    match vms.vm_status(vm).ok().and_then(|status| status.standby) {
        Some(standby) if standby.member => vms.stop_standby(vm),
        _ => Ok(()),
    }
}

/// Releases all VMs: their backups agree never to run them, their output is released, and each VM
/// leaves the cluster.
async fn release_members(agent: &Arc<Agent>, record: &StoredCluster) -> Result<(), Failure> {
    let release = || ask_each_vm(agent, record, |_| SupervisorRequest::ReleaseMember, RELEASE_WAIT);
    let mut released = release().await;
    // A VM whose standby was lost a moment ago may notice that only now, and not be released. The
    // second request needs no answer from a standby that does not count any more.
    if released.iter().any(|it| it.as_ref().is_err_and(|it| it.kind == FailureKind::Lost)) {
        released = release().await;
    }
    wait_settled(agent, record).await;
    let left =
        ask_all_vms(agent, record, |_| SupervisorRequest::Member(MemberRequest::Leave), ASK_WAIT)
            .await;
    // A VM that was not protected has nothing to be released from.
    let failed = released.into_iter().filter_map(Result::err);
    let mut failed = failed.filter(|failure| failure.kind != FailureKind::Usage);
    failed.next().map_or(Ok(()), Err).and(left.map(drop))
}
