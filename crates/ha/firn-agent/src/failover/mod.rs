//! Failover of single VMs without a person: a VM that another host protects is a cluster of one
//! VM. Its record is named after the VM.
//!
//! ```text
//!   firn protect web --backup b
//!     |                                                       the record of "web"
//!     v                                                         (firn-membership)
//!   acquire_lease: the record exists and names this host,
//!                  and this host holds the lease <--------->  { primary: a, backup: - }
//!   protect: epochs go to b, the lease covers the frames                |
//!   record_committed_backup: b has committed an epoch ----->  { primary: a, backup: b }
//!                                                                       |  a's lease expires
//!   at b: the ClusterMember runs the VM <------------------  { primary: b, generation + 1 }
//! ```
//!
//! Each VM that a record may name has a [`ClusterMember`], which requests the lease and obeys the
//! record. Beside it a reconcile loop carries out one planned action at a time ([`plan_action`]):
//! it keeps the record correct, and protects a VM that has lost its backup by another host. This
//! state is in memory only: an agent that starts adopts the VMs of its predecessor, unless another
//! host runs them.
//!
//! [`plan_action`]: reconcile::plan_action

mod host_actions;
mod manual;
mod reconcile;
mod reconciler;

pub(crate) use host_actions::end_vm;
pub(crate) use manual::fail_over;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use firn_cluster::failover::{FailoverRecord, LeaseTerms, VmPlacement};
use firn_cluster::{HostId, VmId};
use firn_control::HostName;
use firn_control::api::ProtectVmRequest;
use firn_membership::{
    ChangeResult, ClusterMember, ClusterName, ClusterRecord, MembershipError, MembershipStore,
    RecordView, Revision, run_controllers,
};
use firn_supervisor::{Failure, FailureKind, PrimaryEnd, VmName, VmStatus};
use serde_json::Value;
use tokio::task::AbortHandle;
use tokio::time::{Instant, sleep};

use crate::agent::Agent;
use crate::clusters;

/// Polls in the time of one lease: lease requests of a VM, and runs of its reconcile loop.
pub(crate) const POLLS_PER_LEASE: u32 = 5;

/// Time between two tries, where another component has to act first.
const RETRY_INTERVAL: Duration = Duration::from_millis(100);

/// Failover state of this agent, for the VMs of its host.
#[derive(Default)]
pub(crate) struct FailoverManager {
    local_node: OnceLock<LocalNode>,
    reconcilers: Mutex<BTreeMap<VmName, ReconciledVm>>,
    /// VMs that could not be run on this host.
    given_up: Mutex<BTreeSet<VmName>>,
    /// Why a VM has no backup.
    troubles: Mutex<BTreeMap<VmName, String>>,
    /// The supervisor's answer when a VM was run on this host.
    failover_facts: Mutex<BTreeMap<VmName, Value>>,
    /// The request by which a VM was protected last.
    protect_requests: Mutex<BTreeMap<VmName, ProtectVmRequest>>,
}

/// This host's access to membership: the store, the terms of leases, and this host's number.
#[derive(Clone)]
pub(crate) struct LocalNode {
    pub members: Arc<dyn MembershipStore>,
    pub terms: LeaseTerms,
    pub host: HostId,
}

struct ReconciledVm {
    post: Arc<ClusterMember>,
    task: AbortHandle,
}

pub(crate) fn lock_mutex<T>(of: &Mutex<T>) -> MutexGuard<'_, T> {
    of.lock().unwrap_or_else(PoisonError::into_inner)
}

impl FailoverManager {
    /// Why a VM is not protected, though it should be.
    pub(crate) fn unprotected_reason(&self, vm: &VmName) -> Option<String> {
        lock_mutex(&self.troubles).get(vm).cloned()
    }

    /// Forgets failures of a VM whose record a user has ended.
    pub(crate) fn forget_vm(&self, vm: &VmName) {
        lock_mutex(&self.given_up).remove(vm);
        lock_mutex(&self.troubles).remove(vm);
    }

    /// Returns the access to membership: `None` without membership, or before this host has joined.
    pub(crate) fn local_node(&self) -> Option<LocalNode> {
        self.local_node.get().cloned()
    }
}

/// Reconciles the VMs of this host, if membership is configured. Never returns.
pub(crate) async fn run_failover(agent: Arc<Agent>) {
    let Some((members, terms)) = agent.membership.store_and_terms() else {
        return std::future::pending().await;
    };
    let host = join_until_numbered(&*members, agent.config.name.as_str(), terms).await;
    tracing::info!("this agent has joined membership as {host}");
    let _ = agent.failover.local_node.set(LocalNode { members: Arc::clone(&members), terms, host });
    let name = agent.config.name.to_string();
    tokio::spawn(async move { run_controllers(members, &name, terms).await });
    loop {
        let statuses = agent.run_blocking(|vms| vms.list_vms()).await.unwrap_or_default();
        let given_up = lock_mutex(&agent.failover.given_up).clone();
        let concerns = |it: &&VmStatus| has_own_record(&agent, it) && !given_up.contains(&it.name);
        statuses.iter().filter(concerns).for_each(|it| drop(ensure_reconciler(&agent, &it.name)));
        let clusters = statuses.iter().filter_map(|it| agent.paths.cluster_of(&it.name));
        clusters
            .collect::<BTreeSet<_>>()
            .iter()
            .for_each(|it| drop(clusters::ensure_reconciler(&agent, it)));
        sleep(terms.ttl / POLLS_PER_LEASE).await;
    }
}

async fn join_until_numbered(
    members: &dyn MembershipStore,
    name: &str,
    terms: LeaseTerms,
) -> HostId {
    loop {
        match members.join_host(name).await {
            Ok(host) => return host,
            Err(trouble) => tracing::warn!("this agent can't join membership: {trouble}"),
        }
        sleep(terms.ttl / POLLS_PER_LEASE).await;
    }
}

/// Whether a record of its own may cover the VM: the VM obeys a lease, or is a standby of another
/// host's VM.
fn has_own_record(agent: &Agent, status: &VmStatus) -> bool {
    let is_member = status.standby.as_ref().is_some_and(|standby| standby.member);
    if is_member || agent.paths.cluster_of(&status.name).is_some() {
        return false;
    }
    let is_standby = status.standby.is_some() && agent.paths.primary_host(&status.name).is_some();
    let has_panicked = status.protection_end == Some(PrimaryEnd::Panicked);
    (status.lease.is_some() && (status.state != "ended" || has_panicked)) || is_standby
}

/// Starts the reconcile loop of a VM, unless it runs already.
fn ensure_reconciler(agent: &Arc<Agent>, vm: &VmName) -> Option<Arc<ClusterMember>> {
    let LocalNode { members, terms, host } = agent.failover.local_node.get()?.clone();
    let cluster = ClusterName::new(vm.as_str()).ok()?;
    let mut tended = lock_mutex(&agent.failover.reconcilers);
    tended.retain(|_, it| !it.task.is_finished());
    if let Some(it) = tended.get(vm) {
        return Some(Arc::clone(&it.post));
    }
    let local = host_actions::VmHostActions { agent: Arc::downgrade(agent), vm: vm.clone() };
    let member = Arc::new(ClusterMember::new(members, Arc::new(local), cluster, host, terms));
    let task =
        tokio::spawn(reconciler::follow_record(Arc::clone(agent), vm.clone(), Arc::clone(&member)));
    tended
        .insert(vm.clone(), ReconciledVm { post: Arc::clone(&member), task: task.abort_handle() });
    Some(member)
}

/// Acquires the lease that is to cover a VM's frames, and returns its generation. By then the
/// record names this host as the primary. Returns `None` without membership.
pub(crate) async fn acquire_lease(
    agent: &Arc<Agent>,
    wanted: &ProtectVmRequest,
) -> Result<Option<u32>, Failure> {
    let Some((_, terms)) = agent.membership.store_and_terms() else { return Ok(None) };
    let vm = &wanted.vm;
    lock_mutex(&agent.failover.given_up).remove(vm);
    lock_mutex(&agent.failover.protect_requests).insert(vm.clone(), wanted.clone());
    // Two things may take long: the lease of an earlier generation has to expire, and the
    // membership servers may have to elect a leader.
    let (until, mut why) = (Instant::now() + 6 * terms.ttl, String::new());
    while Instant::now() < until {
        match record_primary(agent, vm).await {
            Ok(Some(generation)) => return Ok(Some(generation)),
            Ok(None) => "the lease is not held yet".clone_into(&mut why),
            Err(MembershipError::Refused(text)) => return Err(already_protected(vm, text)),
            Err(trouble) => why = trouble.to_string(),
        }
        sleep(RETRY_INTERVAL).await;
    }
    let failure = Failure::new(FailureKind::Host, format!("{vm} gets no lease: {why}"));
    Err(failure.with_hint("`firn cluster status` shows which hosts answer"))
}

fn already_protected(vm: &VmName, why: String) -> Failure {
    let failure = Failure::new(FailureKind::Busy, why);
    failure.with_hint(format!(
        "`firn release {vm}` there ends that; `firn cluster forget {vm}` does if that host and its backup's are gone"
    ))
}

/// Makes the record name this host as the primary; returns the generation once its lease is held.
async fn record_primary(agent: &Arc<Agent>, vm: &VmName) -> Result<Option<u32>, MembershipError> {
    let none =
        || MembershipError::Unreachable("this agent has not joined membership yet".to_owned());
    let LocalNode { members, host, .. } = agent.failover.local_node.get().ok_or_else(none)?.clone();
    let cluster = ClusterName::new(vm.as_str())?;
    let RecordView { known, names, .. } = members.read_view(&cluster).await?;
    let place = VmPlacement { primary: host, backup: None };
    let places = BTreeMap::from([(VmId(0), place)]);
    let vms = BTreeMap::from([(VmId(0), vm.to_string())]);
    let begun = |register| ClusterRecord { register, vms: vms.clone() };
    let next = match &known.record {
        None => begun(FailoverRecord::new(places)),
        Some(record) if record.register.is_ended() => begun(record.register.with_restart(places)),
        Some(record) => {
            let register = &record.register;
            let primary = register.primaries().first().copied().unwrap_or(host);
            if primary != host {
                let name = names.get(&primary).map_or("?", String::as_str);
                let text =
                    format!("{vm} is protected already, and runs at host {name} ({})", primary.0);
                return Err(MembershipError::Refused(text));
            }
            let member = ensure_reconciler(agent, vm).ok_or_else(none)?;
            let holds = register.fence.is_empty() && member.may_send();
            return Ok(holds.then_some(register.generation.0));
        }
    };
    change_record(&*members, &cluster, known.revision, &next).await?;
    ensure_reconciler(agent, vm);
    Ok(None)
}

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
