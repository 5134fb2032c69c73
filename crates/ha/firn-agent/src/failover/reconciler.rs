//! The reconcile loop of one VM: its cluster member, and the actions that are planned for it.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use firn_cluster::HostId;
use firn_control::api::ProtectVmRequest;
use firn_control::{HostHealth, HostName};
use firn_membership::{ClusterMember, ClusterName, ClusterRecord, MembershipError, RecordView};
use firn_supervisor::{FailureKind, VmName};
use tokio::task::JoinHandle;
use tokio::time::sleep;

use super::host_actions;
use super::manager::{LocalNode, POLLS_PER_LEASE, ReconciledVm, lock_mutex};
use super::reconcile::{ObservedVm, VmAction, is_sure, plan_action};
use super::record::{change_record, newest_host};
use crate::agent::Agent;

/// Epoch interval after a failover, unless this host has a request for the VM: the default of
/// `firn protect`.
const INTERVAL_MS: u64 = 100;

/// Starts the reconcile loop of a VM, unless it runs already.
pub(super) fn ensure_reconciler(agent: &Arc<Agent>, vm: &VmName) -> Option<Arc<ClusterMember>> {
    let LocalNode { members, terms, host } = agent.failover.local_node.get()?.clone();
    let cluster = ClusterName::new(vm.as_str()).ok()?;
    let mut tended = lock_mutex(&agent.failover.reconcilers);
    tended.retain(|_, it| !it.task.is_finished());
    if let Some(it) = tended.get(vm) {
        return Some(Arc::clone(&it.post));
    }
    let local = host_actions::VmHostActions { agent: Arc::downgrade(agent), vm: vm.clone() };
    let member = Arc::new(ClusterMember::new(members, Arc::new(local), cluster, host, terms));
    let task = tokio::spawn(follow_record(Arc::clone(agent), vm.clone(), Arc::clone(&member)));
    tended
        .insert(vm.clone(), ReconciledVm { post: Arc::clone(&member), task: task.abort_handle() });
    Some(member)
}

/// Follows the record of a VM until the VM could not be run here, or has no record any more.
async fn follow_record(agent: Arc<Agent>, vm: VmName, member: Arc<ClusterMember>) {
    tokio::select! {
        done = member.follow_record() => {
            if let Err(trouble) = done {
                tracing::error!("{vm} can't run here, so this host does nothing more for it: {trouble}");
                lock_mutex(&agent.failover.given_up).insert(vm.clone());
            }
        }
        () = run_reconciler(&agent, &vm, &member) => {}
    }
    // A later VM of the same name must not use this lease.
    agent.vms.grant_lease(&vm, None);
}

async fn run_reconciler(agent: &Arc<Agent>, vm: &VmName, member: &ClusterMember) {
    let Some(node) = agent.failover.local_node.get() else { return };
    let mut tender = VmReconciler {
        agent,
        vm,
        post: member,
        ours: node,
        protecting: None,
        tried: None,
        before: None,
    };
    loop {
        match tender.tick().await {
            Ok(true) => {}
            Ok(false) => return,
            Err(trouble) => tracing::debug!("no action is planned for {vm}: {trouble}"),
        }
        sleep(node.terms.ttl / POLLS_PER_LEASE).await;
    }
}

struct VmReconciler<'a> {
    agent: &'a Arc<Agent>,
    vm: &'a VmName,
    post: &'a ClusterMember,
    ours: &'a LocalNode,
    protecting: Option<JoinHandle<()>>,
    /// The host that was tried last.
    tried: Option<HostName>,
    /// The action that the previous run planned.
    before: Option<VmAction>,
}

impl VmReconciler<'_> {
    /// Observes once, and performs the planned action. Returns whether the loop continues.
    async fn tick(&mut self) -> Result<bool, MembershipError> {
        let is_busy = self.protecting.as_ref().is_some_and(|it| !it.is_finished());
        if is_busy || self.agent.is_claimed(self.vm) {
            return Ok(true);
        }
        if self.agent.paths.cluster_of(self.vm).is_some() {
            // It has joined a cluster of several VMs, whose lease it obeys.
            return Ok(false);
        }
        let cluster = ClusterName::new(self.vm.as_str())?;
        let RecordView { known, names, .. } = self.ours.members.read_view(&cluster).await?;
        let Some(here) = self.observe_vm(&names).await else { return Ok(true) };
        // A command may have claimed the VM meanwhile.
        let Some(record) = known.record.filter(|_| !self.agent.is_claimed(self.vm)) else {
            return Ok(true);
        };
        let name = self.agent.config.name.as_str();
        let mine = names.iter().filter(|(host, it)| **host < self.ours.host && *it == name);
        let mine: BTreeSet<HostId> = mine.map(|(host, _)| *host).collect();
        let action = plan_action(self.ours.host, &mine, &record, here);
        let before = self.before.replace(action);
        if !is_sure(action, before) {
            return Ok(true);
        }
        if action != VmAction::Nothing
            && !(action == VmAction::RelinquishLease && before == Some(action))
        {
            tracing::info!("{}: {action:?}, for {here:?}", self.vm);
        }
        let register = &record.register;
        let next = match action {
            VmAction::RecordBackup(backup) => register.with_backup(backup),
            VmAction::Adopt(before) => register.with_adopting_host(before, self.ours.host),
            VmAction::EndRecord => register.with_end(),
            other => return Ok(self.perform_action(other, &record, &names).await),
        };
        let vms = if next.is_ended() { BTreeMap::new() } else { record.vms };
        let to = ClusterRecord { register: next, vms };
        let is_done = change_record(&*self.ours.members, &cluster, known.revision, &to).await?;
        let is_over = is_done && action == VmAction::EndRecord;
        if is_over {
            lock_mutex(&self.agent.failover.troubles).remove(self.vm);
        }
        Ok(!is_over)
    }

    async fn perform_action(
        &mut self,
        action: VmAction,
        record: &ClusterRecord,
        names: &BTreeMap<HostId, String>,
    ) -> bool {
        match action {
            VmAction::YieldLease => {
                tracing::warn!("{} has died here: its backup has to run it", self.vm);
                return false;
            }
            VmAction::Fence => {
                let primary = record.register.primaries().first().copied();
                let host = primary.and_then(|host| names.get(&host)).map_or("?", String::as_str);
                let generation = record.register.generation.0;
                let why = format!("it runs at host {host} since its timeline {generation} began");
                host_actions::end_vm(self.agent, self.vm, &why).await;
            }
            VmAction::RelinquishLease => self.post.yield_lease(record.register.generation),
            VmAction::ReleaseOutput => {
                self.run_work("release its output", |vms, vm| vms.resume_output(vm)).await
            }
            VmAction::EndStandby => {
                // Another standby of this name may be about to start, or have just started.
                if let Ok(_claim) = self.agent.claim_vm(self.vm) {
                    self.run_work("end as a standby", stop_if_ended).await;
                }
            }
            VmAction::Protect => self.start_protection(),
            _ => {}
        }
        true
    }

    async fn run_work(
        &self,
        what: &str,
        work: fn(&dyn crate::LocalVms, &VmName) -> Result<(), firn_supervisor::Failure>,
    ) {
        let vm = self.vm.clone();
        if let Err(failure) = self.agent.run_blocking(move |vms| work(vms, &vm)).await {
            tracing::warn!("{} should {what}, and does not: {failure}", self.vm);
        }
    }

    /// Observes the VM on this host; `None` if its state cannot be read now.
    async fn observe_vm(&self, names: &BTreeMap<HostId, String>) -> Option<ObservedVm> {
        let (agent, vm) = (self.agent, self.vm.clone());
        let backup = agent.backup_of(&vm).and_then(|host| newest_host(names, &host));
        match agent.run_blocking(move |vms| vms.vm_status(&vm)).await {
            Ok(status) => Some(ObservedVm::from_status(&status, backup)),
            Err(failure) if failure.kind == FailureKind::NoSuchVm => Some(ObservedVm::Nothing),
            Err(_) => None,
        }
    }

    /// Starts to protect the VM by the next host that is alive.
    fn start_protection(&mut self) {
        let alive = |peer: &HostName| {
            self.agent.peers.health(peer).is_some_and(|it| *it.borrow() == HostHealth::Alive)
        };
        let peers: Vec<&HostName> = self.agent.config.peers.keys().filter(|it| alive(it)).collect();
        let after = |host: &&&HostName| self.tried.as_ref().is_none_or(|tried| **host > tried);
        let Some(host) = peers.iter().find(after).or(peers.first()) else {
            return note_trouble(self.agent, self.vm, "no other host answers".to_owned());
        };
        self.tried = Some((*host).clone());
        let wanted = lock_mutex(&self.agent.failover.protect_requests).get(self.vm).cloned();
        let wanted = wanted.unwrap_or_else(|| ProtectVmRequest {
            vm: self.vm.clone(),
            backup: (*host).clone(),
            interval_ms: INTERVAL_MS,
            predicts: true,
        });
        let wanted = ProtectVmRequest { backup: (*host).clone(), ..wanted };
        self.protecting = Some(tokio::spawn(protect_again(Arc::clone(self.agent), wanted)));
    }
}

fn stop_if_ended(vms: &dyn crate::LocalVms, vm: &VmName) -> Result<(), firn_supervisor::Failure> {
    match vms.vm_status(vm)?.standby {
        Some(standby) if standby.ended.is_some() => vms.stop_standby(vm),
        _ => Ok(()),
    }
}

async fn protect_again(agent: Arc<Agent>, wanted: ProtectVmRequest) {
    let (vm, backup) = (wanted.vm.clone(), wanted.backup.clone());
    // Boxed: protecting acquires the lease, and so may start the reconcile loop that contains this.
    let done = Box::pin(crate::protect::protect_vm(&agent, wanted, |_| ())).await;
    match done {
        Ok(_) => tracing::info!("{vm} is protected again, by host {backup}"),
        Err(failure) => note_trouble(&agent, &vm, format!("host {backup} can't: {failure}")),
    }
}

fn note_trouble(agent: &Agent, vm: &VmName, why: String) {
    let text = format!("{vm} is not protected: {why}");
    let before = lock_mutex(&agent.failover.troubles).insert(vm.clone(), text.clone());
    if before.as_ref() != Some(&text) {
        tracing::warn!("{text}");
    }
}
