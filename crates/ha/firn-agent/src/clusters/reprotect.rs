//! Reprotection of a cluster that has no copies any more: hosts that run none of its VMs are asked
//! in turn, until one protects it.

use std::collections::BTreeSet;
use std::sync::Arc;

use firn_control::api::{KEEP, ProtectionOptions};
use firn_control::{HostHealth, HostName};
use firn_supervisor::{Failure, FailureContext as _, FailureKind, VmName};
use tokio::task::JoinHandle;
use tokio::time::{Instant, timeout};

use super::cluster_store::ClusterStore;
use super::remote_vm::PROTECT_WAIT;
use crate::agent::Agent;
use crate::peer_connection::PeerConnection;

/// Milliseconds from one cut to the next where none are configured: the default of
/// `firn cluster protect`.
const INTERVAL_MS: u64 = 100;

/// The state of the search for a host.
#[derive(Default)]
pub(super) struct Reprotection {
    asked: Option<JoinHandle<()>>,
    tried: Option<HostName>,
    until: Option<Instant>,
}

impl Reprotection {
    /// Asks the next host that is alive, if no request is open. A host that runs a VM of the
    /// cluster can't be its backup.
    pub(super) fn ask_next_host(
        &mut self,
        agent: &Arc<Agent>,
        name: &VmName,
        runs: &BTreeSet<HostName>,
    ) {
        let is_busy = self.asked.as_ref().is_some_and(|it| !it.is_finished())
            || self.until.is_some_and(|until| Instant::now() < until);
        let alive = |peer: &HostName| {
            agent.peers.health(peer).is_some_and(|it| *it.borrow() == HostHealth::Alive)
        };
        let peers = agent.config.peers.keys().filter(|it| !runs.contains(*it) && alive(it));
        let peers: Vec<&HostName> = peers.collect();
        let after = |host: &&&HostName| self.tried.as_ref().is_none_or(|tried| **host > tried);
        let Some(host) = peers.iter().find(after).or(peers.first()).filter(|_| !is_busy) else {
            return;
        };
        let host = (*host).clone();
        self.tried = Some(host.clone());
        self.until =
            agent.membership.store_and_terms().map(|(_, terms)| Instant::now() + terms.ttl);
        let (agent, name) = (Arc::clone(agent), name.clone());
        self.asked = Some(tokio::spawn(async move {
            match ask_host(&agent, &name, &host).await {
                Ok(()) => tracing::info!("cluster {name} is protected again, by host {host}"),
                Err(failure) => tracing::warn!("host {host} does not protect {name}: {failure}"),
            }
        }));
    }
}

async fn ask_host(agent: &Arc<Agent>, name: &VmName, host: &HostName) -> Result<(), Failure> {
    let kept = ClusterStore::from_paths(&agent.paths).load_cluster(name)?;
    let interval_ms = kept.map_or(INTERVAL_MS, |kept| kept.interval_ms);
    let how = ProtectionOptions { interval_ms, predicts: true, cluster: None };
    let how = serde_json::to_vec(&how).while_doing("writing a request")?;
    let mut link = PeerConnection::open(&agent.identity, host, agent.peer_address(host)?).await?;
    let reply = timeout(PROTECT_WAIT, link.post_bytes(&format!("{KEEP}{name}"), how)).await;
    let late = |_| Failure::new(FailureKind::Other, format!("host {host} has not answered"));
    reply.map_err(late)?.map(drop)
}
