//! The record of a cluster: which host may run its VMs, and which agent manages them at this host.
//!
//! ```text
//!   host c: firn cluster protect shop                        the record "shop" (firn-membership)
//!     begin_record: its VMs run where they do, no copies -> { web: a, db: b }
//!     a, b: the record names the host,
//!           the lease is held <--------------------------->
//!     the first global checkpoint is in the file of c
//!     record_backup --------------------------------------> { web: a, backup c; db: b, backup c }
//!                                                                 |  the lease of a expires
//!     run_here: all VMs, from the newest checkpoint <------ { web: c; db: c; generation + 1 }
//!     a, b: VMs that continue there are ended <------------      |  when a and b can't send
//! ```
//!
//! Each host that has VMs or copies of the cluster has one
//! [`ClusterMember`](firn_membership::ClusterMember), which requests one lease for all its VMs
//! there. Beside it a reconcile loop carries out the planned actions
//! ([`reconciler`](super::reconciler)). Which VMs belong to the cluster is stored in their runtime
//! directories ([`AgentPaths::cluster_of`](firn_control::AgentPaths::cluster_of)), so that an agent
//! that starts again knows them.
//!
//! The generation in frames is taken from the layout of the record, which each protection and each
//! failover changes. The record's own generation changes with a failover only: a VM that runs in an
//! older one is ended.

use std::collections::BTreeMap;
use std::sync::Arc;

use firn_cluster::failover::{
    FailoverRecord, ManualDecision, ManualRefusal, VmPlacement, decide_manual_failover,
};
use firn_cluster::{Generation, HostId, VmId};
use firn_control::{ClusterVm, HostName, StoredCluster};
use firn_membership::{ClusterRecord, MembershipError, RecordView};
use firn_supervisor::{Failure, FailureKind, VmName};

use super::failover_unit::FailoverUnit;
use super::membership_access::{
    begin_register, change_record, has_membership, newest_host, record_name, retry_attempt,
};
use crate::agent::Agent;

/// The generation in frames that a change of the record begins.
fn frame_generation(register: &FailoverRecord) -> Generation {
    Generation(u32::try_from(register.layout + 1).unwrap_or(u32::MAX))
}

/// Records where the VMs run, and that there are no copies. Returns the generation in frames that
/// begins, and whether the cluster had a record before.
pub(super) async fn begin_record(
    agent: &Agent,
    of: &StoredCluster,
) -> Result<(Generation, bool), Failure> {
    let what = format!("{} gets no record", of.name);
    retry_attempt(agent, &what, |ours| async move {
        let cluster = record_name(&of.name)?;
        let RecordView { known, names, .. } = ours.members.read_view(&cluster).await?;
        let Some(placements) = current_places(of, &names) else { return Ok(None) };
        let vms = of.numbered_vms().map(|(vm, placed)| (vm, placed.vm.to_string())).collect();
        let was_there = known.record.as_ref().is_some_and(|it| !it.register.is_ended());
        let register = match &known.record {
            Some(record) if was_there && record.vms != vms => return Err(name_taken(&of.name)),
            // One of its agents was started again, and has to adopt its VM.
            Some(record) if was_there && is_elsewhere(&record.register, &placements) => {
                return Ok(None);
            }
            Some(record) if was_there => record.register.with_backup(None),
            before => begin_register(before.as_ref(), placements),
        };
        let begins = (frame_generation(&register), was_there);
        let to = ClusterRecord { register, vms };
        Ok(change_record(&*ours.members, &cluster, known.revision, &to).await?.then_some(begins))
    })
    .await
}

pub(super) fn name_taken(name: &VmName) -> MembershipError {
    let text = format!(
        "there is a record of a cluster {name} of other VMs: `firn cluster release {name}` where it was made ends that, or \
         `firn cluster forget {name}` if all its hosts are gone"
    );
    MembershipError::Refused(text)
}

/// Places each VM at the most recently started agent of its host; `None` if one has no number.
fn current_places(
    of: &StoredCluster,
    names: &BTreeMap<HostId, String>,
) -> Option<BTreeMap<VmId, VmPlacement>> {
    let placement = |(vm, placed): (VmId, &ClusterVm)| {
        Some((vm, VmPlacement { primary: newest_host(names, &placed.host)?, backup: None }))
    };
    of.numbered_vms().map(placement).collect()
}

fn is_elsewhere(register: &FailoverRecord, placements: &BTreeMap<VmId, VmPlacement>) -> bool {
    let primaries = |placements: &BTreeMap<VmId, VmPlacement>| -> Vec<HostId> {
        placements.values().map(|placement| placement.primary).collect()
    };
    primaries(&register.placements) != primaries(placements) || !register.fence.is_empty()
}

/// Whether no host has changed the record since a protection began in that generation. If seeding
/// takes long, the controller names a backup, which does not have copies by that.
fn is_unchanged(register: &FailoverRecord, begun: Generation) -> bool {
    let is_named = register.placements.values().any(|placement| placement.backup.is_some());
    match is_named && !register.is_protected() {
        true => frame_generation(register) == begun.next(),
        false => frame_generation(register) == begun,
    }
}

/// Records this host as the backup of all VMs, so that it may run them from now on: it has a global
/// checkpoint of the generation that was begun.
pub(super) async fn record_backup(agent: &Arc<Agent>, of: &StoredCluster) -> Result<(), Failure> {
    for placed in &of.vms {
        store_cluster_of(agent, &placed.vm, &of.name)?;
    }
    let what = format!("{} does not fail over yet", of.name);
    retry_attempt(agent, &what, |ours| async move {
        let cluster = record_name(&of.name)?;
        let RecordView { known, .. } = ours.members.read_view(&cluster).await?;
        let over = || MembershipError::Refused(format!("{} was changed by another host", of.name));
        let record = known.record.ok_or_else(over)?;
        let register = &record.register;
        let is_here =
            register.placements.values().all(|placement| placement.backup == Some(ours.host));
        if is_here && register.is_protected() {
            return Ok(Some(()));
        }
        if !is_unchanged(register, of.generation) {
            return Err(over());
        }
        let to = ClusterRecord { register: record.register.with_backup(Some(ours.host)), ..record };
        Ok(change_record(&*ours.members, &cluster, known.revision, &to).await?.then_some(()))
    })
    .await
}

/// Stores with a VM which cluster it belongs to.
pub(super) fn store_cluster_of(
    agent: &Agent,
    vm: &VmName,
    cluster: &VmName,
) -> Result<(), Failure> {
    let kept = agent.paths.set_cluster(vm, cluster);
    kept.map_err(|error| Failure::from_error(FailureKind::Other, &error))
        .map_err(|failure| failure.while_doing(format!("noting that {vm} belongs to {cluster}")))
}

/// Ends the record of a cluster, if it has one.
pub(super) async fn end_record(agent: &Agent, name: &VmName) -> Result<(), Failure> {
    if !has_membership(agent) {
        return Ok(());
    }
    retry_attempt(agent, &format!("the record of {name} stays"), |ours| async move {
        let cluster = record_name(name)?;
        let known = ours.members.read_record(&cluster).await?;
        let Some(record) = known.record.filter(|it| !it.register.is_ended()) else {
            return Ok(Some(()));
        };
        let is_done =
            change_record(&*ours.members, &cluster, known.revision, &record.to_ended()).await?;
        Ok(is_done.then_some(()))
    })
    .await
}

/// Whether the record of a cluster has ended.
pub(super) async fn has_record_ended(agent: &Agent, name: &VmName) -> Result<bool, Failure> {
    if !has_membership(agent) {
        return Ok(false);
    }
    retry_attempt(agent, &format!("{name} is not known"), |ours| async move {
        let known = ours.members.read_record(&record_name(name)?).await?;
        Ok(Some(known.record.is_some_and(|record| record.register.is_ended())))
    })
    .await
}

/// Records that all VMs run on this host, unless the record has that already. They are run when no
/// other host can send any more. The user who requests that declares all old primaries dead:
/// output that has left is in the newest global checkpoint, whether they live or not.
pub(super) async fn record_failover(agent: &Arc<Agent>, name: &VmName) -> Result<(), Failure> {
    agent.clusters.clear_given_up(&FailoverUnit::Cluster(name.clone()));
    retry_attempt(agent, &format!("{name} does not fail over"), |ours| async move {
        let cluster = record_name(name)?;
        let RecordView { known, leases, .. } = ours.members.read_view(&cluster).await?;
        let not_here = || {
            let text = "its record does not name this host as the backup of all its VMs";
            MembershipError::Refused(format!("{name} can't be run here: {text}"))
        };
        let record = known.record.ok_or_else(not_here)?;
        let primaries = record.register.primaries();
        if primaries == [ours.host].into() {
            return Ok(Some(()));
        }
        match decide_manual_failover(&record.register, &leases, ours.host, &primaries) {
            ManualDecision::Propose(register) => {
                let to = ClusterRecord { register, ..record };
                let changed = change_record(&*ours.members, &cluster, known.revision, &to).await?;
                Ok(changed.then_some(()))
            }
            // This host's own lease may just be requested, or its copies recorded.
            ManualDecision::Wait | ManualDecision::Refused(ManualRefusal::NoStandby) => Ok(None),
            ManualDecision::Runs | ManualDecision::Refused(_) => Err(not_here()),
        }
    })
    .await
}

/// Returns the VMs of a cluster, and the hosts that run them, as its record names them.
pub(super) async fn read_recorded_vms(
    agent: &Agent,
    name: &VmName,
) -> Result<Vec<(VmName, HostName)>, Failure> {
    if !has_membership(agent) {
        return Ok(Vec::new());
    }
    retry_attempt(agent, &format!("{name} is not known"), |ours| async move {
        let RecordView { known, names, .. } = ours.members.read_view(&record_name(name)?).await?;
        let Some(ClusterRecord { register, vms }) = known.record else {
            return Ok(Some(Vec::new()));
        };
        let at = |(vm, placement): (&VmId, &VmPlacement)| {
            let vm = VmName::new(vms.get(vm)?.clone()).ok()?;
            Some((vm, HostName::new(names.get(&placement.primary)?.clone()).ok()?))
        };
        Ok(Some(register.placements.iter().filter_map(at).collect()))
    })
    .await
}

#[cfg(test)]
mod tests {
    use firn_cluster::failover::{ControllerDecision, FailoverController};

    use super::*;

    const BACKUP: HostId = HostId(2);

    #[test]
    fn a_backup_that_the_controller_names_has_no_copies() {
        let placement = VmPlacement { primary: HostId(1), backup: None };
        let begun = FailoverRecord::new(BTreeMap::from([(VmId(0), placement)]));
        let since = frame_generation(&begun);
        let hosts = [HostId(1), BACKUP].into();
        let ControllerDecision::Propose(named) =
            FailoverController::new(begun.clone(), hosts).next_decision()
        else {
            panic!("no backup is named")
        };
        assert_eq!(named.placements[&VmId(0)].backup, Some(BACKUP));
        assert!(!named.is_protected() && is_unchanged(&named, since));
        let backed = named.with_backup(Some(BACKUP));
        assert!(backed.is_protected() && !is_unchanged(&backed, since));
        assert!(is_unchanged(&begun, since));
        assert!(!is_unchanged(&begun.with_backup(Some(BACKUP)), since), "by another host");
        assert!(!is_unchanged(&begun.with_backup(None), since), "another host has begun");
    }
}
