//! Observes the VMs of a failover unit at this host: their supervisors report their states.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use firn_cluster::HostId;
use firn_cluster::failover::reconcile::{LocalVm, ObservedCluster, ObservedVm};
use firn_control::{ClusterState, HostHealth, HostName};
use firn_membership::ClusterRecord;
use firn_supervisor::{FailureKind, ProcessExit, ProtectionEnd, VmName, VmStatus};

use super::cluster_store::ClusterStore;
use super::failover_unit::FailoverUnit;
use super::membership_access::newest_host;
use crate::agent::Agent;

/// Observes a unit; `None` if its state cannot be read now.
pub(super) async fn observe_unit(
    agent: &Arc<Agent>,
    unit: &FailoverUnit,
    record: &ClusterRecord,
    names: &BTreeMap<HostId, String>,
    me: HostId,
) -> Option<ObservedCluster<VmName>> {
    let mut vms: BTreeSet<VmName> = unit.local_vms(&agent.paths).into_iter().collect();
    if let FailoverUnit::Cluster(_) = unit {
        let placements =
            record.register.placements.iter().filter(|(_, placement)| placement.primary == me);
        let names = placements.filter_map(|(vm, _)| record.vms.get(vm));
        vms.extend(names.filter_map(|vm| VmName::new(vm.clone()).ok()));
    }
    let backups: BTreeMap<VmName, HostId> = vms
        .iter()
        .filter_map(|vm| Some((vm.clone(), newest_host(names, &agent.backup_of(vm)?)?)))
        .collect();
    let states = agent.run_blocking(move |them| {
        let observe = |vm: VmName| match them.vm_status(&vm) {
            Ok(status) => {
                let state = observe_vm(&status, backups.get(&vm).copied());
                Ok((vm, state))
            }
            Err(failure) if failure.kind == FailureKind::NoSuchVm => Ok((vm, ObservedVm::Nothing)),
            Err(failure) => Err(failure),
        };
        vms.into_iter().map(observe).collect::<Result<Vec<_>, _>>()
    });
    let number = |vm: &VmName| {
        record.vms.iter().find(|(_, it)| *it == vm.as_str()).map(|(number, _)| *number)
    };
    let vms = states.await.ok()?.into_iter().map(|(vm, state)| {
        let local = LocalVm { number: number(&vm), state };
        (vm, local)
    });
    let (coordinator, vms, is_cut_off) = (unit.coordinator(), vms.collect(), false);
    let is_kept = has_stored_copies(agent, unit)?;
    Some(ObservedCluster { coordinator, vms, is_kept, is_cut_off })
}

/// Whether a cluster is stored here of which this host has copies; `None` if it cannot be read.
fn has_stored_copies(agent: &Agent, unit: &FailoverUnit) -> Option<bool> {
    let FailoverUnit::Cluster(name) = unit else { return Some(false) };
    let stored = ClusterStore::from_paths(&agent.paths).load_cluster(name).ok()?;
    let state = stored.map(|record| record.state);
    Some(matches!(state, Some(ClusterState::Protected | ClusterState::FailingOver)))
}

/// The state of a VM by the status that its supervisor reports; `backup` is the host that this
/// agent carries its epochs to.
fn observe_vm(status: &VmStatus, backup: Option<HostId>) -> ObservedVm {
    let commits = status.protection.as_ref().is_some_and(|it| it.committed > 0);
    match (status.state.as_str(), &status.standby) {
        ("ended", _) => {
            let has_panicked = status.protection_end == Some(ProtectionEnd::Panicked);
            ObservedVm::Ended { shut_down: was_wanted(status), has_panicked }
        }
        (_, Some(standby)) => {
            let has_ended = standby.ended.is_some();
            ObservedVm::Standby { has_ended, is_over: standby.is_over() }
        }
        _ => ObservedVm::Runs {
            lease: status.lease,
            is_protected: status.protection.is_some(),
            backup: backup.filter(|_| commits),
            is_held: status.network.iter().any(|card| !card.open),
            is_hung: status.state == "hung",
        },
    }
}

/// Whether a VM ended as its user or its guest intended. The end that its protection reports counts
/// more than an exit code: a host that shuts down ends its processes as politely as a guest does.
fn was_wanted(status: &VmStatus) -> bool {
    match &status.protection_end {
        Some(ProtectionEnd::Stopped | ProtectionEnd::ShutDown) => true,
        Some(ProtectionEnd::Lost(_)) => false,
        _ => matches!(status.exit, Some(ProcessExit::Code(0) | ProcessExit::Stopped)),
    }
}

/// Whether the hosts that have copies are alive, as this host sees them.
pub(super) fn are_backups_alive(
    agent: &Agent,
    record: &ClusterRecord,
    names: &BTreeMap<HostId, String>,
) -> bool {
    let backups: BTreeSet<HostId> =
        record.register.placements.values().filter_map(|placement| placement.backup).collect();
    backups.iter().all(|host| {
        let name = names.get(host).and_then(|name| HostName::new(name.clone()).ok());
        let is_newest = name.as_ref().and_then(|name| newest_host(names, name)) == Some(*host);
        let health = name.and_then(|name| agent.peers.health(&name));
        is_newest && health.is_some_and(|it| *it.borrow() == HostHealth::Alive)
    })
}
