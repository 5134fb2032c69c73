//! One agent: the state that its parts share, and the start of all parts.
//!
//! ```text
//!   firn(1) -- agent.sock --> command_server   peer_server <-- TLS --- peers  metrics <-- loopback
//!                                 |                |
//!                                 v                v
//!                  protect: a tunnel to     standbys: a tunnel     heartbeat <-> detect (pure)
//!                  a peer's standby         from a peer's VM       switch: frames of VMs
//!                                 \                /
//!                                  supervisors of the VMs (vms)
//! ```

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use firn_control::{AgentPaths, HostHealth, HostName};
use firn_supervisor::{Failure, FailureContext as _, FailureKind, VmName};
use tokio::net::TcpListener;
use tokio::sync::watch;
use tokio::task::JoinSet;

use crate::clusters::ClusterManager;
use crate::config::AgentConfig;
use crate::detect::DetectorTiming;
use crate::failover::{self, FailoverManager};
use crate::heartbeat::PeerMonitor;
use crate::identity::HostIdentity;
use crate::membership::MembershipService;
use crate::rejections::RejectionCounts;
use crate::sockets::{AgentLock, ListeningSocket, listen_at, lock_directory};
use crate::switch::{self, NetworkSwitches};
use crate::vms::LocalVms;
use crate::{command_server, heartbeat, peer_server};

/// The state that the parts of an agent share.
pub struct Agent {
    /// Its configuration.
    pub config: AgentConfig,
    /// The address at which it listens for its peers.
    pub listen: SocketAddr,
    pub(crate) identity: HostIdentity,
    pub(crate) paths: AgentPaths,
    pub(crate) vms: Arc<dyn LocalVms>,
    pub(crate) peers: PeerMonitor,
    pub(crate) networks: NetworkSwitches,
    pub(crate) rejections: RejectionCounts,
    pub(crate) membership: MembershipService,
    pub(crate) failover: FailoverManager,
    pub(crate) clusters: ClusterManager,
    /// VMs of this host whose epochs this agent carries to a peer.
    carried: Mutex<Vec<(VmName, HostName)>>,
    /// VMs that a task is about to protect, or to start a standby for.
    claimed: Mutex<BTreeSet<VmName>>,
}

/// An agent that has all its resources, and does not serve yet.
pub struct PreparedAgent {
    agent: Arc<Agent>,
    peers: TcpListener,
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
        place: AgentPaths,
        vms: Arc<dyn LocalVms>,
        times: DetectorTiming,
    ) -> Result<Self, Failure> {
        let identity = HostIdentity::load(&config)
            .while_doing_as(FailureKind::Usage, "proving who this is")?;
        let sole = lock_directory(&place, config.peers.keys())?;
        let peers = bind_listener(config.listen).await?;
        let at = peers.local_addr().while_doing("listening for peers")?;
        let metrics = match config.metrics {
            Some(address) => Some(bind_listener(address).await?),
            None => None,
        };
        let local = listen_at(place.control_socket())?;
        let (switches, networks) = NetworkSwitches::open(&config, &place)?;
        let membership = MembershipService::begin_membership(&config, &identity).await?;
        let mut agent = Agent::new(config, at, identity, place, vms, times, membership);
        agent.networks = switches;
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
        parts.spawn(peer_server::accept_peers(Arc::clone(&agent), self.peers));
        let ListeningSocket { listener, file: _file } = self.local;
        parts.spawn(command_server::serve_commands(Arc::clone(&agent), listener));
        if let Some(listener) = self.metrics {
            parts.spawn(command_server::serve_metrics(Arc::clone(&agent), listener));
        }
        parts.spawn(switch::serve_networks(Arc::clone(&agent), self.networks));
        parts.spawn(failover::run_failover(Arc::clone(&agent)));
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

impl Agent {
    fn new(
        config: AgentConfig,
        listen: SocketAddr,
        identity: HostIdentity,
        paths: AgentPaths,
        vms: Arc<dyn LocalVms>,
        times: DetectorTiming,
        membership: MembershipService,
    ) -> Self {
        let peers = PeerMonitor::new(times, config.peers.clone());
        let rejections = RejectionCounts::default();
        let (carried, claimed) = (Mutex::default(), Mutex::default());
        let (networks, failover) = (NetworkSwitches::default(), FailoverManager::default());
        Self {
            config,
            listen,
            identity,
            paths,
            vms,
            peers,
            networks,
            rejections,
            membership,
            failover,
            clusters: ClusterManager::default(),
            carried,
            claimed,
        }
    }

    /// A peer's address.
    pub(crate) fn peer_address(&self, peer: &HostName) -> Result<&str, Failure> {
        self.config.peers.get(peer).map(String::as_str).ok_or_else(|| {
            let text = format!("host {peer} is no peer of {}", self.config.name);
            let known: Vec<&str> = self.config.peers.keys().map(HostName::as_str).collect();
            Failure::new(FailureKind::Usage, text).with_hint(match known.is_empty() {
                true => "it has none: name them in its configuration".to_owned(),
                false => format!("its peers are {}", known.join(", ")),
            })
        })
    }

    /// The health of a peer, and its changes.
    pub(crate) fn peer_health(
        &self,
        peer: &HostName,
    ) -> Result<watch::Receiver<HostHealth>, Failure> {
        self.peer_address(peer)?;
        self.peers.health(peer).ok_or_else(|| {
            Failure::new(FailureKind::Other, format!("host {peer} is not being watched"))
        })
    }

    /// Runs blocking work on a thread of its own.
    pub(crate) async fn run_blocking<T: Send + 'static>(
        &self,
        work: impl FnOnce(&dyn LocalVms) -> Result<T, Failure> + Send + 'static,
    ) -> Result<T, Failure> {
        let vms = Arc::clone(&self.vms);
        tokio::task::spawn_blocking(move || work(&*vms)).await.while_doing("asking the VMs")?
    }

    /// The peer that a VM's epochs are carried to.
    pub(crate) fn backup_of(&self, vm: &VmName) -> Option<HostName> {
        let carried = self.lock_carried();
        carried.iter().rfind(|(it, _)| it == vm).map(|(_, host)| host.clone())
    }

    /// Notes that a VM's epochs are carried to a peer, until the value is dropped.
    pub(crate) fn note_carried(&self, vm: &VmName, backup: &HostName) -> CarriedVm<'_> {
        let entry = (vm.clone(), backup.clone());
        self.lock_carried().push(entry.clone());
        CarriedVm { agent: self, entry }
    }

    fn lock_carried(&self) -> MutexGuard<'_, Vec<(VmName, HostName)>> {
        self.carried.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether a task has claimed that VM.
    pub(crate) fn is_claimed(&self, vm: &VmName) -> bool {
        self.claimed.lock().unwrap_or_else(PoisonError::into_inner).contains(vm)
    }

    /// Claims a VM: only the holder of the claim may protect it, or start a standby for it.
    pub(crate) fn claim_vm(self: &Arc<Self>, vm: &VmName) -> Result<VmClaim, Failure> {
        let mut claimed = self.claimed.lock().unwrap_or_else(PoisonError::into_inner);
        match claimed.insert(vm.clone()) {
            true => Ok(VmClaim { agent: Arc::clone(self), vm: vm.clone() }),
            false => {
                let text =
                    format!("another task is about to protect {vm}, or to start a standby for it");
                Err(Failure::new(FailureKind::Busy, text).with_hint("try again in a moment"))
            }
        }
    }
}

/// A VM whose epochs are carried to a peer, until this is dropped.
pub(crate) struct CarriedVm<'a> {
    agent: &'a Agent,
    entry: (VmName, HostName),
}

impl Drop for CarriedVm<'_> {
    fn drop(&mut self) {
        let mut carried = self.agent.lock_carried();
        if let Some(at) = carried.iter().position(|entry| *entry == self.entry) {
            carried.remove(at);
        }
    }
}

/// The exclusive right to protect a VM or to start a standby for it, until this is dropped.
pub(crate) struct VmClaim {
    agent: Arc<Agent>,
    vm: VmName,
}

impl Drop for VmClaim {
    fn drop(&mut self) {
        let claimed = &self.agent.claimed;
        claimed.lock().unwrap_or_else(PoisonError::into_inner).remove(&self.vm);
    }
}
