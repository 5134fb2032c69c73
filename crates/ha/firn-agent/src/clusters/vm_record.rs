//! Changes of the record of a single VM.

use std::collections::BTreeMap;
use std::sync::Arc;

use firn_cluster::HostId;
use firn_control::HostName;
use firn_membership::{
    ChangeResult, ClusterName, ClusterRecord, MembershipError, MembershipStore, RecordView,
    Revision,
};
use firn_supervisor::VmName;
use tokio::time::{Instant, sleep};

use super::manager::{LocalNode, RETRY_INTERVAL, lock_mutex};
use crate::agent::Agent;

pub(crate) async fn change_record(
    members: &dyn MembershipStore,
    cluster: &ClusterName,
    from: Revision,
    to: &ClusterRecord,
) -> Result<bool, MembershipError> {
    let changed = members.change_record(cluster, from, to).await?;
    Ok(matches!(changed, ChangeResult::Done(_)))
}

/// Records the backup that has committed an epoch of a VM, so that it may run the VM from now on.
/// If the record cannot be changed now, the reconcile loop does it later.
pub(crate) async fn record_committed_backup(agent: &Arc<Agent>, vm: &VmName, backup: &HostName) {
    lock_mutex(&agent.failover.troubles).remove(vm);
    let Some(node) = agent.failover.local_node.get() else { return };
    let until = Instant::now() + node.terms.ttl;
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
    let cluster = ClusterName::new(vm.as_str())?;
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

/// Returns the number of the most recently started agent of a host.
pub(crate) fn newest_host(names: &BTreeMap<HostId, String>, name: &HostName) -> Option<HostId> {
    names.iter().rev().find(|(_, it)| *it == name.as_str()).map(|(host, _)| *host)
}
