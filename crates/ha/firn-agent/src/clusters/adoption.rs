//! The VMs of this host whose records an agent follows: it joins membership and, again and again,
//! starts a reconcile loop for each VM or cluster that has none.

use std::collections::BTreeSet;
use std::sync::{Arc, Weak};

use firn_cluster::HostId;
use firn_control::HostName;
use firn_membership::{AgentEvidence, FailoverTiming, MembershipStore, run_controllers};
use firn_supervisor::{ProtectionEnd, VmStatus};
use tokio::time::sleep;

use super::cluster_manager::{LocalNode, POLLS_PER_LEASE};
use super::failover_unit::FailoverUnit;
use super::reconciler::ensure_reconciler;
use crate::agent::Agent;

/// Reconciles the VMs of this host, if membership is configured. Never returns.
pub(crate) async fn run_failover(agent: Arc<Agent>) {
    let Some((members, timing)) = agent.membership.store_and_timing() else {
        return std::future::pending().await;
    };
    let host = join_until_numbered(&*members, agent.config.name.as_str(), timing).await;
    tracing::info!("this agent has joined membership as {host}");
    let _ =
        agent.clusters.local_node.set(LocalNode { members: Arc::clone(&members), timing, host });
    let name = agent.config.name.to_string();
    let evidence = Arc::new(PeerEvidence(Arc::downgrade(&agent)));
    tokio::spawn(async move { run_controllers(members, &name, timing, evidence).await });
    loop {
        let statuses = agent.run_blocking(|vms| vms.list_vms()).await.unwrap_or_default();
        let units: BTreeSet<FailoverUnit> =
            statuses.iter().filter_map(|it| unit_of(&agent, it)).collect();
        units.iter().for_each(|unit| drop(ensure_reconciler(&agent, unit)));
        sleep(timing.lease.ttl / POLLS_PER_LEASE).await;
    }
}

/// The evidence that this agent has about the agents of its peers.
struct PeerEvidence(Weak<Agent>);

impl AgentEvidence for PeerEvidence {
    fn has_ended(&self, host: &str) -> bool {
        let Some(agent) = self.0.upgrade() else { return false };
        HostName::new(host).is_ok_and(|name| agent.peers.has_agent_ended(&name))
    }
}

async fn join_until_numbered(
    members: &dyn MembershipStore,
    name: &str,
    timing: FailoverTiming,
) -> HostId {
    loop {
        match members.join_host(name).await {
            Ok(host) => return host,
            Err(trouble) => tracing::warn!("this agent can't join membership: {trouble}"),
        }
        sleep(timing.lease.ttl / POLLS_PER_LEASE).await;
    }
}

/// The cluster of a VM. A record of its own may cover a VM that is in no cluster, if it obeys a
/// lease, or is a standby of another host's VM.
fn unit_of(agent: &Agent, status: &VmStatus) -> Option<FailoverUnit> {
    if let Some(cluster) = agent.paths.cluster_of(&status.name) {
        return Some(FailoverUnit::Cluster(cluster));
    }
    let standby = status.standby.as_ref();
    if standby.is_some_and(|standby| standby.member) {
        return None;
    }
    let is_standby = standby.is_some() && agent.paths.primary_host(&status.name).is_some();
    let has_panicked = status.protection_end == Some(ProtectionEnd::Panicked);
    let is_leased = status.lease.is_some() && (status.state != "ended" || has_panicked);
    (is_leased || is_standby).then(|| FailoverUnit::Vm(status.name.clone()))
}
