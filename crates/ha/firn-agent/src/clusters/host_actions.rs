//! Actions on the VMs of a cluster at this host that the record requires.

use std::sync::{Arc, Weak};
use std::time::Duration;

use firn_cluster::Generation;
use firn_membership::{ClusterName, HostActions, MembershipError, MembershipFuture, StartRequest};
use firn_supervisor::VmName;
use tokio::time::sleep;

use super::cluster_record::{RETRY_INTERVAL, cluster_name, local_node};
use super::run_vms;
use crate::agent::Agent;
use crate::failover::host_actions::end_vm;

/// The actions on the VMs of this host that belong to one cluster.
pub(super) struct ClusterHostActions {
    agent: Weak<Agent>,
    name: VmName,
}

impl ClusterHostActions {
    pub(super) fn new(agent: &Arc<Agent>, name: &VmName) -> Self {
        Self { agent: Arc::downgrade(agent), name: name.clone() }
    }

    fn upgrade_agent(&self) -> Result<Arc<Agent>, MembershipError> {
        let gone = || MembershipError::Refused("this agent ends".to_owned());
        self.agent.upgrade().ok_or_else(gone)
    }

    /// Ends the VMs. If the cluster has ended without a failover in between, its VMs continue
    /// instead: the reconcile loop detaches them.
    async fn end_all_vms(&self, generation: Generation) -> Result<(), MembershipError> {
        let agent = self.upgrade_agent()?;
        let known = local_node(&agent)?.members.read_record(&cluster_name(&self.name)?).await?;
        let register = known.record.map(|record| record.register);
        if register.is_some_and(|it| it.is_ended() && it.generation == generation.next()) {
            return Ok(());
        }
        let (name, over) = (&self.name, generation.0);
        let why = format!("its cluster {name} runs elsewhere: its generation {over} is over");
        for vm in agent.paths.members_of(name) {
            end_vm(&agent, &vm, &why).await;
        }
        Ok(())
    }

    async fn run_all_vms(&self, start: &StartRequest) -> Result<(), MembershipError> {
        let agent = self.upgrade_agent()?;
        run_vms::run_here(&agent, &self.name, start.generation).await.map_err(|failure| {
            tracing::error!("cluster {} can't be run here: {failure}", self.name);
            MembershipError::Refused(failure.to_string())
        })
    }
}

impl HostActions for ClusterHostActions {
    fn stop_vms<'a>(
        &'a self,
        _: &'a ClusterName,
        generation: Generation,
    ) -> MembershipFuture<'a, ()> {
        Box::pin(async move {
            // A failed try is repeated until it succeeds: no other action is done before.
            while let Err(trouble) = self.end_all_vms(generation).await {
                tracing::debug!(
                    "cluster {} has to end here, and does not yet: {trouble}",
                    self.name
                );
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
        Box::pin(self.run_all_vms(start))
    }

    fn limit_sending(&self, _: &ClusterName, until: Option<(Generation, Duration)>) {
        if let Some(agent) = self.agent.upgrade() {
            grant_lease(&agent, &self.name, until.map(|(generation, until)| (generation.0, until)));
        }
    }
}

/// Grants the lease of a cluster to its VMs on this host, or takes it from them.
pub(super) fn grant_lease(agent: &Agent, name: &VmName, until: Option<(u32, Duration)>) {
    agent.paths.members_of(name).iter().for_each(|vm| agent.vms.grant_lease(vm, until));
}
