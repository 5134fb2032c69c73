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
//! Where a frame goes is decided in `firn-cluster` (`switch`). What connects to the socket is a VM: a gate of `firn-net`, or QEMU's
//! own `-netdev stream`. When a frame may leave a protected VM is the gate's affair; what has come here is on its way.
//!
//! | module | what it decides or does |
//! |---|---|
//! | `config` | what the configuration says of networks |
//! | `network` | who is connected, and where a frame goes |
//! | `queue` | frames that wait for a port, and what is dropped |
//! | `lane` | what is counted |
//! | `awake` | whether frames lay here while this agent stood still |
//! | `carry` | frames between a stream and a port |
//! | `vms`, `links`, `world` | who is connected: VMs of this host, other hosts, the uplink |
//!
//! # What is dropped
//!
//! A switch never waits: whoever sends to a port that takes nothing would hold up all others. Each port has a queue of 4 MiB
//! (`queue`); what has no room in it is dropped and counted, and so is what waits when the port ends. Ethernet is like
//! that. Nothing else is lost and nothing comes twice.
//!
//! The design is in `docs/design/014-switch.md`.

mod awake;
mod carry;
mod config;
mod lane;
mod links;
mod network;
mod queue;
mod vms;
mod world;

pub use config::{NetworkConfig, NetworkError, Uplink};
pub use lane::To;

use std::collections::BTreeMap;
use std::sync::Arc;

use firn_supervisor::{Failure, NetworkName};
use tokio::task::JoinSet;

use crate::agent::Agent;
use crate::api::NetworkView;
use crate::config::Config;
use crate::place::{Place, Socket};

pub(crate) use config::{FileNetwork, NETWORKS_MAX};
pub(crate) use links::accept;
use network::Network;

/// The switches of this host.
#[derive(Debug, Default)]
pub(crate) struct Networks(BTreeMap<NetworkName, Arc<Network>>);

impl Networks {
    /// One for each network of the configuration, and the sockets that VMs connect to.
    pub(crate) fn open(config: &Config, place: &Place) -> Result<(Self, Vec<Socket>), Failure> {
        let mut networks = BTreeMap::new();
        let mut sockets = Vec::new();
        for (name, settings) in &config.networks {
            let socket = place.network(name)?;
            let network = Network::new(name.clone(), socket.clone(), config, settings);
            sockets.push(place.listen(socket)?);
            networks.insert(name.clone(), Arc::new(network));
        }
        Ok((Self(networks), sockets))
    }

    /// What there is to say about each.
    pub(crate) fn views(&self) -> Vec<NetworkView> {
        self.0.values().map(|network| network.view()).collect()
    }

    fn get(&self, name: &str) -> Option<&Arc<Network>> {
        self.0.iter().find(|(it, _)| it.as_str() == name).map(|(_, network)| network)
    }
}

/// Serves for ever; `sockets` are those that the networks were opened with.
pub(crate) async fn serve(agent: Arc<Agent>, sockets: Vec<Socket>) {
    let mut parts = JoinSet::new();
    parts.spawn(look(Arc::clone(&agent)));
    for (network, socket) in agent.networks.0.values().zip(sockets) {
        parts.spawn(vms::serve(Arc::clone(network), socket));
        if let Some(uplink) = agent.config.networks[&network.name].uplink.clone() {
            parts.spawn(world::serve(Arc::clone(network), uplink));
        }
        for peer in agent.config.peers.keys().filter(|peer| **peer > agent.config.name) {
            parts.spawn(links::dial(Arc::clone(&agent), Arc::clone(network), peer.clone()));
        }
    }
    // None of them ends but by a panic, which is told already.
    parts.join_next().await;
}

/// Looks at the clock, for ever.
async fn look(agent: Arc<Agent>) {
    loop {
        agent.networks.0.values().for_each(|network| {
            network.awake.sleeps();
        });
        tokio::time::sleep(awake::LOOK_EVERY).await;
    }
}
