//! The reconcile loop of one cluster at this host: its cluster member, and the planned actions.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use firn_cluster::HostId;
use firn_control::{ClusterState, HostHealth, HostName};
use firn_membership::{ClusterMember, ClusterRecord, MembershipError, RecordView};
use firn_supervisor::{FailureKind, MemberRequest, SupervisorRequest, VmName};
use tokio::time::{Instant, sleep};

use super::cluster_manager::ReconciledCluster;
use super::cluster_record::{RETRY_INTERVAL, cluster_name, local_node};
use super::cluster_store::ClusterStore;
use super::host_actions::{ClusterHostActions, grant_lease};
use super::reconcile::{self, ClusterAction, ObservedCluster, plan_action};
use super::release;
use super::reprotect::Reprotection;
use crate::agent::Agent;
use crate::failover::host_actions::end_vm;
use crate::failover::manager::{LocalNode, POLLS_PER_LEASE, lock_mutex};
use crate::failover::record::{change_record, newest_host};

/// Starts the reconcile loop of a cluster, unless it runs already or has failed before.
pub(crate) fn ensure_reconciler(agent: &Arc<Agent>, name: &VmName) -> Option<Arc<ClusterMember>> {
    let LocalNode { members, terms, host } = agent.failover.local_node()?;
    let clusters = &agent.clusters;
    if lock_mutex(&clusters.given_up).contains_key(name) {
        return None;
    }
    let mut tended = lock_mutex(&clusters.running);
    tended.retain(|_, it| !it.task.is_finished());
    if let Some(it) = tended.get(name) {
        return Some(Arc::clone(&it.post));
    }
    let local = ClusterHostActions::new(agent, name);
    let member =
        ClusterMember::new(members, Arc::new(local), cluster_name(name).ok()?, host, terms);
    let member = Arc::new(member);
    let task = tokio::spawn(follow_record(Arc::clone(agent), name.clone(), Arc::clone(&member)));
    tended.insert(
        name.clone(),
        ReconciledCluster { post: Arc::clone(&member), task: task.abort_handle() },
    );
    Some(member)
}

async fn follow_record(agent: Arc<Agent>, name: VmName, member: Arc<ClusterMember>) {
    tokio::select! {
        done = member.follow_record() => {
            if let Err(trouble) = done {
                tracing::error!("cluster {name} can't run here, so this host does nothing more for it: {trouble}");
                lock_mutex(&agent.clusters.given_up).insert(name.clone(), trouble.to_string());
            }
        }
        () = run_reconciler(&agent, &name, &member) => {}
    }
    // Later VMs of the same names must not use these leases.
    grant_lease(&agent, &name, None);
}

async fn run_reconciler(agent: &Arc<Agent>, name: &VmName, member: &ClusterMember) {
    let mut state = ReconcileState::default();
    loop {
        match reconcile_once(agent, name, member, &mut state).await {
            Ok(true) => {}
            Ok(false) => return,
            Err(trouble) => {
                tracing::debug!("no action is planned for cluster {name}: {trouble}")
            }
        }
        let ttl = agent.membership.store_and_terms().map_or(RETRY_INTERVAL, |(_, terms)| terms.ttl);
        sleep(ttl / POLLS_PER_LEASE).await;
    }
}

/// State that the loop retains from one run to the next.
#[derive(Default)]
struct ReconcileState {
    deed: ClusterAction,
    again: Reprotection,
    /// Since when the epochs of a VM that runs here are not sent.
    unprotected: Option<Instant>,
}

impl ReconcileState {
    /// Whether epochs have not been sent for so long that the cause is no loss of a backup: a lost
    /// host still has its lease for a while, and longer if an election came with the loss.
    fn is_cut_off(
        &mut self,
        here: &ObservedCluster,
        are_heard: impl Fn() -> bool,
        node: &LocalNode,
    ) -> bool {
        let since =
            here.is_unprotected().then(|| *self.unprotected.get_or_insert_with(Instant::now));
        self.unprotected = since;
        let ttl = node.terms.ttl;
        since.is_some_and(|since| {
            let long = since.elapsed();
            long > 4 * ttl || (long > ttl && are_heard())
        })
    }
}

/// Whether the hosts that have copies are alive, as this host sees them.
fn are_backups_alive(
    agent: &Agent,
    record: &ClusterRecord,
    names: &BTreeMap<HostId, String>,
) -> bool {
    let backups: BTreeSet<HostId> =
        record.register.places.values().filter_map(|place| place.backup).collect();
    backups.iter().all(|host| {
        let name = names.get(host).and_then(|name| HostName::new(name.clone()).ok());
        let is_newest = name.as_ref().and_then(|name| newest_host(names, name)) == Some(*host);
        let health = name.and_then(|name| agent.peers.health(&name));
        is_newest && health.is_some_and(|it| *it.borrow() == HostHealth::Alive)
    })
}

/// Observes once, and performs the planned action. Returns whether the loop continues.
async fn reconcile_once(
    agent: &Arc<Agent>,
    name: &VmName,
    member: &ClusterMember,
    state: &mut ReconcileState,
) -> Result<bool, MembershipError> {
    // A command may be changing the cluster.
    let Some(mut sole) = agent.clusters.locks.try_lock(name) else { return Ok(true) };
    if agent.paths.members_of(name).iter().any(|vm| agent.is_claimed(vm)) {
        return Ok(true);
    }
    let node = local_node(agent)?;
    let cluster = cluster_name(name)?;
    let RecordView { known, leases, names } = node.members.read_view(&cluster).await?;
    let Some(record) = known.record else { return Ok(true) };
    let Some(mut here) = observe_cluster(agent, name, &record, node.host).await else {
        return Ok(true);
    };
    here.is_cut_off = state.is_cut_off(&here, || are_backups_alive(agent, &record, &names), &node);
    let own = agent.config.name.as_str();
    let mine = names.iter().filter(|(host, it)| **host < node.host && *it == own);
    let mine: BTreeSet<HostId> = mine.map(|(host, _)| *host).collect();
    let action = plan_action(node.host, &mine, &record, &leases, &here);
    if action != state.deed {
        tracing::info!("cluster {name}: {action:?}, for {here:?}");
    }
    state.deed = action.clone();
    let register = &record.register;
    let next = match action {
        ClusterAction::ClearBackup => register.with_backup(None),
        ClusterAction::Adopt(before) => register.with_adopting_host(before, node.host),
        ClusterAction::AdoptCopies(before) => register.with_inheriting_host(before, node.host),
        ClusterAction::EndRecord => register.with_end(),
        ClusterAction::DropCopies => {
            if let Err(failure) = release::drop_copies(agent, &mut sole, name).await {
                tracing::warn!("copies of cluster {name} can't be dropped: {failure}");
            }
            return Ok(true);
        }
        ClusterAction::Protect => {
            let called = register.primaries().into_iter().filter_map(|host| names.get(&host));
            let runs = called.filter_map(|it| HostName::new(it.clone()).ok()).collect();
            state.again.ask_next_host(agent, name, &runs);
            return Ok(true);
        }
        ClusterAction::Nothing => return Ok(!forget_if_over(agent, name, &record, &here)),
        other => {
            drop(sole);
            perform_action(agent, name, member, &record, other).await;
            return Ok(true);
        }
    };
    let vms = if next.is_ended() { BTreeMap::new() } else { record.vms };
    change_record(&*node.members, &cluster, known.revision, &ClusterRecord { register: next, vms })
        .await?;
    Ok(true)
}

/// Whether nothing of an ended cluster is on this host any more. If so, its VMs are forgotten.
fn forget_if_over(
    agent: &Agent,
    name: &VmName,
    record: &ClusterRecord,
    here: &ObservedCluster,
) -> bool {
    let obeys = |vm: &reconcile::ObservedMember| {
        matches!(vm, reconcile::ObservedMember::Runs { lease: Some(_), .. })
    };
    let is_over = record.register.is_ended() && !here.is_kept && !here.vms.values().any(obeys);
    if is_over {
        agent.paths.members_of(name).iter().for_each(|vm| agent.paths.forget_cluster(vm));
    }
    is_over
}

/// Observes the cluster on this host; `None` if its state cannot be read now.
async fn observe_cluster(
    agent: &Arc<Agent>,
    name: &VmName,
    record: &ClusterRecord,
    me: HostId,
) -> Option<ObservedCluster> {
    let mut vms: BTreeSet<VmName> = agent.paths.members_of(name).into_iter().collect();
    let placed = record.register.places.iter().filter(|(_, place)| place.primary == me);
    let names = placed.filter_map(|(vm, _)| record.vms.get(vm));
    vms.extend(names.filter_map(|vm| VmName::new(vm.clone()).ok()));
    let state =
        ClusterStore::from_paths(&agent.paths).load_cluster(name).ok()?.map(|record| record.state);
    let is_kept = matches!(state, Some(ClusterState::Protected | ClusterState::FailingOver));
    let looked = agent.run_blocking(move |them| {
        let mut seen = BTreeMap::new();
        for vm in vms {
            let is = match them.vm_status(&vm) {
                Ok(status) => reconcile::ObservedMember::from_status(&status),
                Err(failure) if failure.kind == FailureKind::NoSuchVm => {
                    reconcile::ObservedMember::Nothing
                }
                Err(failure) => return Err(failure),
            };
            seen.insert(vm, is);
        }
        Ok(seen)
    });
    looked.await.ok().map(|vms| ObservedCluster { vms, is_kept, is_cut_off: false })
}

async fn perform_action(
    agent: &Arc<Agent>,
    name: &VmName,
    member: &ClusterMember,
    record: &ClusterRecord,
    action: ClusterAction,
) {
    match action {
        ClusterAction::YieldLease => {
            member.yield_lease(record.register.generation);
        }
        ClusterAction::Fence(vm) => {
            let generation = record.register.generation.0;
            let why = format!("its cluster {name} continues elsewhere, in generation {generation}");
            end_vm(agent, &vm, &why).await;
        }
        ClusterAction::Detach(vm) => detach_vm(agent, &vm).await,
        ClusterAction::ReleaseOutput(vms) => {
            for vm in vms {
                let on = vm.clone();
                let done = agent.run_blocking(move |them| them.resume_output(&on)).await;
                if let Err(failure) = done {
                    tracing::warn!("{vm} should release its output, and does not: {failure}");
                }
            }
        }
        _ => {}
    }
}

/// The cluster has ended: the VM continues by itself.
async fn detach_vm(agent: &Arc<Agent>, vm: &VmName) {
    let name = vm.clone();
    let done = agent.run_blocking(move |them| {
        them.ask_supervisor(&name, &SupervisorRequest::ReleaseMember)?;
        them.ask_supervisor(&name, &SupervisorRequest::Member(MemberRequest::Leave)).map(drop)
    });
    if let Err(failure) = done.await {
        tracing::warn!("{vm} should leave its cluster, and does not: {failure}");
    }
}
