//! Actions on the VMs of this host that a record requires: their supervisors carry them out.

use std::sync::{Arc, Weak};
use std::time::Duration;

use firn_cluster::Generation;
use firn_membership::{ClusterName, HostActions, MembershipError, MembershipFuture, StartRequest};
use firn_supervisor::{Failure, FailureKind, StandbyStatus, VmName};
use tokio::time::sleep;

use super::cluster_manager::{RETRY_INTERVAL, lock_mutex};
use super::failover_unit::FailoverUnit;
use super::membership_access::{local_node, record_name};
use super::run_vms;
use crate::agent::Agent;

/// Time between two tries to end a VM that runs elsewhere.
const END_RETRY_INTERVAL: Duration = Duration::from_millis(500);

/// The actions on the VMs of this host that fail over as one.
pub(super) struct UnitHostActions {
    agent: Weak<Agent>,
    unit: FailoverUnit,
}

impl UnitHostActions {
    pub(super) fn new(agent: &Arc<Agent>, unit: &FailoverUnit) -> Self {
        Self { agent: Arc::downgrade(agent), unit: unit.clone() }
    }

    fn upgrade_agent(&self) -> Result<Arc<Agent>, MembershipError> {
        let gone = || MembershipError::Refused("this agent ends".to_owned());
        self.agent.upgrade().ok_or_else(gone)
    }

    /// Ends the VMs that obey a lease of this generation or of an older one. If a cluster has ended
    /// without a failover in between, its VMs continue instead: the reconcile loop detaches them.
    async fn end_all_vms(&self, generation: Generation) -> Result<(), MembershipError> {
        let (agent, over) = (self.upgrade_agent()?, generation.0);
        let why = match &self.unit {
            FailoverUnit::Vm(_) => format!("it runs elsewhere: its generation {over} is over"),
            FailoverUnit::Cluster(name) => {
                let cluster = record_name(name)?;
                let known = local_node(&agent)?.members.read_record(&cluster).await?;
                let record = known.record.map(|record| record.register);
                if record.is_some_and(|it| it.is_ended() && it.generation == generation.next()) {
                    return Ok(());
                }
                format!("its cluster {name} runs elsewhere: its generation {over} is over")
            }
        };
        for vm in self.unit.local_vms(&agent.paths) {
            end_vm(&agent, &vm, generation, &why).await;
        }
        Ok(())
    }

    async fn run_all_vms(&self, generation: Generation) -> Result<(), MembershipError> {
        let agent = self.upgrade_agent()?;
        let run = match &self.unit {
            FailoverUnit::Vm(vm) => run_standby(&agent, vm, generation).await,
            FailoverUnit::Cluster(name) => run_vms::run_here(&agent, name, generation).await,
        };
        run.map_err(|failure| {
            tracing::error!("{} can't be run here: {failure}", self.unit);
            MembershipError::Refused(failure.to_string())
        })
    }
}

/// Runs the standby of a VM from its newest committed epoch.
async fn run_standby(
    agent: &Arc<Agent>,
    vm: &VmName,
    generation: Generation,
) -> Result<(), Failure> {
    let name = vm.clone();
    let run = agent.run_blocking(move |vms| match vms.vm_status(&name)? {
        // It was stopped before its host was lost: the reconcile loop ends this standby.
        status if status.standby.as_ref().is_some_and(StandbyStatus::is_over) => Ok(None),
        status if status.standby.is_some() => vms.fail_over_vm(&name, generation.0).map(Some),
        status if status.state == "ended" => {
            Err(Failure::new(FailureKind::Ended, "the VM has ended here"))
        }
        // It is the primary of the first generation.
        _ => Ok(None),
    });
    if let Some(facts) = run.await? {
        let from = describe_start(&facts);
        tracing::warn!("{vm} runs here now{from}: generation {} has begun", generation.0);
        lock_mutex(&agent.clusters.failover_facts).insert(vm.clone(), facts);
    }
    Ok(())
}

/// From where a standby has continued, as far as its supervisor reports that.
pub(super) fn describe_start(facts: &serde_json::Value) -> String {
    match (facts["epoch"].as_u64(), facts["took_ms"].as_f64()) {
        (Some(epoch), Some(ms)) => format!(", from epoch {epoch}, after {ms:.0} ms"),
        (Some(epoch), None) => format!(", from epoch {epoch}"),
        _ => String::new(),
    }
}

/// Ends a VM that obeys a lease of this generation or of an older one; returns when it has ended. A
/// VM that obeys none was released, and one that obeys a later one was protected again meanwhile.
pub(super) async fn end_vm(agent: &Arc<Agent>, vm: &VmName, over: Generation, why: &str) {
    let mut last_failure = None;
    loop {
        let (name, text) = (vm.clone(), why.to_owned());
        let ended = agent.run_blocking(move |vms| {
            let status = vms.vm_status(&name)?;
            let runs = status.state != "ended" && status.standby.is_none();
            match runs && status.lease.is_some_and(|lease| lease <= over.0) {
                true => vms.fence_vm(&name, text).map(|()| false),
                false => Ok(true),
            }
        });
        match ended.await {
            Ok(true) => return,
            Err(failure) if failure.kind == FailureKind::NoSuchVm => return,
            Ok(false) => tracing::warn!("{vm} is ended here: {why}"),
            Err(failure) => {
                let text = failure.to_string();
                if last_failure.as_ref() != Some(&text) {
                    tracing::error!("{vm} has to end here, and does not: {text}");
                }
                last_failure = Some(text);
            }
        }
        sleep(END_RETRY_INTERVAL).await;
    }
}

impl HostActions for UnitHostActions {
    fn stop_vms<'a>(
        &'a self,
        _: &'a ClusterName,
        generation: Generation,
    ) -> MembershipFuture<'a, ()> {
        Box::pin(async move {
            // A failed try is repeated until it succeeds: no other action is done before.
            while let Err(trouble) = self.end_all_vms(generation).await {
                tracing::debug!("{} has to end here, and does not yet: {trouble}", self.unit);
                self.upgrade_agent()?;
                sleep(RETRY_INTERVAL).await;
            }
            Ok(())
        })
    }

    fn run_vms<'a>(
        &'a self,
        _: &'a ClusterName,
        start: &'a StartRequest,
    ) -> MembershipFuture<'a, ()> {
        Box::pin(self.run_all_vms(start.generation))
    }

    fn limit_sending(&self, _: &ClusterName, until: Option<(Generation, Duration)>) {
        if let Some(agent) = self.agent.upgrade() {
            grant_lease(&agent, &self.unit, until.map(|(generation, until)| (generation.0, until)));
        }
    }
}

/// Grants a lease to the VMs on this host, or takes it from them.
pub(super) fn grant_lease(agent: &Agent, unit: &FailoverUnit, until: Option<(u32, Duration)>) {
    unit.local_vms(&agent.paths).iter().for_each(|vm| agent.vms.grant_lease(vm, until));
}
