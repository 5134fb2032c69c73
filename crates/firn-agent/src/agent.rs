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

use firn_supervisor::{Context as _, Failure, FailureKind, VmName};
use tokio::net::TcpListener;
use tokio::sync::watch;
use tokio::task::JoinSet;

use crate::config::Config;
use crate::detect::{Health, Times};
use crate::failover::{self, Failover};
use crate::heartbeat::Peers;
use crate::host::HostName;
use crate::identity::Identity;
use crate::membership::Membership;
use crate::place::{Place, Socket, Sole};
use crate::refused::Refused;
use crate::switch::{self, Networks};
use crate::together::Together;
use crate::vms::Vms;
use crate::{door, heartbeat, local};

/// The state that the parts of an agent share.
pub struct Agent {
    /// Its configuration.
    pub config: Config,
    /// The address at which it listens for its peers.
    pub listen: SocketAddr,
    pub(crate) identity: Identity,
    pub(crate) place: Place,
    pub(crate) vms: Arc<dyn Vms>,
    pub(crate) peers: Peers,
    pub(crate) networks: Networks,
    pub(crate) refused: Refused,
    pub(crate) membership: Membership,
    pub(crate) failover: Failover,
    pub(crate) together: Together,
    /// VMs of this host whose epochs this agent carries to a peer.
    carried: Mutex<Vec<(VmName, HostName)>>,
    /// VMs that a task is about to protect, or to start a standby for.
    claimed: Mutex<BTreeSet<VmName>>,
}

/// An agent that has all its resources, and does not serve yet.
pub struct Ready {
    agent: Arc<Agent>,
    peers: TcpListener,
    local: Socket,
    networks: Vec<Socket>,
    metrics: Option<TcpListener>,
    _sole: Sole,
}

impl Ready {
    /// Locks a runtime directory, and binds all sockets.
    ///
    /// # Errors
    /// If a resource is not available.
    pub async fn new(
        config: Config,
        place: Place,
        vms: Arc<dyn Vms>,
        times: Times,
    ) -> Result<Self, Failure> {
        let identity =
            Identity::load(&config).doing_or(FailureKind::Usage, "proving who this is")?;
        let sole = place.take(config.peers.keys())?;
        let peers = listen(config.listen).await?;
        let at = peers.local_addr().doing("listening for peers")?;
        let metrics = match config.metrics {
            Some(address) => Some(listen(address).await?),
            None => None,
        };
        let local = place.listen(place.control())?;
        let (switches, networks) = Networks::open(&config, &place)?;
        let membership = Membership::begin(&config, &identity).await?;
        let mut agent = Agent::new(config, at, identity, place, vms, times, membership);
        agent.networks = switches;
        let agent = Arc::new(agent);
        Ok(Self { agent, peers, local, networks, metrics, _sole: sole })
    }

    /// The agent.
    pub fn agent(&self) -> Arc<Agent> {
        Arc::clone(&self.agent)
    }

    /// Serves, and never returns. Streams that it carries end with the runtime.
    pub async fn serve(self) {
        let agent = self.agent;
        let mut parts = JoinSet::new();
        parts.spawn(door::open(Arc::clone(&agent), self.peers));
        let Socket { listener, file: _file } = self.local;
        parts.spawn(local::serve(Arc::clone(&agent), listener));
        if let Some(listener) = self.metrics {
            parts.spawn(local::serve_metrics(Arc::clone(&agent), listener));
        }
        parts.spawn(switch::serve(Arc::clone(&agent), self.networks));
        parts.spawn(failover::run(Arc::clone(&agent)));
        parts.spawn(heartbeat::run(agent));
        // A task ends only by a panic, which is reported already.
        parts.join_next().await;
    }
}

async fn listen(address: SocketAddr) -> Result<TcpListener, Failure> {
    TcpListener::bind(address).await.doing_or(FailureKind::Host, format!("listening at {address}"))
}

impl Agent {
    fn new(
        config: Config,
        listen: SocketAddr,
        identity: Identity,
        place: Place,
        vms: Arc<dyn Vms>,
        times: Times,
        membership: Membership,
    ) -> Self {
        let peers = Peers::new(times, config.peers.clone());
        let refused = Refused::default();
        let (carried, claimed) = (Mutex::default(), Mutex::default());
        let (networks, failover) = (Networks::default(), Failover::default());
        Self {
            config,
            listen,
            identity,
            place,
            vms,
            peers,
            networks,
            refused,
            membership,
            failover,
            together: Together::default(),
            carried,
            claimed,
        }
    }

    /// A peer's address.
    pub(crate) fn address(&self, peer: &HostName) -> Result<&str, Failure> {
        self.config.peers.get(peer).map(String::as_str).ok_or_else(|| {
            let text = format!("host {peer} is no peer of {}", self.config.name);
            let known: Vec<&str> = self.config.peers.keys().map(HostName::as_str).collect();
            Failure::new(FailureKind::Usage, text).hint(match known.is_empty() {
                true => "it has none: name them in its configuration".to_owned(),
                false => format!("its peers are {}", known.join(", ")),
            })
        })
    }

    /// The health of a peer, and its changes.
    pub(crate) fn health(&self, peer: &HostName) -> Result<watch::Receiver<Health>, Failure> {
        self.address(peer)?;
        self.peers.health(peer).ok_or_else(|| {
            Failure::new(FailureKind::Other, format!("host {peer} is not being watched"))
        })
    }

    /// Runs blocking work on a thread of its own.
    pub(crate) async fn blocking<T: Send + 'static>(
        &self,
        work: impl FnOnce(&dyn Vms) -> Result<T, Failure> + Send + 'static,
    ) -> Result<T, Failure> {
        let vms = Arc::clone(&self.vms);
        tokio::task::spawn_blocking(move || work(&*vms)).await.doing("asking the VMs")?
    }

    /// The peer that a VM's epochs are carried to.
    pub(crate) fn backup_of(&self, vm: &VmName) -> Option<HostName> {
        let carried = self.carried();
        carried.iter().rfind(|(it, _)| it == vm).map(|(_, host)| host.clone())
    }

    /// Notes that a VM's epochs are carried to a peer, until the value is dropped.
    pub(crate) fn note_carried(&self, vm: &VmName, backup: &HostName) -> Carried<'_> {
        let entry = (vm.clone(), backup.clone());
        self.carried().push(entry.clone());
        Carried { agent: self, entry }
    }

    fn carried(&self) -> MutexGuard<'_, Vec<(VmName, HostName)>> {
        self.carried.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether a task has claimed that VM.
    pub(crate) fn is_claimed(&self, vm: &VmName) -> bool {
        self.claimed.lock().unwrap_or_else(PoisonError::into_inner).contains(vm)
    }

    /// Claims a VM: only the holder of the claim may protect it, or start a standby for it.
    pub(crate) fn claim(self: &Arc<Self>, vm: &VmName) -> Result<Claim, Failure> {
        let mut claimed = self.claimed.lock().unwrap_or_else(PoisonError::into_inner);
        match claimed.insert(vm.clone()) {
            true => Ok(Claim { agent: Arc::clone(self), vm: vm.clone() }),
            false => {
                let text = format!("another task is about to protect {vm}, or to start a standby for it");
                Err(Failure::new(FailureKind::Busy, text).hint("try again in a moment"))
            }
        }
    }
}

/// A VM whose epochs are carried to a peer, until this is dropped.
pub(crate) struct Carried<'a> {
    agent: &'a Agent,
    entry: (VmName, HostName),
}

impl Drop for Carried<'_> {
    fn drop(&mut self) {
        let mut carried = self.agent.carried();
        if let Some(at) = carried.iter().position(|entry| *entry == self.entry) {
            carried.remove(at);
        }
    }
}

/// The exclusive right to protect a VM or to start a standby for it, until this is dropped.
pub(crate) struct Claim {
    agent: Arc<Agent>,
    vm: VmName,
}

impl Drop for Claim {
    fn drop(&mut self) {
        let claimed = &self.agent.claimed;
        claimed.lock().unwrap_or_else(PoisonError::into_inner).remove(&self.vm);
    }
}
