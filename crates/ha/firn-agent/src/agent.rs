//! The state that the parts of one agent share. [`crate::agent_process`] starts the parts.

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use firn_control::{AgentPaths, HostHealth, HostName};
use firn_supervisor::{Failure, FailureContext as _, FailureKind, VmName};
use tokio::sync::watch;

use crate::clusters::cluster_manager::ClusterManager;
use crate::config::AgentConfig;
use crate::detect::DetectorTiming;
use crate::identity::HostIdentity;
use crate::membership::MembershipService;
use crate::observations::Observations;
use crate::page::AgentPage;
use crate::peer_connection::PeerConnection;
use crate::peer_monitor::PeerMonitor;
use crate::rejections::RejectionCounts;
use crate::switch::switches::NetworkSwitches;
use crate::vms::LocalVms;

/// The state that the parts of an agent share.
pub struct Agent {
    /// Its configuration.
    pub config: AgentConfig,
    /// The address at which it listens for its peers, if it does.
    pub listen: Option<SocketAddr>,
    pub(crate) identity: HostIdentity,
    pub(crate) paths: AgentPaths,
    pub(crate) vms: Arc<dyn LocalVms>,
    pub(crate) peers: PeerMonitor,
    pub(crate) networks: NetworkSwitches,
    pub(crate) rejections: RejectionCounts,
    pub(crate) membership: MembershipService,
    pub(crate) clusters: ClusterManager,
    pub(crate) observations: Observations,
    pub(crate) page: AgentPage,
    /// VMs of this host whose epochs this agent carries to a peer.
    carried: Mutex<Vec<(VmName, HostName)>>,
    /// VMs that a task is about to protect, or to start a standby for.
    claimed: Mutex<BTreeSet<VmName>>,
}

impl Agent {
    pub(crate) fn new(
        config: AgentConfig,
        listen: Option<SocketAddr>,
        identity: HostIdentity,
        paths: AgentPaths,
        vms: Arc<dyn LocalVms>,
        times: DetectorTiming,
        membership: MembershipService,
    ) -> Self {
        let peers = PeerMonitor::new(times, config.peers.clone());
        let rejections = RejectionCounts::default();
        let (carried, claimed) = (Mutex::default(), Mutex::default());
        let networks = NetworkSwitches::default();
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
            clusters: ClusterManager::default(),
            observations: Observations::default(),
            page: AgentPage::default(),
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

    /// Connects to a peer.
    pub(crate) async fn open_peer(&self, peer: &HostName) -> Result<PeerConnection, Failure> {
        PeerConnection::open(&self.identity, peer, self.peer_address(peer)?).await
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
    pub(crate) fn record_relayed(&self, vm: &VmName, backup: &HostName) -> RelayedVm<'_> {
        let entry = (vm.clone(), backup.clone());
        self.lock_carried().push(entry.clone());
        RelayedVm { agent: self, entry }
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
pub(crate) struct RelayedVm<'a> {
    agent: &'a Agent,
    entry: (VmName, HostName),
}

impl Drop for RelayedVm<'_> {
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
