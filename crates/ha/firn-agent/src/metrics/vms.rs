//! Metrics of each VM of this host, protected or not.

use prometheus_client::registry::Registry;

use super::{
    MetricSources, add_count, one_if, register_counters, register_gauges, set_gauge, vm_label,
    with_label,
};

/// Adds the state of each VM, whether its supervisor answers, and its checkpoints.
pub(super) fn add_vm_metrics(registry: &mut Registry, sources: &MetricSources) {
    let state = register_gauges(registry, "vm_state", "1 for the state that the VM is in");
    let up = register_gauges(registry, "supervisor_up", "1 if the VM's supervisor answers");
    let restarts = register_counters(
        registry,
        "supervisor_restarts",
        "How often a successor of the VM's supervisor took over",
    );
    for vm in &sources.vms {
        let label = vm_label(&vm.name);
        set_gauge(&state, with_label(&label, "state", &vm.state), 1.0);
        add_count(&restarts, label.clone(), u64::from(vm.recoveries));
        // Others need none.
        if !matches!(vm.state.as_str(), "ended" | "detached") {
            set_gauge(&up, label, one_if(vm.supervised));
        }
    }
    add_checkpoint_metrics(registry, sources);
}

/// Adds the counts of checkpoints, and the facts of the newest one that was saved. A VM that has
/// none yet has only the counts.
fn add_checkpoint_metrics(registry: &mut Registry, sources: &MetricSources) {
    let saved = register_counters(registry, "checkpoints", "Checkpoints that were saved");
    let failed = register_counters(registry, "checkpoint_failures", "Checkpoints that failed");
    let age = register_gauges(
        registry,
        "checkpoint_age_seconds",
        "How long ago the newest checkpoint was complete",
    );
    let duration = register_gauges(
        registry,
        "checkpoint_duration_seconds",
        "How long the newest checkpoint took",
    );
    let pause = register_gauges(
        registry,
        "checkpoint_pause_seconds",
        "How long the newest checkpoint paused the VM",
    );
    let size =
        register_gauges(registry, "checkpoint_size_bytes", "The size of the newest checkpoint");
    // A standby has no checkpoints of its own.
    for vm in sources.vms.iter().filter(|vm| vm.committed.is_none()) {
        let (label, tally) = (vm_label(&vm.name), &vm.checkpoints);
        add_count(&saved, label.clone(), tally.saved);
        add_count(&failed, label.clone(), tally.failed);
        let Some(newest) = tally.newest.back() else { continue };
        set_gauge(&age, label.clone(), sources.now_s.saturating_sub(newest.at) as f64);
        let facts = [
            (&duration, newest.total_ms.map(|ms| ms / 1e3)),
            (&pause, newest.downtime_ms.map(|ms| ms / 1e3)),
            (&size, newest.image_bytes.map(|bytes| bytes as f64)),
        ];
        for (numbers, value) in facts {
            value.into_iter().for_each(|value| set_gauge(numbers, label.clone(), value));
        }
    }
}
