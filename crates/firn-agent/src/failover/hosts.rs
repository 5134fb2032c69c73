//! Actions on a VM of this host that a record requires: its supervisor carries them out.

use std::sync::{Arc, Weak};
use std::time::Duration;

use firn_cluster::Generation;
use firn_membership::{Cluster, Hosts, Later, Start, Trouble};
use firn_supervisor::{Failure, FailureKind, Readiness, VmName};
use tokio::time::sleep;

use super::lock;
use crate::agent::Agent;

/// Time between two tries to end a VM that runs elsewhere.
const RETRY: Duration = Duration::from_millis(500);

/// The actions on one VM of this host.
pub struct Local {
    pub agent: Weak<Agent>,
    pub vm: VmName,
}

impl Local {
    fn agent(&self) -> Result<Arc<Agent>, Trouble> {
        let gone = || Trouble::Refused("this agent ends".to_owned());
        self.agent.upgrade().ok_or_else(gone)
    }

    async fn run_from(&self, generation: Generation) -> Result<(), Trouble> {
        let (agent, vm) = (self.agent()?, self.vm.clone());
        let run = agent.blocking(move |vms| match vms.status(&vm)? {
            // It was stopped before its host was lost: the reconcile loop ends this standby.
            status if status.standby.as_ref().is_some_and(Readiness::is_over) => Ok(None),
            status if status.standby.is_some() => vms.fail_over(&vm, generation.0).map(Some),
            status if status.state == "ended" => {
                Err(Failure::new(FailureKind::Ended, "the VM has ended here"))
            }
            // It is the primary of the first generation.
            _ => Ok(None),
        });
        let run = run.await.map_err(|failure| {
            tracing::error!("{} can't be run here: {failure}", self.vm);
            Trouble::Refused(failure.to_string())
        })?;
        if let Some(facts) = run {
            tracing::warn!("{} runs here now, generation {}: {facts}", self.vm, generation.0);
            lock(&self.agent()?.failover.ran).insert(self.vm.clone(), facts);
        }
        Ok(())
    }
}

/// Ends a VM that obeys a lease; returns when it has ended. A VM that obeys none was released.
pub async fn end(agent: &Arc<Agent>, vm: &VmName, why: &str) {
    let mut told = None;
    loop {
        let (name, text) = (vm.clone(), why.to_owned());
        let ended = agent.blocking(move |vms| {
            let status = vms.status(&name)?;
            let runs = status.state != "ended" && status.standby.is_none();
            match runs && status.lease.is_some() {
                true => vms.fence(&name, text).map(|()| false),
                false => Ok(true),
            }
        });
        match ended.await {
            Ok(true) => return,
            Err(failure) if failure.kind == FailureKind::NoSuchVm => return,
            Ok(false) => tracing::warn!("{vm} is ended here: {why}"),
            Err(failure) => {
                let text = failure.to_string();
                if told.as_ref() != Some(&text) {
                    tracing::error!("{vm} has to end here, and does not: {text}");
                }
                told = Some(text);
            }
        }
        sleep(RETRY).await;
    }
}

impl Hosts for Local {
    fn stop<'a>(&'a self, _: &'a Cluster, generation: Generation) -> Later<'a, ()> {
        Box::pin(async move {
            let why = format!("it runs elsewhere: its generation {} is over", generation.0);
            end(&self.agent()?, &self.vm, &why).await;
            Ok(())
        })
    }

    fn run<'a>(&'a self, _: &'a Cluster, start: &'a Start) -> Later<'a, ()> {
        Box::pin(self.run_from(start.generation))
    }

    fn may_send(&self, _: &Cluster, until: Option<(Generation, Duration)>) {
        if let Some(agent) = self.agent.upgrade() {
            agent.vms.grant(&self.vm, until.map(|(generation, until)| (generation.0, until)));
        }
    }
}
