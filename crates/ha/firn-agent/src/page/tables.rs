//! The tables of hosts and VMs. Pure.

use firn_control::HostHealth;
use firn_control::api::{PeerView, VmView};
use firn_supervisor::ProtectionStatus;
use maud::{Markup, html};
use serde_json::{Value, json};

use super::render::is_trouble;
use super::text::{format_age, format_bytes, format_ms};
use super::view::PageView;

/// Hosts: this one, then its peers.
pub(super) fn render_hosts(view: &PageView) -> Markup {
    let status = &view.status;
    html! {
        section aria-labelledby="hosts" {
            h2 id="hosts" { "Hosts" }
            table {
                thead { tr { th { "Host" } th { "State" } th { "Address" } th { "Answers in" } th { "VMs" } } }
                tbody {
                    tr {
                        th scope="row" { (status.host) " " span class="muted" { "(this one)" } }
                        td data-label="State" { span class="good" { "alive" } @if status.drained { ", drained" } }
                        td data-label="Address" { @match status.listen { Some(listen) => (listen), None => "-" } }
                        td data-label="Answers in" { "-" }
                        td data-label="VMs" { (count_vms(view, status.host.as_str())) (render_drain(view, status.host.as_str(), status.drained)) }
                    }
                    @for peer in &status.peers { (render_peer(view, peer)) }
                }
            }
        }
    }
}

fn render_peer(view: &PageView, peer: &PeerView) -> Markup {
    let (class, since) = match peer.health {
        HostHealth::Alive => ("good", None),
        HostHealth::Suspected => ("warn", Some(peer.since_s as u64)),
        HostHealth::Lost => ("bad", Some(peer.since_s as u64)),
    };
    html! {
        tr {
            th scope="row" { (peer.name) }
            td data-label="State" {
                span class=(class) { (peer.health.as_word()) }
                @if let Some(since) = since { " for " (format_age(since)) }
                @if let Some(trouble) = &peer.trouble { div class="note" { (trouble) } }
            }
            td data-label="Address" { (peer.address) }
            td data-label="Answers in" { @match peer.round_trip_ms { Some(ms) => (format_ms(ms)), None => "-" } }
            td data-label="VMs" { (count_vms(view, peer.name.as_str())) (render_drain(view, peer.name.as_str(), false)) }
        }
    }
}

fn count_vms(view: &PageView, host: &str) -> Markup {
    let (mut runs, mut standbys) = (0, 0);
    for vm in view.status.vms.iter().filter(|vm| vm.host.as_str() == host) {
        match vm.committed {
            Some(_) => standbys += 1,
            None => runs += 1,
        }
    }
    html! { (runs) @if standbys > 0 { ", " (standbys) @if standbys == 1 { " standby" } @else { " standbys" } } }
}

/// VMs and standbys, by name.
pub(super) fn render_vms(view: &PageView) -> Markup {
    html! {
        section aria-labelledby="vms" {
            h2 id="vms" { "Virtual machines" }
            @if view.status.vms.is_empty() { p { "There are none." } } @else {
                table {
                    thead { tr {
                        th { "VM" } th { "Host" } th { "State" } th { "Protection" } th { "Lag, pause" } th { "Output" } th { "Checkpoint" }
                    } }
                    tbody { @for vm in &view.status.vms { (render_vm(view, vm)) } }
                }
            }
        }
    }
}

fn render_vm(view: &PageView, vm: &VmView) -> Markup {
    let class = match vm.state.as_str() {
        state if is_trouble(state) => "bad",
        "protected" | "running" => "good",
        _ => "",
    };
    html! {
        tr {
            th scope="row" { (vm.name) @if let Some(cluster) = &vm.cluster { div class="note" { "of cluster " (cluster) } } }
            td data-label="Host" { (vm.host) }
            td data-label="State" {
                span class=(class) { (vm.state) }
                @if vm.recoveries > 0 { div class="note" { "its supervisor was restarted, " (times(vm.recoveries)) } }
                @if let Some(advice) = &vm.advice { div class="note bad" { (advice) } }
            }
            td data-label="Protection" { (render_protection(view, vm)) }
            td data-label="Lag, pause" { @match &vm.protection { Some(it) => (render_epochs(it)), None => "-" } }
            td data-label="Output" { (render_output(vm)) }
            td data-label="Checkpoint" { (render_newest(view, vm)) }
        }
    }
}

fn times(count: u32) -> String {
    match count {
        1 => "once".to_owned(),
        count => format!("{count} times"),
    }
}

/// What protects the VM, or what the standby protects.
fn render_protection(view: &PageView, vm: &VmView) -> Markup {
    html! {
        @match (&vm.protection, vm.committed) {
            (Some(protection), _) => {
                "by " @match &vm.backup { Some(backup) => strong { (backup) }, None => (protection.to) }
                ", every " (format_ms(protection.interval_ms as f64))
                div class="note" {
                    "epoch " (protection.committed) " committed of " (protection.epoch)
                    @match vm.lease_held {
                        Some(true) => { ", lease of generation " (vm.lease.unwrap_or_default()) " held" }
                        Some(false) => { ", " span class="bad" { "lease not held: it sends nothing" } }
                        None => {}
                    }
                }
                (render_move(view, vm))
            }
            (None, Some(committed)) => {
                "standby of " (vm.name) @if let Some(primary) = &vm.primary { " at " strong { (primary) } }
                div class="note" { "epoch " (committed) @if committed == 0 { ": not ready yet" } }
                (render_failover(view, vm))
            }
            (None, None) => "none",
        }
    }
}

fn render_epochs(protection: &ProtectionStatus) -> Markup {
    let pause = protection.downtime_ms;
    html! {
        @match protection.lag_ms { Some(ms) => (format_ms(ms)), None => "not committed yet" }
        div class="note" { "pause " (format_ms(pause.p50)) ", 95 %: " (format_ms(pause.p95)) }
    }
}

fn render_output(vm: &VmView) -> Markup {
    let held: usize = vm.network.iter().map(|card| card.held_bytes).sum();
    let delay = vm.network.iter().map(|card| card.delay_ms.p50).fold(0.0, f64::max);
    html! {
        @if vm.network.is_empty() { "-" } @else {
            (format_bytes(held as u64)) " waits"
            @if delay > 0.0 { div class="note" { "delayed by " (format_ms(delay)) } }
        }
    }
}

fn render_newest(view: &PageView, vm: &VmView) -> Markup {
    let tally = &vm.checkpoints;
    html! {
        @match tally.newest.back() {
            Some(newest) => { (format_age(view.now_s.saturating_sub(newest.at))) " ago" }
            None => "-",
        }
        @if tally.failure.is_some() { div class="note bad" { "the last one failed" } }
    }
}

/// A button that asks before it acts. It is there only where actions are allowed.
fn render_button(
    view: &PageView,
    label: &str,
    action: &str,
    request: Value,
    question: &str,
    effect: &str,
) -> Markup {
    html! {
        @if view.token.is_some() {
            button type="button" data-action=(action) data-request=(request) data-question=(question) data-effect=(effect) { (label) }
        }
    }
}

fn render_move(view: &PageView, vm: &VmView) -> Markup {
    let Some(to) = vm.backup.as_ref().filter(|_| vm.lease.is_some() && vm.cluster.is_none()) else {
        return html! {};
    };
    let (question, effect) = (
        format!("Move {} from {} to {to}?", vm.name, vm.host),
        "The VM is paused for a moment, and loses nothing. Its old host becomes its backup.",
    );
    let request = json!({ "vm": vm.name, "to": to });
    render_button(view, &format!("Move to {to}"), "move", request, &question, effect)
}

/// A standby fails over at its own host, and by the record, which hosts with consensus have.
fn render_failover(view: &PageView, vm: &VmView) -> Markup {
    let is_here = vm.host == view.status.host && view.membership.is_some();
    if !is_here || vm.cluster.is_some() || vm.committed == Some(0) {
        return html! {};
    }
    let (question, effect) = (
        format!("Run {} here, at {}?", vm.name, vm.host),
        "It continues from the newest committed epoch; what its host has done since is undone. This is refused while that host \
         holds the lease.",
    );
    render_button(view, "Fail over", "failover", json!({ "vm": vm.name }), &question, effect)
}

fn render_drain(view: &PageView, host: &str, is_drained: bool) -> Markup {
    let request = |undo: bool| json!({ "host": host, "at_once": 1, "undo": undo });
    let (label, question, effect) = match is_drained {
        true => {
            ("End drain", format!("End the drain of {host}?"), "The host accepts standbys again.")
        }
        false => (
            "Drain",
            format!("Drain {host}?"),
            "All its VMs move to their backups, one after another, and the host accepts no standbys until the drain is ended.",
        ),
    };
    html! {
        @if view.membership.is_some() { " " (render_button(view, label, "drain", request(is_drained), &question, effect)) }
    }
}
