//! Metrics for Prometheus, made from the state at the time of the request. Pure.
//!
//! A network counts its frames for each target: all VMs of this host together, each other host, and
//! the uplink. The label `to` names the target.
//!
//! | metric | labels | unit |
//! |---|---|---|
//! | `firn_epoch`, `firn_epoch_committed` | vm | epochs since protection began |
//! | `firn_epoch_downtime_seconds` | vm, quantile 0.5 or 0.95 | seconds, of the newest thousand epochs |
//! | `firn_sent_bytes_total` | vm | bytes since protection began |
//! | `firn_standby_committed` | vm | epochs |
//! | `firn_peer_up`, `firn_peer_lost` | peer | 1 or 0 |
//! | `firn_peer_round_trip_seconds` | peer | seconds, of the newest answer |
//! | `firn_network_ports` | network, to | connections now; `to` is `VMs`, `host NAME` or `uplink` |
//! | `firn_network_frames_total` | network, to, direction in or out | frames since the agent began |
//! | `firn_network_dropped_total` | network, to | frames since the agent began |
//! | `firn_refused_total` | reason | connections since the agent began |

use std::fmt;
use std::sync::atomic::AtomicU64;

use firn_control::HostHealth;
use firn_control::api::{NetworkView, PeerView, VmView};
use prometheus_client::encoding::text::encode;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;

/// The content type of the text that [`render_metrics`] returns.
pub const CONTENT_TYPE: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// The names and values of the labels of one sample.
type MetricLabels = Vec<(&'static str, String)>;
/// All samples of one gauge: a value for each set of labels.
type GaugeFamily = Family<MetricLabels, Gauge<f64, AtomicU64>>;
/// All samples of one counter.
type CounterFamily = Family<MetricLabels, Counter>;

/// Renders the metrics as OpenMetrics text. `refused` has the count of refused connections for each
/// reason.
///
/// # Errors
/// None in practice: it is written to memory.
pub fn render_metrics<'a>(
    vms: &[VmView],
    peers: &[PeerView],
    networks: &[NetworkView],
    refused: impl Iterator<Item = (&'a String, &'a u64)>,
) -> Result<String, fmt::Error> {
    let mut registry = Registry::with_prefix("firn");
    add_vm_metrics(&mut registry, vms);
    add_peer_metrics(&mut registry, peers);
    add_network_metrics(&mut registry, networks);
    let counts = CounterFamily::default();
    registry.register("refused", "Connections that were refused", counts.clone());
    for (reason, count) in refused {
        counts.get_or_create(&vec![("reason", reason.clone())]).inc_by(*count);
    }
    let mut text = String::new();
    encode(&mut text, &registry)?;
    Ok(text)
}

/// Registers a gauge. The caller then sets its value for each set of labels.
fn register_gauges(registry: &mut Registry, name: &str, help: &str) -> GaugeFamily {
    let numbers = GaugeFamily::default();
    registry.register(name, help, numbers.clone());
    numbers
}

/// Sets the value of the sample that has these labels.
fn set_gauge(numbers: &GaugeFamily, labels: MetricLabels, value: f64) {
    numbers.get_or_create(&labels).set(value);
}

/// Adds the metrics of protected VMs and of standbys. Other VMs have none.
fn add_vm_metrics(registry: &mut Registry, vms: &[VmView]) {
    let epoch = register_gauges(registry, "epoch", "The newest epoch that was cut");
    let committed =
        register_gauges(registry, "epoch_committed", "The newest that a failover would run");
    let downtime = register_gauges(
        registry,
        "epoch_downtime_seconds",
        "How long the VM was paused for an epoch",
    );
    let standby = register_gauges(
        registry,
        "standby_committed",
        "The newest epoch that this standby would run",
    );
    let sent = CounterFamily::default();
    registry.register("sent_bytes", "Bytes sent for all epochs", sent.clone());
    for vm in vms {
        let label = || vec![("vm", vm.name.to_string())];
        if let Some(newest) = vm.committed {
            set_gauge(&standby, label(), newest as f64);
        }
        let Some(protection) = &vm.protection else { continue };
        set_gauge(&epoch, label(), protection.epoch as f64);
        set_gauge(&committed, label(), protection.committed as f64);
        let quantiles = [("0.5", protection.downtime_ms.p50), ("0.95", protection.downtime_ms.p95)];
        for (quantile, ms) in quantiles {
            let labels = [label(), vec![("quantile", quantile.to_owned())]].concat();
            set_gauge(&downtime, labels, ms / 1e3);
        }
        sent.get_or_create(&label()).inc_by(protection.sent_bytes);
    }
}

/// Adds the metrics of the other hosts. A host that is not lost may still be suspected: then both
/// `peer_up` and `peer_lost` are 0.
fn add_peer_metrics(registry: &mut Registry, peers: &[PeerView]) {
    let up = register_gauges(registry, "peer_up", "1 if the host answers");
    let lost = register_gauges(registry, "peer_lost", "1 if the host counts as lost");
    let round_trip =
        register_gauges(registry, "peer_round_trip_seconds", "How long its newest answer took");
    let one_if = |is_so: bool| f64::from(u8::from(is_so));
    for peer in peers {
        let label = || vec![("peer", peer.name.to_string())];
        set_gauge(&up, label(), one_if(peer.health == HostHealth::Alive));
        set_gauge(&lost, label(), one_if(peer.health == HostHealth::Lost));
        if let Some(ms) = peer.round_trip_ms {
            set_gauge(&round_trip, label(), ms / 1e3);
        }
    }
}

/// Adds the connected ports, and the counts of frames, of each network and target. Frames *in* came
/// from the target, frames *out* were sent to it. A frame is dropped if the target's queue has no
/// room, or if it still waits there when the connection ends.
fn add_network_metrics(registry: &mut Registry, networks: &[NetworkView]) {
    let ports = register_gauges(registry, "network_ports", "Ports that are connected to a network");
    let (frames, dropped) = (CounterFamily::default(), CounterFamily::default());
    registry.register("network_frames", "Frames of a network", frames.clone());
    registry.register("network_dropped", "Frames that had no room", dropped.clone());
    for network in networks {
        for target in &network.lanes {
            let labels = vec![("network", network.name.to_string()), ("to", target.to.clone())];
            set_gauge(&ports, labels.clone(), target.connected as f64);
            dropped.get_or_create(&labels).inc_by(target.dropped);
            for (direction, count) in [("in", target.frames_in), ("out", target.frames_out)] {
                let labels = [&labels[..], &[("direction", direction.to_owned())]].concat();
                frames.get_or_create(&labels).inc_by(count);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use serde_json::json;

    use super::*;

    #[test]
    fn each_number_has_its_line() {
        let protection = json!({
            "to": "x", "interval_ms": 100, "epoch": 12, "complete": 11, "committed": 10,
            "downtime_ms": { "p50": 2.5, "p95": 8.0 }, "copied_pages": { "p50": 0.0, "p95": 0.0 },
            "sent_pages": { "p50": 0.0, "p95": 0.0 }, "sent_bytes": 4096, "predicted": 0, "faulted": 0,
            "unchanged": 0,
        });
        let vms = json!([
            { "host": "a", "name": "web", "state": "protected", "protection": protection },
            { "host": "a", "name": "db", "state": "standby", "committed": 5 },
        ]);
        let peers = json!([
            { "name": "b", "address": "b:1", "health": "alive", "since_s": 1.0, "round_trip_ms": 0.25 },
            { "name": "c", "address": "c:1", "health": "lost", "since_s": 1.0 },
        ]);
        let (vms, peers): (Vec<VmView>, Vec<PeerView>) =
            (serde_json::from_value(vms).unwrap(), serde_json::from_value(peers).unwrap());
        let refused = BTreeMap::from([("time".to_owned(), 3)]);
        let lanes = json!([{ "name": "lan", "socket": "/s", "addresses": 2, "lanes": [
            { "to": "host b", "connected": 1, "frames_in": 7, "frames_out": 8, "dropped": 9 },
        ] }]);
        let networks: Vec<NetworkView> = serde_json::from_value(lanes).unwrap();
        let text = render_metrics(&vms, &peers, &networks, refused.iter()).unwrap();
        let lines = [
            "firn_epoch{vm=\"web\"} 12.0",
            "firn_epoch_committed{vm=\"web\"} 10.0",
            "firn_epoch_downtime_seconds{vm=\"web\",quantile=\"0.5\"} 0.0025",
            "firn_epoch_downtime_seconds{vm=\"web\",quantile=\"0.95\"} 0.008",
            "firn_sent_bytes_total{vm=\"web\"} 4096",
            "firn_standby_committed{vm=\"db\"} 5.0",
            "firn_peer_up{peer=\"b\"} 1.0",
            "firn_peer_lost{peer=\"c\"} 1.0",
            "firn_peer_round_trip_seconds{peer=\"b\"} 0.00025",
            "firn_network_ports{network=\"lan\",to=\"host b\"} 1.0",
            "firn_network_frames_total{network=\"lan\",to=\"host b\",direction=\"in\"} 7",
            "firn_network_frames_total{network=\"lan\",to=\"host b\",direction=\"out\"} 8",
            "firn_network_dropped_total{network=\"lan\",to=\"host b\"} 9",
            "firn_refused_total{reason=\"time\"} 3",
            "# EOF",
        ];
        for line in lines {
            assert!(text.lines().any(|it| it == line), "{line} is not in:\n{text}");
        }
        assert!(!text.contains("round_trip_seconds{peer=\"c\""), "{text}");
    }
}
