//! Metrics of protected VMs and of standbys. Other VMs have none, but for cards whose frames pass
//! through Firn.

use firn_control::api::VmView;
use prometheus_client::registry::Registry;

use super::{
    GaugeFamily, MetricLabels, MetricSources, add_count, one_if, register_counters,
    register_gauges, set_gauge, vm_label, with_label,
};

/// Adds the epochs, the output and the leases of this host's VMs, and the failovers to this host.
pub(super) fn add_protection_metrics(registry: &mut Registry, sources: &MetricSources) {
    add_epoch_metrics(registry, &sources.vms);
    add_output_metrics(registry, &sources.vms);
    let held = register_gauges(registry, "lease_held", "1 if this host holds the VM's lease");
    for vm in &sources.vms {
        let labels = vm_label(&vm.name);
        vm.lease_held
            .into_iter()
            .for_each(|is_held| set_gauge(&held, labels.clone(), one_if(is_held)));
    }
    let failovers = register_counters(
        registry,
        "failovers",
        "How often this host ran a standby because its VM was lost",
    );
    let moves = register_counters(registry, "moves", "How often a VM was moved to this host");
    // Each VM has a count from the beginning, so that the first failover is a change.
    let counts = &sources.takeovers;
    for vm in &sources.vms {
        add_count(&failovers, vm_label(&vm.name), 0);
        add_count(&moves, vm_label(&vm.name), 0);
    }
    counts.failovers().for_each(|(vm, count)| add_count(&failovers, vm_label(vm), count));
    counts.moves().for_each(|(vm, count)| add_count(&moves, vm_label(vm), count));
}

fn add_epoch_metrics(registry: &mut Registry, vms: &[VmView]) {
    let epoch = register_gauges(registry, "epoch", "The newest epoch that was cut");
    let committed =
        register_gauges(registry, "epoch_committed", "The newest that a failover would run");
    let downtime = register_gauges(
        registry,
        "epoch_downtime_seconds",
        "How long the VM was paused for an epoch",
    );
    let lag = register_gauges(
        registry,
        "epoch_lag_seconds",
        "The age of the newest committed epoch: so much a failover would undo",
    );
    let interval =
        register_gauges(registry, "epoch_interval_seconds", "The time from one cut to the next");
    let standby = register_gauges(
        registry,
        "standby_committed",
        "The newest epoch that this standby would run",
    );
    let sent = register_counters(registry, "sent_bytes", "Bytes sent for all epochs");
    for vm in vms {
        let label = || vm_label(&vm.name);
        if let Some(newest) = vm.committed {
            set_gauge(&standby, label(), newest as f64);
        }
        let Some(protection) = &vm.protection else { continue };
        set_gauge(&epoch, label(), protection.epoch as f64);
        set_gauge(&committed, label(), protection.committed as f64);
        set_gauge(&interval, label(), protection.interval_ms as f64 / 1e3);
        set_quantiles(&downtime, &label(), protection.downtime_ms.p50, protection.downtime_ms.p95);
        protection.lag_ms.into_iter().for_each(|ms| set_gauge(&lag, label(), ms / 1e3));
        add_count(&sent, label(), protection.sent_bytes);
    }
}

/// Adds what waits in the output buffer of each card, and how long frames take through it.
fn add_output_metrics(registry: &mut Registry, vms: &[VmView]) {
    let frames = register_gauges(registry, "output_held_frames", "Frames that wait for a commit");
    let bytes = register_gauges(registry, "output_held_bytes", "Bytes of these frames");
    let delay = register_gauges(
        registry,
        "output_delay_seconds",
        "The delay of the newest frames from the VM to the network",
    );
    let connected = register_gauges(registry, "output_connected", "1 if the card has an uplink");
    for vm in vms {
        for card in &vm.network {
            let labels = with_label(&vm_label(&vm.name), "card", &card.id);
            set_gauge(&frames, labels.clone(), card.held_frames as f64);
            set_gauge(&bytes, labels.clone(), card.held_bytes as f64);
            set_quantiles(&delay, &labels, card.delay_ms.p50, card.delay_ms.p95);
            // QEMU itself connects a card that has filters.
            if !card.filtered {
                set_gauge(&connected, labels, one_if(card.connected));
            }
        }
    }
}

/// Sets two samples, from milliseconds.
fn set_quantiles(numbers: &GaugeFamily, labels: &MetricLabels, p50_ms: f64, p95_ms: f64) {
    for (quantile, ms) in [("0.5", p50_ms), ("0.95", p95_ms)] {
        set_gauge(numbers, with_label(labels, "quantile", quantile), ms / 1e3);
    }
}
