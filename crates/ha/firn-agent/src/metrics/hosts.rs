//! Metrics of hosts, of their consensus, and of networks.

use firn_control::HostHealth;
use firn_control::api::{NetworkView, PeerView};
use prometheus_client::registry::Registry;

use super::{
    MetricSources, add_count, add_gauge, one_if, register_counters, register_gauges, set_gauge,
    with_label,
};

/// Adds the metrics of the other hosts. A host that is not lost may still be suspected: then both
/// `peer_up` and `peer_lost` are 0.
pub(super) fn add_peer_metrics(registry: &mut Registry, peers: &[PeerView]) {
    let up = register_gauges(registry, "peer_up", "1 if the host answers");
    let lost = register_gauges(registry, "peer_lost", "1 if the host counts as lost");
    let round_trip =
        register_gauges(registry, "peer_round_trip_seconds", "How long its newest answer took");
    for peer in peers {
        let label = || vec![("peer", peer.name.to_string())];
        set_gauge(&up, label(), one_if(peer.health == HostHealth::Alive));
        set_gauge(&lost, label(), one_if(peer.health == HostHealth::Lost));
        if let Some(ms) = peer.round_trip_ms {
            set_gauge(&round_trip, label(), ms / 1e3);
        }
    }
}

/// Adds whether this host is drained, whether the store of records answers it, the leader that it
/// knows, and the connections that it refused.
pub(super) fn add_host_metrics(registry: &mut Registry, sources: &MetricSources) {
    let drained = one_if(sources.drained);
    add_gauge(registry, "drained", "1 if this host accepts no standbys", drained);
    if let Some(health) = &sources.membership {
        let answers = one_if(health.trouble.is_none());
        add_gauge(registry, "membership_up", "1 if the servers of records answer", answers);
        let leader = register_gauges(registry, "leader", "1 for the host that leads");
        let leading = health.leader.iter().map(|host| vec![("host", host.clone())]);
        leading.for_each(|labels| set_gauge(&leader, labels, 1.0));
    }
    let counts = register_counters(registry, "refused", "Connections that were refused");
    for (reason, count) in &sources.refused {
        add_count(&counts, vec![("reason", reason.clone())], *count);
    }
}

/// Adds the connected ports, and the counts of frames, of each network and target. Frames *in* came
/// from the target, frames *out* were sent to it. A frame is dropped if the target's queue has no
/// room, or if it still waits there when the connection ends.
pub(super) fn add_network_metrics(registry: &mut Registry, networks: &[NetworkView]) {
    let ports = register_gauges(registry, "network_ports", "Ports that are connected to a network");
    let frames = register_counters(registry, "network_frames", "Frames of a network");
    let dropped = register_counters(registry, "network_dropped", "Frames that had no room");
    for network in networks {
        for target in &network.lanes {
            let labels = vec![("network", network.name.to_string()), ("to", target.to.clone())];
            set_gauge(&ports, labels.clone(), target.connected as f64);
            add_count(&dropped, labels.clone(), target.dropped);
            for (direction, count) in [("in", target.frames_in), ("out", target.frames_out)] {
                add_count(&frames, with_label(&labels, "direction", direction), count);
            }
        }
    }
}
