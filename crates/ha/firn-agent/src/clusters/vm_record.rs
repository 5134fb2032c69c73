//! The backup in the record of a VM that is protected alone: its primary is the coordinator.

use std::sync::Arc;

use firn_control::HostName;
use firn_membership::{ClusterRecord, MembershipError, RecordView};
use firn_supervisor::VmName;
use tokio::time::{Instant, sleep};

use super::cluster_manager::{LocalNode, RETRY_INTERVAL, lock_mutex};
use super::failover_unit::FailoverUnit;
use super::membership_access::{change_record, newest_host, record_name};
use crate::agent::Agent;

/// Records the backup that has committed an epoch of a VM, so that it may run the VM from now on.
/// If the record cannot be changed now, the reconcile loop does it later.
pub(crate) async fn record_committed_backup(agent: &Arc<Agent>, vm: &VmName, backup: &HostName) {
    lock_mutex(&agent.clusters.troubles).remove(&FailoverUnit::Vm(vm.clone()));
    let Some(node) = agent.clusters.local_node.get() else { return };
    let until = Instant::now() + node.timing.patience();
    while Instant::now() < until {
        match record_backup(node, vm, backup).await {
            Ok(true) => return,
            Ok(false) => {}
            Err(trouble) => tracing::warn!("{vm} can't fail over to {backup} yet: {trouble}"),
        }
        sleep(RETRY_INTERVAL).await;
    }
}

async fn record_backup(
    node: &LocalNode,
    vm: &VmName,
    backup: &HostName,
) -> Result<bool, MembershipError> {
    let cluster = record_name(vm)?;
    let RecordView { known, names, .. } = node.members.read_view(&cluster).await?;
    let Some(record) = known.record else { return Ok(false) };
    let Some(backup) = newest_host(&names, backup) else { return Ok(false) };
    if record.register.primaries() != [node.host].into() {
        return Ok(false);
    }
    let register = record.register.with_backup(Some(backup));
    change_record(&*node.members, &cluster, known.revision, &ClusterRecord { register, ..record })
        .await
}
