//! The tasks of all networks of this host.

use std::sync::Arc;

use tokio::task::JoinSet;

use super::{links, suspend_detector, uplink, vms};
use crate::agent::Agent;
use crate::sockets::ListeningSocket;

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
