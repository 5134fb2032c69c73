//! The process of an agent: it locks and binds what it needs, then starts all parts.
//!
//! ```text
//!   firn(1) -- agent.sock --> command_server   peer_server <-- TLS --- peers  metrics, page <-- loopback
//!                                 |                |
//!                                 v                v
//!                  protect: a tunnel to     standbys: a tunnel     heartbeat <-> detect (pure)
//!                  a peer's standby         from a peer's VM       switch: frames of VMs
//!                                 \                /
//!                                  supervisors of the VMs (vms)
//! ```

use std::net::SocketAddr;
use std::sync::Arc;

use firn_control::AgentPaths;
use firn_supervisor::{Failure, FailureContext as _, FailureKind};
use tokio::net::TcpListener;
use tokio::task::JoinSet;

use crate::agent::Agent;
use crate::clusters::adoption;
use crate::config::AgentConfig;
use crate::detect::DetectorTiming;
use crate::identity::HostIdentity;
use crate::membership::MembershipService;
use crate::page::AgentPage;
use crate::sockets::{AgentLock, ListeningSocket, listen_at, lock_directory};
use crate::switch::serve;
use crate::switch::switches::NetworkSwitches;
use crate::vms::LocalVms;
use crate::{command_server, heartbeat, peer_server, watch};

/// An agent that has all its resources, and does not serve yet.
pub struct PreparedAgent {
    agent: Arc<Agent>,
    peers: Option<TcpListener>,
    local: ListeningSocket,
    networks: Vec<ListeningSocket>,
    metrics: Option<TcpListener>,
    _lock: AgentLock,
}

impl PreparedAgent {
    /// Locks a runtime directory, and binds all sockets.
    ///
    /// # Errors
    /// If a resource is not available.
    pub async fn new(
        config: AgentConfig,
        paths: AgentPaths,
        vms: Arc<dyn LocalVms>,
        times: DetectorTiming,
    ) -> Result<Self, Failure> {
        let identity = HostIdentity::load(&config)
            .while_doing_as(FailureKind::Usage, "proving who this is")?;
        let sole = lock_directory(&paths, config.peers.keys())?;
        let peers = match &config.entrance {
            Some(entrance) => Some(bind_listener(entrance.listen).await?),
            None => None,
        };
        let at = peers.as_ref().map(TcpListener::local_addr).transpose();
        let at = at.while_doing("listening for peers")?;
        let metrics = match config.metrics {
            Some(address) => Some(bind_listener(address).await?),
            None => None,
        };
        let local = listen_at(paths.control_socket())?;
        let (switches, networks) = NetworkSwitches::open(&config, &paths)?;
        let membership = MembershipService::begin_membership(&config, &identity).await?;
        let mut agent = Agent::new(config, at, identity, paths, vms, times, membership);
        agent.networks = switches;
        if agent.config.page_actions {
            agent.page = AgentPage::with_actions()?;
        }
        let agent = Arc::new(agent);
        Ok(Self { agent, peers, local, networks, metrics, _lock: sole })
    }

    /// The agent.
    pub fn agent(&self) -> Arc<Agent> {
        Arc::clone(&self.agent)
    }

    /// Serves, and never returns. Streams that it carries end with the runtime.
    pub async fn serve_forever(self) {
        let agent = self.agent;
        let mut parts = JoinSet::new();
        if let Some(listener) = self.peers {
            parts.spawn(peer_server::accept_peers(Arc::clone(&agent), listener));
        }
        let ListeningSocket { listener, file: _file } = self.local;
        parts.spawn(command_server::serve_commands(Arc::clone(&agent), listener));
        if let Some(listener) = self.metrics {
            parts.spawn(command_server::serve_metrics(Arc::clone(&agent), listener));
        }
        parts.spawn(serve::serve_networks(Arc::clone(&agent), self.networks));
        parts.spawn(adoption::run_failover(Arc::clone(&agent)));
        parts.spawn(watch::watch_forever(Arc::clone(&agent)));
        parts.spawn(heartbeat::run_heartbeats(agent));
        // A task ends only by a panic, which is reported already.
        parts.join_next().await;
    }
}

async fn bind_listener(address: SocketAddr) -> Result<TcpListener, Failure> {
    TcpListener::bind(address)
        .await
        .while_doing_as(FailureKind::Host, format!("listening at {address}"))
}
