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
    /// Opens a switch for each network of the configuration, and the sockets that VMs connect to.
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

    /// The networks as the agent reports them.
    pub(crate) fn views(&self) -> Vec<NetworkView> {
        self.0.values().map(|network| network.view()).collect()
    }

    fn get(&self, name: &str) -> Option<&Arc<Network>> {
        self.0.iter().find(|(it, _)| it.as_str() == name).map(|(_, network)| network)
    }
}

/// Serves the networks with the sockets that they were opened with. Never returns.
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
    // A task ends only by a panic, which is reported already.
    parts.join_next().await;
}

/// Reads the clock again and again, so that a suspend is detected. Never returns.
async fn look(agent: Arc<Agent>) {
    loop {
        agent.networks.0.values().for_each(|network| {
            network.awake.sleeps();
        });
        tokio::time::sleep(awake::LOOK_EVERY).await;
    }
}
