//! A failover of a cluster that a user requests. [`run_vms`](super::run_vms) runs the VMs.

use std::sync::Arc;
use std::time::{Duration, Instant};

use firn_control::{ClusterState, StoredCluster};
use firn_supervisor::{Failure, FailureKind, VmName};

use super::cluster_record;
use super::cluster_store::ClusterStore;
use super::failover_unit::FailoverUnit;
use super::membership_access::{failover_wait, has_membership};
use super::reconciler::ensure_reconciler;
use super::run_vms::run_from_checkpoint;
use crate::agent::Agent;

/// Time between two reads of the stored cluster.
const POLL_INTERVAL: Duration = Duration::from_millis(100);

/// Fails a cluster over because a user requests it.
pub(super) async fn fail_over_cluster(
    agent: &Arc<Agent>,
    name: &VmName,
) -> Result<StoredCluster, Failure> {
    if has_membership(agent) {
        return fail_over_by_record(agent, name).await;
    }
    let mut sole = agent.clusters.locks.lock_cluster(name).await;
    run_from_checkpoint(agent, &mut sole, name, None).await
}

/// Requests the failover in the record, and waits until it is done. It has to begin in time: a host
/// that loses the majority meanwhile gets no lease.
async fn fail_over_by_record(agent: &Arc<Agent>, name: &VmName) -> Result<StoredCluster, Failure> {
    let records = ClusterStore::from_paths(&agent.paths);
    records.require_cluster(name)?;
    cluster_record::record_failover(agent, name).await?;
    let unit = FailoverUnit::Cluster(name.clone());
    ensure_reconciler(agent, &unit);
    let deadline = Instant::now() + failover_wait(agent);
    loop {
        let record = records.require_cluster(name)?;
        if record.state == ClusterState::FailedOver {
            return Ok(record);
        }
        if let Some(why) = agent.clusters.give_up_reason(&unit) {
            let hint = format!("`firn cluster failover {name}` again runs those that do not run");
            return Err(Failure::new(FailureKind::Other, why).with_hint(hint));
        }
        if record.state == ClusterState::Protected && Instant::now() > deadline {
            return Err(not_begun(name));
        }
        tokio::time::sleep(POLL_INTERVAL).await;
    }
}

fn not_begun(name: &VmName) -> Failure {
    let text = format!("cluster {name} does not run here yet: this host has no lease of it");
    let hint = "the record names this host, which runs the VMs once it has the lease; `firn cluster status` shows both";
    Failure::new(FailureKind::Interrupted, text).with_hint(hint)
}
