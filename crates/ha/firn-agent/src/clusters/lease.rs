//! The lease of a VM that is about to be protected, alone or with its cluster.

use std::collections::BTreeMap;
use std::sync::Arc;

use firn_cluster::VmId;
use firn_cluster::failover::VmPlacement;
use firn_control::api::ProtectVmRequest;
use firn_membership::{ClusterRecord, MembershipError, RecordView};
use firn_supervisor::{Failure, FailureKind, VmName};

use super::cluster_manager::{LocalNode, lock_mutex};
use super::cluster_record::{name_taken, store_cluster_of};
use super::failover_unit::FailoverUnit;
use super::membership_access::{
    begin_register, change_record, has_membership, record_name, retry_attempt,
};
use super::reconciler::ensure_reconciler;
use crate::agent::Agent;

/// Acquires the lease that is to cover a VM's frames, and returns its generation. By then the
/// record names this host as the VM's primary. Without membership a VM alone needs no lease:
/// returns `None`.
pub(crate) async fn acquire_lease(
    agent: &Arc<Agent>,
    unit: &FailoverUnit,
    wanted: &ProtectVmRequest,
) -> Result<Option<u32>, Failure> {
    let vm = &wanted.vm;
    match unit {
        FailoverUnit::Vm(_) if !has_membership(agent) => return Ok(None),
        FailoverUnit::Vm(_) => {
            lock_mutex(&agent.clusters.protect_requests).insert(vm.clone(), wanted.clone());
        }
        FailoverUnit::Cluster(name) if !has_membership(agent) => {
            return Err(no_membership(agent, name));
        }
        FailoverUnit::Cluster(name) => store_cluster_of(agent, vm, name)?,
    }
    agent.clusters.clear_given_up(unit);
    // Two things may take long: the lease of an earlier generation has to expire, and the
    // membership servers may have to elect a leader.
    let what = format!("{vm} gets no lease");
    let acquired = retry_attempt(agent, &what, |ours| read_generation(agent, ours, unit, vm));
    match (acquired.await, unit) {
        (Err(failure), FailoverUnit::Vm(_)) if failure.kind == FailureKind::Busy => {
            Err(already_protected(vm, failure))
        }
        (acquired, _) => acquired.map(Some),
    }
}

fn no_membership(agent: &Agent, cluster: &VmName) -> Failure {
    let text = format!(
        "host {} has no membership, and {cluster} is a cluster of hosts that have",
        agent.config.name
    );
    let hint = "give its agent's configuration the [membership] of the others";
    Failure::new(FailureKind::Host, text).with_hint(hint)
}

fn already_protected(vm: &VmName, failure: Failure) -> Failure {
    failure.with_hint(format!(
        "`firn release {vm}` there ends that; `firn cluster forget {vm}` does if that host and its backup's are gone"
    ))
}

/// Returns the generation once the record names this host as the VM's primary and its lease is
/// held. The record of a VM alone begins here, that of a cluster at the host of its copies.
async fn read_generation(
    agent: &Arc<Agent>,
    ours: LocalNode,
    unit: &FailoverUnit,
    vm: &VmName,
) -> Result<Option<u32>, MembershipError> {
    let cluster = record_name(unit.name())?;
    let RecordView { known, names, .. } = ours.members.read_view(&cluster).await?;
    let is_alone = matches!(unit, FailoverUnit::Vm(_));
    let running = known.record.as_ref().filter(|it| !(is_alone && it.register.is_ended()));
    let Some(ClusterRecord { register, vms }) = running else {
        if is_alone {
            let to = begin_vm_record(known.record.as_ref(), &ours, vm);
            change_record(&*ours.members, &cluster, known.revision, &to).await?;
            ensure_reconciler(agent, unit);
        }
        return Ok(None);
    };
    let number = vms.iter().find(|(_, it)| *it == vm.as_str()).map(|(number, _)| number);
    let primary = number.and_then(|number| register.placements.get(number)).map(|it| it.primary);
    match primary {
        None if is_alone => return Err(name_taken(vm)),
        Some(host) if is_alone && host != ours.host => {
            let name = names.get(&host).map_or("?", String::as_str);
            let text = format!("{vm} is protected already, and runs at host {name} ({})", host.0);
            return Err(MembershipError::Refused(text));
        }
        _ => {}
    }
    let member = ensure_reconciler(agent, unit);
    let holds = member.is_some_and(|it| it.may_send_in(register.generation));
    let is_here = primary == Some(ours.host) && (!is_alone || register.fence.is_empty());
    Ok((is_here && holds).then_some(register.generation.0))
}

/// A record in which a VM runs at this host, and has no backup.
fn begin_vm_record(before: Option<&ClusterRecord>, ours: &LocalNode, vm: &VmName) -> ClusterRecord {
    let placement = VmPlacement { primary: ours.host, backup: None };
    let register = begin_register(before, BTreeMap::from([(VmId(0), placement)]));
    ClusterRecord { register, vms: BTreeMap::from([(VmId(0), vm.to_string())]) }
}
