//! The reconcile loop of one failover unit at this host: its cluster member, and the planned
//! actions.
//!
//! ```text
//!   membership ---- record ----> ClusterMember: requests the lease, runs and ends VMs (host_actions)
//!       |  ^
//!       |  '-- change_record --------------.
//!       '--- record, leases ---.           |
//!   supervisors --- states ----+--> plan_action (firn-cluster, pure) --> one action for the VMs
//! ```

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use firn_cluster::failover::reconcile::{
    ObservedCluster, ObservedVm, ReconcileAction, plan_action,
};
use firn_cluster::{Generation, HostId};
use firn_control::HostName;
use firn_membership::{ClusterMember, ClusterRecord, MembershipError, RecordView};
use firn_supervisor::{Failure, MemberRequest, SupervisorRequest, VmName};
use tokio::time::{Instant, sleep};

use super::action_text::describe_action;
use super::cluster_lock::ClusterLock;
use super::cluster_manager::{LocalNode, POLLS_PER_LEASE, RunningReconciler, lock_mutex};
use super::failover_unit::FailoverUnit;
use super::host_actions::{UnitHostActions, end_vm, grant_lease};
use super::membership_access::{change_record, record_name};
use super::observe::{are_backups_alive, observe_unit};
use super::release;
use super::reprotect::Reprotection;
use crate::agent::Agent;
use crate::vms::LocalVms;

/// How long an action is planned that gives up copies, until it is performed: the end of a hypervisor
/// takes a moment to be known.
const UNSURE_WAIT: Duration = Duration::from_secs(1);

/// Starts the reconcile loop of a unit, unless it runs already or has failed before.
pub(super) fn ensure_reconciler(
    agent: &Arc<Agent>,
    unit: &FailoverUnit,
) -> Option<Arc<ClusterMember>> {
    let node = agent.clusters.local_node()?;
    if agent.clusters.give_up_reason(unit).is_some() {
        return None;
    }
    let mut running = lock_mutex(&agent.clusters.reconcilers);
    running.retain(|_, it| !it.task.is_finished());
    if let Some(it) = running.get(unit) {
        return Some(Arc::clone(&it.member));
    }
    let LocalNode { members, timing, host } = node.clone();
    let local = Arc::new(UnitHostActions::new(agent, unit));
    let record = record_name(unit.name()).ok()?;
    let member = Arc::new(ClusterMember::new(members, local, record, host, timing.lease));
    if let Some(generation) = lock_mutex(&agent.clusters.reported_losses).get(unit) {
        member.yield_lease(*generation);
    }
    let task = follow_record(Arc::clone(agent), node, unit.clone(), Arc::clone(&member));
    let task = tokio::spawn(task).abort_handle();
    running.insert(unit.clone(), RunningReconciler { member: Arc::clone(&member), task });
    Some(member)
}

/// Follows the record of a unit until its VMs could not be run here, or nothing of it is left.
async fn follow_record(
    agent: Arc<Agent>,
    node: LocalNode,
    unit: FailoverUnit,
    member: Arc<ClusterMember>,
) {
    tokio::select! {
        done = member.follow_record() => {
            if let Err(trouble) = done {
                tracing::error!("{unit} can't run here, so this host does nothing more for it: {trouble}");
                lock_mutex(&agent.clusters.given_up).insert(unit.clone(), trouble.to_string());
            }
        }
        () = run_reconciler(&agent, &node, &unit, &member) => {}
    }
    // Later VMs of the same names must not use this lease.
    grant_lease(&agent, &unit, None);
}

async fn run_reconciler(
    agent: &Arc<Agent>,
    node: &LocalNode,
    unit: &FailoverUnit,
    member: &ClusterMember,
) {
    let (before, again, unprotected) = Default::default();
    let planned_since = Instant::now();
    let mut state =
        Reconciler { agent, node, unit, member, before, planned_since, again, unprotected };
    loop {
        match state.reconcile_once().await {
            Ok(true) => {}
            Ok(false) => return,
            Err(trouble) => tracing::debug!("no action is planned for {unit}: {trouble}"),
        }
        sleep(node.timing.lease.ttl / POLLS_PER_LEASE).await;
    }
}

struct Reconciler<'a> {
    agent: &'a Arc<Agent>,
    node: &'a LocalNode,
    unit: &'a FailoverUnit,
    member: &'a ClusterMember,
    /// The action that was planned before, and since when.
    before: ReconcileAction<VmName>,
    planned_since: Instant,
    again: Reprotection,
    /// Since when the epochs of a VM that runs here are not sent.
    unprotected: Option<Instant>,
}

impl Reconciler<'_> {
    /// Observes once, and performs the planned action. Returns whether the loop continues.
    async fn reconcile_once(&mut self) -> Result<bool, MembershipError> {
        let (agent, unit) = (self.agent, self.unit);
        if matches!(unit, FailoverUnit::Vm(vm) if agent.paths.cluster_of(vm).is_some()) {
            // It has joined a cluster of several VMs, whose lease it obeys.
            return Ok(false);
        }
        // A command may be changing the cluster, or protecting one of its VMs.
        let Some(sole) = agent.clusters.locks.try_lock(unit.name()) else { return Ok(true) };
        if self.is_claimed() {
            return Ok(true);
        }
        let cluster = record_name(unit.name())?;
        let RecordView { known, leases, names, .. } = self.node.members.read_view(&cluster).await?;
        let Some(record) = known.record else { return Ok(true) };
        let observed = observe_unit(agent, unit, &record, &names, self.node.host).await;
        // A command may have claimed a VM meanwhile.
        let Some(mut here) = observed.filter(|_| !self.is_claimed()) else { return Ok(true) };
        here.is_cut_off = self.is_cut_off(&here, || are_backups_alive(agent, &record, &names));
        let own = agent.config.name.as_str();
        let mine = names.iter().filter(|(host, it)| **host < self.node.host && *it == own);
        let mine = mine.map(|(host, _)| *host).collect();
        let action = plan_action(self.node.host, &mine, &record.register, &leases, &here);
        if action != self.before {
            tracing::info!("{unit}: {}", describe_action(&action, &names));
            self.planned_since = Instant::now();
        }
        let before = std::mem::replace(&mut self.before, action.clone());
        let is_urgent = action.is_sure(&ReconcileAction::Nothing);
        let is_settled = is_urgent || self.planned_since.elapsed() >= UNSURE_WAIT;
        if !action.is_sure(&before) || !is_settled {
            return Ok(true);
        }
        if self.has_died(&action, &here) {
            tracing::warn!("{unit} has died here: its backup has to run it");
            self.report_loss(&record).await;
            return Ok(false);
        }
        let register = &record.register;
        let next = match action {
            ReconcileAction::RecordBackup(backup) => register.with_backup(backup),
            ReconcileAction::Adopt(host) => register.with_adopting_host(host, self.node.host),
            ReconcileAction::AdoptCopies(host) => {
                register.with_inheriting_host(host, self.node.host)
            }
            ReconcileAction::EndRecord => register.with_end(),
            ReconcileAction::Nothing => return Ok(!self.forget_if_over(&record, &here)),
            other => {
                self.perform_action(other, sole, &record, &names, &here).await;
                return Ok(true);
            }
        };
        let vms = if next.is_ended() { BTreeMap::new() } else { record.vms };
        let to = ClusterRecord { register: next, vms };
        let is_done = change_record(&*self.node.members, &cluster, known.revision, &to).await?;
        Ok(!(is_done && self.has_left(&to)))
    }

    /// Whether another task acts on a VM of the unit.
    fn is_claimed(&self) -> bool {
        let again = &self.agent.clusters.protecting_again;
        let is_claimed = |vm: &VmName| self.agent.is_claimed(vm) || lock_mutex(again).contains(vm);
        self.unit.local_vms(&self.agent.paths).iter().any(is_claimed)
    }

    /// Whether epochs have not been sent for so long that the cause is no loss of a backup: a lost
    /// host still has its lease for a while, and longer if an election came with the loss.
    fn is_cut_off(&mut self, here: &ObservedCluster<VmName>, are_alive: impl Fn() -> bool) -> bool {
        let since =
            here.is_unprotected().then(|| *self.unprotected.get_or_insert_with(Instant::now));
        self.unprotected = since;
        let patience = self.node.timing.patience();
        since.is_some_and(|since| {
            let long = since.elapsed();
            long > 4 * patience || (long > patience && are_alive())
        })
    }

    /// Whether a VM alone has died: this host does nothing more for it, and requests no lease. So
    /// its record stays, even if a user removes what is left of the VM here.
    fn has_died(&self, action: &ReconcileAction<VmName>, here: &ObservedCluster<VmName>) -> bool {
        let is_alone = matches!(self.unit, FailoverUnit::Vm(_));
        is_alone && *action == ReconcileAction::YieldLease && !here.has_leased_vm()
    }

    /// Gives up the lease of a VM that has died here, and reports that.
    async fn report_loss(&self, record: &ClusterRecord) {
        let (unit, register) = (self.unit.clone(), &record.register);
        lock_mutex(&self.agent.clusters.reported_losses).insert(unit, register.generation);
        if let Err(trouble) = self.member.report_loss(register).await {
            tracing::debug!("{} fails over when its lease is over: {trouble}", self.unit);
        }
    }

    /// Whether the VM alone has left with the record that this host has just ended. Other VMs of a
    /// cluster have to be detached yet.
    fn has_left(&self, record: &ClusterRecord) -> bool {
        let has = record.register.is_ended() && matches!(self.unit, FailoverUnit::Vm(_));
        if has {
            lock_mutex(&self.agent.clusters.troubles).remove(self.unit);
        }
        has
    }

    /// Whether the record has ended, and nothing of it is on this host any more. If so, its VMs
    /// are forgotten.
    fn forget_if_over(&self, record: &ClusterRecord, here: &ObservedCluster<VmName>) -> bool {
        let is_standby = |vm: ObservedVm| matches!(vm, ObservedVm::Standby { .. });
        let has_standby = matches!(self.unit, FailoverUnit::Vm(_))
            && here.vms.values().any(|vm| is_standby(vm.state));
        let is_over =
            record.register.is_ended() && !here.is_kept && !has_standby && !here.has_leased_vm();
        if let (true, FailoverUnit::Cluster(_)) = (is_over, self.unit) {
            let paths = &self.agent.paths;
            self.unit.local_vms(paths).iter().for_each(|vm| paths.forget_cluster(vm));
        }
        is_over
    }

    async fn perform_action(
        &mut self,
        action: ReconcileAction<VmName>,
        mut sole: ClusterLock,
        record: &ClusterRecord,
        names: &BTreeMap<HostId, String>,
        here: &ObservedCluster<VmName>,
    ) {
        let (agent, unit, register) = (self.agent, self.unit, &record.register);
        match action {
            ReconcileAction::YieldLease => self.member.yield_lease(register.generation),
            ReconcileAction::Fence(vm) => {
                drop(sole);
                let why = self.describe_move(record, names);
                // A VM that was moved here in vain obeys the lease of a generation to come.
                let over = observed_lease(here, &vm).map_or(register.generation, Generation);
                end_vm(agent, &vm, over, &why).await;
            }
            ReconcileAction::Detach(vm) => self.run_work(&vm, "leave its cluster", detach_vm).await,
            ReconcileAction::ReleaseOutput(vms) => {
                for vm in &vms {
                    let resume = |them: &dyn LocalVms, vm: &VmName| them.resume_output(vm);
                    self.run_work(vm, "release its output", resume).await;
                }
            }
            ReconcileAction::DropCopies => match unit {
                FailoverUnit::Vm(vm) => {
                    // Another standby of this name may be about to start, or have just started.
                    if let Ok(_claim) = agent.claim_vm(vm) {
                        self.run_work(vm, "end as a standby", stop_if_ended).await;
                    }
                }
                FailoverUnit::Cluster(name) => {
                    if let Err(failure) = release::drop_copies(agent, &mut sole, name).await {
                        tracing::warn!("copies of {unit} can't be dropped: {failure}");
                    }
                }
            },
            ReconcileAction::Protect => {
                let named = register.primaries().into_iter().filter_map(|host| names.get(&host));
                let runs = named.filter_map(|it| HostName::new(it.clone()).ok());
                self.again.protect_by_next_host(agent, unit, &runs.collect::<BTreeSet<_>>());
            }
            _ => {}
        }
    }

    /// Why a VM of the unit has to end here.
    fn describe_move(&self, record: &ClusterRecord, names: &BTreeMap<HostId, String>) -> String {
        let generation = record.register.generation.0;
        match self.unit {
            FailoverUnit::Vm(_) => {
                let primary = record.register.primaries().first().copied();
                let host = primary.and_then(|host| names.get(&host)).map_or("?", String::as_str);
                format!("it runs at host {host} since its timeline {generation} began")
            }
            FailoverUnit::Cluster(name) => {
                format!("its cluster {name} continues elsewhere, in generation {generation}")
            }
        }
    }

    async fn run_work(
        &self,
        vm: &VmName,
        what: &str,
        work: fn(&dyn LocalVms, &VmName) -> Result<(), Failure>,
    ) {
        let name = vm.clone();
        if let Err(failure) = self.agent.run_blocking(move |vms| work(vms, &name)).await {
            tracing::warn!("{vm} should {what}, and does not: {failure}");
        }
    }
}

/// The generation of the lease that a VM of this host obeys.
fn observed_lease(here: &ObservedCluster<VmName>, vm: &VmName) -> Option<u32> {
    match here.vms.get(vm)?.state {
        ObservedVm::Runs { lease, .. } => lease,
        _ => None,
    }
}

fn stop_if_ended(vms: &dyn LocalVms, vm: &VmName) -> Result<(), Failure> {
    match vms.vm_status(vm)?.standby {
        Some(standby) if standby.ended.is_some() => vms.stop_standby(vm),
        _ => Ok(()),
    }
}

/// The cluster has ended: the VM continues by itself.
fn detach_vm(vms: &dyn LocalVms, vm: &VmName) -> Result<(), Failure> {
    vms.ask_supervisor(vm, &SupervisorRequest::ReleaseMember)?;
    vms.ask_supervisor(vm, &SupervisorRequest::Member(MemberRequest::Leave)).map(drop)
}
