//! Protection of all VMs of a cluster by this host.

use std::sync::Arc;

use firn_cluster::VmId;
use firn_cluster::member::ClusterMembership;
use firn_control::{ClusterState, StoredCluster};
use firn_supervisor::{
    Failure, FailureContext as _, FailureKind, MemberRequest, SupervisorRequest, VmName,
};
use tokio::task::JoinSet;

use super::ask_vms::{ask_all_vms, with_vm_context};
use super::checkpoints::spawn_checkpoints;
use super::cluster_lock::ClusterLock;
use super::cluster_store::ClusterStore;
use super::create::{build_cluster, locate_vm};
use super::failover_unit::FailoverUnit;
use super::membership_access::has_membership;
use super::reconciler::ensure_reconciler;
use super::remote_vm::{ASK_WAIT, RemoteVm};
use super::{cluster_record, release};
use crate::agent::Agent;

/// Returns when there is a global checkpoint, and all VMs can be run here.
pub(super) async fn protect_cluster(
    agent: &Arc<Agent>,
    name: &VmName,
    interval_ms: u64,
) -> Result<StoredCluster, Failure> {
    // Held while the copies are seeded, which may take an hour: the lock of this cluster only.
    let mut sole = agent.clusters.locks.lock_cluster(name).await;
    let records = ClusterStore::from_paths(&agent.paths);
    let mut record = cluster_to_protect(agent, &mut sole, &records, name).await?;
    record.term += 1;
    let was_there;
    (record.generation, was_there) = match has_membership(agent) {
        true => cluster_record::begin_record(agent, &record).await?,
        false => (record.generation.next(), false),
    };
    (record.interval_ms, record.checkpoint) = (interval_ms, None);
    records.store_cluster(&record)?;
    if let Err(failure) = begin_protection(agent, &record).await {
        // No failover is possible yet: each VM continues alone.
        release::undo_protection(agent, &mut sole, record, was_there).await;
        return Err(failure);
    }
    record.state = ClusterState::Protected;
    records.store_cluster(&record)?;
    let begun = spawn_checkpoints(agent, records.clone(), record.clone());
    let first = begun.request_checkpoint();
    *sole = Some(begun);
    let first = first.await;
    if !has_membership(agent) {
        return first.and_then(|_| records.require_cluster(name));
    }
    // From then on this host may run them.
    let backed = match first {
        Ok(_) => cluster_record::record_backup(agent, &record).await,
        Err(failure) => Err(failure),
    };
    if let Err(failure) = backed {
        release::undo_protection(agent, &mut sole, record, was_there).await;
        return Err(failure);
    }
    ensure_reconciler(agent, &FailoverUnit::Cluster(name.clone()));
    records.require_cluster(name)
}

/// Returns the cluster that is to be protected: the one stored here, or the one in the record,
/// whichever host created it.
async fn cluster_to_protect(
    agent: &Arc<Agent>,
    sole: &mut ClusterLock,
    records: &ClusterStore,
    name: &VmName,
) -> Result<StoredCluster, Failure> {
    let kept = release::load_current(agent, sole, name).await?;
    if let Some(ClusterState::Protected | ClusterState::FailingOver) =
        kept.as_ref().map(|it| it.state)
    {
        return Err(busy_failure(format!("cluster {name} is protected already")));
    }
    let agreed = cluster_record::read_recorded_vms(agent, name).await?;
    let is_moved = kept.as_ref().is_none_or(|kept| {
        let vms = || kept.vms.iter().zip(&agreed);
        let is_same = kept.vms.len() == agreed.len() && vms().all(|(it, (vm, _))| it.vm == *vm);
        is_same && vms().any(|(it, (_, host))| it.host != *host)
    });
    if is_moved && !agreed.is_empty() {
        let mut placed = Vec::new();
        for (vm, host) in agreed {
            placed.push(locate_vm(agent, vm, Some(host)).await?);
        }
        return build_cluster(name, placed, kept.as_ref());
    }
    match records.require_cluster(name)? {
        kept if kept.state == ClusterState::FailedOver => Err(busy_failure(format!(
            "the VMs of {name} run on this host, which can't be their backup"
        ))),
        kept => Ok(kept),
    }
}

fn busy_failure(text: String) -> Failure {
    Failure::new(FailureKind::Busy, text).with_hint(
        "`firn cluster release` ends it, `firn cluster forget` if all its hosts are gone; `firn cluster create` on another host creates it there",
    )
}

/// The membership that a VM of the cluster needs.
fn membership_of(record: &StoredCluster, own: VmId) -> ClusterMembership {
    let (cluster, generation, layout) = (record.id, record.generation, 0);
    let members = record.numbered_vms().map(|(vm, placed)| (vm, placed.mac)).collect();
    ClusterMembership { cluster, own, members, generation, layout }
}

/// Makes all VMs join the cluster, and protects them.
async fn begin_protection(agent: &Arc<Agent>, record: &StoredCluster) -> Result<(), Failure> {
    let join = |vm| SupervisorRequest::Member(MemberRequest::Join(membership_of(record, vm)));
    ask_all_vms(agent, record, join, ASK_WAIT).await?;
    let mut begun = JoinSet::new();
    for placed in record.vms.clone() {
        let mut remote = RemoteVm::new(agent, &placed);
        let interval_ms = record.interval_ms;
        let cluster = has_membership(agent).then(|| record.name.clone());
        begun.spawn(async move {
            remote
                .request_protection(interval_ms, cluster)
                .await
                .map_err(|failure| with_vm_context(&placed, failure))
        });
    }
    let mut ended = Ok(());
    while let Some(done) = begun.join_next().await {
        ended = ended.and(done.while_doing("protecting a VM").and_then(|done| done.map(drop)));
    }
    ended
}
