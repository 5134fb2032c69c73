//! Actions on the VMs of a cluster at this host that the record requires.

use std::sync::{Arc, Weak};
use std::time::Duration;

use firn_cluster::Generation;
use firn_membership::{Cluster, Hosts, Later, Start, Trouble};
use firn_supervisor::VmName;
use tokio::time::sleep;

use super::agreed::{RETRY, cluster, ours};
use super::failover;
use super::tend::grant;
use crate::agent::Agent;
use crate::failover::end;

/// The actions on the VMs of this host that belong to one cluster.
pub(super) struct Local {
    agent: Weak<Agent>,
    name: VmName,
}

impl Local {
    pub(super) fn new(agent: &Arc<Agent>, name: &VmName) -> Self {
        Self { agent: Arc::downgrade(agent), name: name.clone() }
    }

    fn agent(&self) -> Result<Arc<Agent>, Trouble> {
        let gone = || Trouble::Refused("this agent ends".to_owned());
        self.agent.upgrade().ok_or_else(gone)
    }

    /// Ends the VMs. If the cluster has ended without a failover in between, its VMs continue
    /// instead: the reconcile loop detaches them.
    async fn stop_all(&self, generation: Generation) -> Result<(), Trouble> {
        let agent = self.agent()?;
        let known = ours(&agent)?.members.read(&cluster(&self.name)?).await?;
        let register = known.record.map(|record| record.register);
        if register.is_some_and(|it| it.is_ended() && it.generation == generation.next()) {
            return Ok(());
        }
        let (name, over) = (&self.name, generation.0);
        let why = format!("its cluster {name} runs elsewhere: its generation {over} is over");
        for vm in agent.place.members(name) {
            end(&agent, &vm, &why).await;
        }
        Ok(())
    }

    async fn run_all(&self, start: &Start) -> Result<(), Trouble> {
        let agent = self.agent()?;
        failover::run_here(&agent, &self.name, start.generation).await.map_err(|failure| {
            tracing::error!("cluster {} can't be run here: {failure}", self.name);
            Trouble::Refused(failure.to_string())
        })
    }
}

impl Hosts for Local {
    fn stop<'a>(&'a self, _: &'a Cluster, generation: Generation) -> Later<'a, ()> {
        Box::pin(async move {
            // A failed try is repeated until it succeeds: no other action is done before.
            while let Err(trouble) = self.stop_all(generation).await {
                tracing::debug!("cluster {} has to end here, and does not yet: {trouble}", self.name);
                self.agent()?;
                sleep(RETRY).await;
            }
            Ok(())
        })
    }

    fn run<'a>(&'a self, _: &'a Cluster, start: &'a Start) -> Later<'a, ()> {
        Box::pin(self.run_all(start))
    }

    fn may_send(&self, _: &Cluster, until: Option<(Generation, Duration)>) {
        if let Some(agent) = self.agent.upgrade() {
            grant(&agent, &self.name, until.map(|(generation, until)| (generation.0, until)));
        }
    }
}
