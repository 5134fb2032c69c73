//! Metrics for Prometheus, made from the state at the time of the request. Pure.
//!
//! | file | metrics of |
//! |---|---|
//! | `vms` | each VM of this host: state, supervisor, checkpoints |
//! | `protection` | protected VMs and standbys: epochs, pauses, lag, output, leases, failovers |
//! | `hosts` | other hosts, the hosts' consensus, networks, refused connections |
//!
//! `docs/manual/src/reference/metrics.md` lists all of them. The dashboard and the alert rules in
//! `packaging` use them; a test checks that they name no others.

mod hosts;
mod protection;
mod vms;

use std::collections::BTreeMap;
use std::fmt;
use std::sync::atomic::AtomicU64;

use firn_control::api::{NetworkView, PeerView, VmView};
use prometheus_client::encoding::text::encode;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;

use crate::membership::MembershipHealth;
use crate::takeovers::TakeoverCounts;

/// The content type of the text that [`render_metrics`] returns.
pub const CONTENT_TYPE: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// The names and values of the labels of one sample.
type MetricLabels = Vec<(&'static str, String)>;
/// All samples of one gauge: a value for each set of labels.
type GaugeFamily = Family<MetricLabels, Gauge<f64, AtomicU64>>;
/// All samples of one counter.
type CounterFamily = Family<MetricLabels, Counter>;

/// The state that metrics are made from.
#[derive(Clone, Debug, Default)]
pub struct MetricSources {
    /// The VMs of this host.
    pub vms: Vec<VmView>,
    /// The other hosts.
    pub peers: Vec<PeerView>,
    /// The networks of this host.
    pub networks: Vec<NetworkView>,
    /// Connections that were refused, by reason.
    pub refused: BTreeMap<String, u64>,
    /// The hosts' consensus, if this host takes part in one.
    pub membership: Option<MembershipHealth>,
    /// Standbys that this host has run.
    pub takeovers: TakeoverCounts,
    /// Whether this host is drained.
    pub drained: bool,
    /// The time, in seconds since 1970.
    pub now_s: u64,
}

/// Renders the metrics as OpenMetrics text.
///
/// # Errors
/// None in practice: it is written to memory.
pub fn render_metrics(sources: &MetricSources) -> Result<String, fmt::Error> {
    let mut registry = Registry::with_prefix("firn");
    vms::add_vm_metrics(&mut registry, sources);
    protection::add_protection_metrics(&mut registry, sources);
    hosts::add_peer_metrics(&mut registry, &sources.peers);
    hosts::add_host_metrics(&mut registry, sources);
    hosts::add_network_metrics(&mut registry, &sources.networks);
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

/// Registers a gauge without labels.
fn add_gauge(registry: &mut Registry, name: &str, help: &str, value: f64) {
    let number = Gauge::<f64, AtomicU64>::default();
    number.set(value);
    registry.register(name, help, number);
}

/// Registers a counter. The caller then adds to it for each set of labels.
fn register_counters(registry: &mut Registry, name: &str, help: &str) -> CounterFamily {
    let numbers = CounterFamily::default();
    registry.register(name, help, numbers.clone());
    numbers
}

/// Sets the value of the sample that has these labels.
fn set_gauge(numbers: &GaugeFamily, labels: MetricLabels, value: f64) {
    numbers.get_or_create(&labels).set(value);
}

/// Adds to a counter, which begins with 0.
fn add_count(numbers: &CounterFamily, labels: MetricLabels, value: u64) {
    numbers.get_or_create(&labels).inc_by(value);
}

fn vm_label(name: &impl ToString) -> MetricLabels {
    vec![("vm", name.to_string())]
}

/// These labels and one more.
fn with_label(labels: &MetricLabels, name: &'static str, value: impl ToString) -> MetricLabels {
    [&labels[..], &[(name, value.to_string())]].concat()
}

fn one_if(is_so: bool) -> f64 {
    f64::from(u8::from(is_so))
}

#[cfg(test)]
mod tests;
