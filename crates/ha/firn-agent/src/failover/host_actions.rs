//! Actions on a VM of this host that a record requires: its supervisor carries them out.

use std::sync::{Arc, Weak};
use std::time::Duration;

use firn_cluster::Generation;
use firn_membership::{ClusterName, HostActions, MembershipError, MembershipFuture, StartRequest};
use firn_supervisor::{Failure, FailureKind, StandbyStatus, VmName};
use tokio::time::sleep;

use super::manager::lock_mutex;
use crate::agent::Agent;

/// Time between two tries to end a VM that runs elsewhere.
const END_RETRY_INTERVAL: Duration = Duration::from_millis(500);

/// The actions on one VM of this host.
pub struct VmHostActions {
    pub agent: Weak<Agent>,
    pub vm: VmName,
}

impl VmHostActions {
    fn upgrade_agent(&self) -> Result<Arc<Agent>, MembershipError> {
        let gone = || MembershipError::Refused("this agent ends".to_owned());
        self.agent.upgrade().ok_or_else(gone)
    }

    async fn run_generation(&self, generation: Generation) -> Result<(), MembershipError> {
        let (agent, vm) = (self.upgrade_agent()?, self.vm.clone());
        let run = agent.run_blocking(move |vms| match vms.vm_status(&vm)? {
            // It was stopped before its host was lost: the reconcile loop ends this standby.
            status if status.standby.as_ref().is_some_and(StandbyStatus::is_over) => Ok(None),
            status if status.standby.is_some() => vms.fail_over_vm(&vm, generation.0).map(Some),
            status if status.state == "ended" => {
                Err(Failure::new(FailureKind::Ended, "the VM has ended here"))
            }
            // It is the primary of the first generation.
            _ => Ok(None),
        });
        let run = run.await.map_err(|failure| {
            tracing::error!("{} can't be run here: {failure}", self.vm);
            MembershipError::Refused(failure.to_string())
        })?;
        if let Some(facts) = run {
            tracing::warn!("{} runs here now, generation {}: {facts}", self.vm, generation.0);
            lock_mutex(&self.upgrade_agent()?.failover.failover_facts)
                .insert(self.vm.clone(), facts);
        }
        Ok(())
    }
}

/// Ends a VM that obeys a lease; returns when it has ended. A VM that obeys none was released.
pub async fn end_vm(agent: &Arc<Agent>, vm: &VmName, why: &str) {
    let mut last_failure = None;
    loop {
        let (name, text) = (vm.clone(), why.to_owned());
        let ended = agent.run_blocking(move |vms| {
            let status = vms.vm_status(&name)?;
            let runs = status.state != "ended" && status.standby.is_none();
            match runs && status.lease.is_some() {
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

impl HostActions for VmHostActions {
    fn stop_vms<'a>(
        &'a self,
        _: &'a ClusterName,
        generation: Generation,
    ) -> MembershipFuture<'a, ()> {
        Box::pin(async move {
            let why = format!("it runs elsewhere: its generation {} is over", generation.0);
            end_vm(&self.upgrade_agent()?, &self.vm, &why).await;
            Ok(())
        })
    }

    fn run_vms<'a>(
        &'a self,
        _: &'a ClusterName,
        start: &'a StartRequest,
    ) -> MembershipFuture<'a, ()> {
        Box::pin(self.run_generation(start.generation))
    }

    fn limit_sending(&self, _: &ClusterName, until: Option<(Generation, Duration)>) {
        if let Some(agent) = self.agent.upgrade() {
            agent.vms.grant_lease(&self.vm, until.map(|(generation, until)| (generation.0, until)));
        }
    }
}
