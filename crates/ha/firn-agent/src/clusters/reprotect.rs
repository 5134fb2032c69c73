//! Reprotection of VMs that have no copies any more: other hosts are tried one after another, until
//! one has copies.

use std::collections::BTreeSet;
use std::sync::Arc;

use firn_control::api::{KEEP_PROTECTED_PATH, ProtectVmRequest, ProtectionOptions};
use firn_control::{HostHealth, HostName};
use firn_supervisor::{Failure, FailureContext as _, FailureKind, VmName};
use tokio::task::JoinHandle;
use tokio::time::{Instant, timeout};

use super::cluster_manager::lock_mutex;
use super::cluster_store::ClusterStore;
use super::failover_unit::FailoverUnit;
use super::remote_vm::PROTECT_WAIT;
use crate::agent::Agent;
use crate::peer_connection::PeerConnection;

/// Milliseconds from one cut to the next, unless this host has a request for the VM or the cluster:
/// the default of `firn protect` and `firn cluster protect`.
const INTERVAL_MS: u64 = 100;

/// The state of the search for a host.
#[derive(Default)]
pub(super) struct Reprotection {
    task: Option<JoinHandle<()>>,
    tried: Option<HostName>,
    until: Option<Instant>,
}

impl Reprotection {
    /// Tries the next host that is alive, if no try is open. A host that runs a VM of the unit
    /// can't be its backup.
    pub(super) fn protect_by_next_host(
        &mut self,
        agent: &Arc<Agent>,
        unit: &FailoverUnit,
        runs: &BTreeSet<HostName>,
    ) {
        let is_busy = self.task.as_ref().is_some_and(|it| !it.is_finished())
            || self.until.is_some_and(|until| Instant::now() < until);
        if is_busy {
            return;
        }
        let alive = |peer: &HostName| {
            agent.peers.health(peer).is_some_and(|it| *it.borrow() == HostHealth::Alive)
        };
        let peers = agent.config.peers.keys().filter(|it| !runs.contains(*it) && alive(it));
        let peers: Vec<&HostName> = peers.collect();
        let after = |host: &&&HostName| self.tried.as_ref().is_none_or(|tried| **host > tried);
        let Some(host) = peers.iter().find(after).or(peers.first()) else {
            return record_trouble(agent, unit, "no other host answers".to_owned());
        };
        let host = (*host).clone();
        self.tried = Some(host.clone());
        self.until =
            agent.clusters.local_node().map(|node| Instant::now() + node.timing.patience());
        let (agent, unit) = (Arc::clone(agent), unit.clone());
        self.task = Some(tokio::spawn(async move {
            match protect_by_host(&agent, &unit, &host).await {
                Ok(()) => {
                    lock_mutex(&agent.clusters.troubles).remove(&unit);
                    tracing::info!("{unit} is protected again, by host {host}");
                }
                Err(failure) => {
                    record_trouble(&agent, &unit, format!("host {host} can't: {failure}"))
                }
            }
        }));
    }
}

/// The coordinator protects: this host a VM alone, the other host a cluster.
async fn protect_by_host(
    agent: &Arc<Agent>,
    unit: &FailoverUnit,
    host: &HostName,
) -> Result<(), Failure> {
    match unit {
        FailoverUnit::Vm(vm) => {
            let wanted = lock_mutex(&agent.clusters.protect_requests).get(vm).cloned();
            let (interval_ms, predicts) =
                wanted.map_or((INTERVAL_MS, true), |it| (it.interval_ms, it.predicts));
            let (vm, backup) = (vm.clone(), host.clone());
            let wanted = ProtectVmRequest { vm, backup, interval_ms, predicts };
            // Boxed: protecting acquires the lease, and so may start the reconcile loop that
            // contains this.
            Box::pin(crate::protect::protect_vm(agent, wanted, |_| ())).await.map(drop)
        }
        FailoverUnit::Cluster(name) => ask_host(agent, name, host).await,
    }
}

async fn ask_host(agent: &Arc<Agent>, name: &VmName, host: &HostName) -> Result<(), Failure> {
    let kept = ClusterStore::from_paths(&agent.paths).load_cluster(name)?;
    let interval_ms = kept.map_or(INTERVAL_MS, |kept| kept.interval_ms);
    let how = ProtectionOptions { interval_ms, predicts: true, cluster: None };
    let how = serde_json::to_vec(&how).while_doing("writing a request")?;
    let mut link = PeerConnection::open(&agent.identity, host, agent.peer_address(host)?).await?;
    let reply =
        timeout(PROTECT_WAIT, link.post_bytes(&format!("{KEEP_PROTECTED_PATH}{name}"), how)).await;
    let late = |_| Failure::new(FailureKind::Other, format!("host {host} has not answered"));
    reply.map_err(late)?.map(drop)
}

fn record_trouble(agent: &Agent, unit: &FailoverUnit, why: String) {
    let text = format!("{unit} is not protected: {why}");
    let before = lock_mutex(&agent.clusters.troubles).insert(unit.clone(), text.clone());
    if before.as_ref() != Some(&text) {
        tracing::warn!("{text}");
    }
}
