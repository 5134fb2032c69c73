//! The network between VMs: a learning Ethernet switch per network and host.
//!
//! ```text
//!     VM  VM  VM                                                          VM  VM
//!      |   |   |   .network/lan.sock: QEMU's stream framing                |   |
//!      v   v   v                                                           v   v
//!    +-----------+        firn-frames: a TLS connection of its own       +-----------+
//!    |  lan at a |=======================================================|  lan at b |
//!    +-----------+                                                       +-----------+
//!      |       \\=================== to each other host =============          |
//!      '--- uplink of a: passt's socket, or a tap                             '--- uplink of b
//! ```
//!
//! `firn-cluster` (`switch`) decides where a frame goes. The socket accepts VMs: the network cards
//! of `firn-net`, or QEMU's own `-netdev stream`. `firn-net` decides when a frame may leave a
//! protected VM: a frame that arrives here is forwarded at once.
//!
//! | module | task |
//! |---|---|
//! | `config` | the networks of a configuration |
//! | `network` | the ports of a network, and where a frame goes |
//! | `queue` | frames that wait for a port, and which are dropped |
//! | `counters` | counters of frames |
//! | `suspend_detector` | whether frames lay here while this agent did not run |
//! | `carry` | frames between a stream and a port |
//! | `vms`, `links`, `uplink` | the ports: VMs of this host, other hosts, the uplink |
//!
//! # Dropped frames
//!
//! A switch never waits: one receiver that is slow would block all senders. Each port has a queue
//! of 4 MiB (`queue`). A frame that has no room in it is dropped and counted, and so are the frames
//! that wait when the port ends. Ethernet behaves like that. No other frame is lost, and none is
//! delivered twice.
//!
//! The design is in `docs/design/014-switch.md`.

mod carry;
mod config;
mod counters;
mod links;
mod network;
mod queue;
mod suspend_detector;
mod uplink;
mod vms;

pub use config::{NetworkConfig, NetworkError, Uplink};
pub use counters::LinkTarget;

use std::collections::BTreeMap;
use std::sync::Arc;

use firn_control::AgentPaths;
use firn_control::api::NetworkView;
use firn_supervisor::{Failure, NetworkName};
use tokio::task::JoinSet;

use crate::agent::Agent;
use crate::config::AgentConfig;
use crate::sockets::{ListeningSocket, listen_at};

pub(crate) use config::{FileNetwork, NETWORKS_MAX};
pub(crate) use links::accept_link;
use network::NetworkSwitch;

/// The switches of this host.
#[derive(Debug, Default)]
pub(crate) struct NetworkSwitches(BTreeMap<NetworkName, Arc<NetworkSwitch>>);

impl NetworkSwitches {
    /// Opens a switch for each network of the configuration, and the sockets that VMs connect to.
    pub(crate) fn open(
        config: &AgentConfig,
        place: &AgentPaths,
    ) -> Result<(Self, Vec<ListeningSocket>), Failure> {
        let mut networks = BTreeMap::new();
        let mut sockets = Vec::new();
        for (name, settings) in &config.networks {
            let socket = place.network_socket(name)?;
            let network = NetworkSwitch::new(name.clone(), socket.clone(), config, settings);
            sockets.push(listen_at(socket)?);
            networks.insert(name.clone(), Arc::new(network));
        }
        Ok((Self(networks), sockets))
    }

    /// The networks as the agent reports them.
    pub(crate) fn network_views(&self) -> Vec<NetworkView> {
        self.0.values().map(|network| network.network_view()).collect()
    }

    fn find_network(&self, name: &str) -> Option<&Arc<NetworkSwitch>> {
        self.0.iter().find(|(it, _)| it.as_str() == name).map(|(_, network)| network)
    }
}

/// Serves the networks with the sockets that they were opened with. Never returns.
pub(crate) async fn serve_networks(agent: Arc<Agent>, sockets: Vec<ListeningSocket>) {
    let mut parts = JoinSet::new();
    parts.spawn(watch_clock(Arc::clone(&agent)));
    for (network, socket) in agent.networks.0.values().zip(sockets) {
        parts.spawn(vms::serve_vms(Arc::clone(network), socket));
        if let Some(uplink) = agent.config.networks[&network.name].uplink.clone() {
            parts.spawn(uplink::serve_uplink(Arc::clone(network), uplink));
        }
        for peer in agent.config.peers.keys().filter(|peer| **peer > agent.config.name) {
            parts.spawn(links::dial_peer(Arc::clone(&agent), Arc::clone(network), peer.clone()));
        }
    }
    // A task ends only by a panic, which is reported already.
    parts.join_next().await;
}

/// Reads the clock again and again, so that a suspend is detected. Never returns.
async fn watch_clock(agent: Arc<Agent>) {
    loop {
        agent.networks.0.values().for_each(|network| {
            network.suspend_detector.count_suspends();
        });
        tokio::time::sleep(suspend_detector::CLOCK_READ_INTERVAL).await;
    }
}
