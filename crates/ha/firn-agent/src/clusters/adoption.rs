//! The VMs of this host whose records an agent follows: it joins membership and, again and again,
//! starts a reconcile loop for each VM that has none.

use std::collections::BTreeSet;
use std::sync::Arc;

use firn_cluster::HostId;
use firn_cluster::failover::LeaseTerms;
use firn_membership::{MembershipStore, run_controllers};
use firn_supervisor::{PrimaryEnd, VmStatus};
use tokio::time::sleep;

use super::manager::{LocalNode, POLLS_PER_LEASE, lock_mutex};
use super::reconciler::ensure_reconciler;
use crate::agent::Agent;
use crate::clusters;

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
            .for_each(|it| drop(clusters::reconciler::ensure_reconciler(&agent, it)));
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
