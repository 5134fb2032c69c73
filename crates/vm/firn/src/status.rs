//! `firn status`

use std::fmt::Write;

use clap::Args as ClapArgs;
use firn_supervisor::{
    CardStatus, Failure, MemoryUse, Percentiles, ProtectionStatus, RuntimeDir, StandbyStatus,
    SupervisorRequest, VmName, VmStatus, inspect_vm, query_status, send_request,
};
use firn_types::make_printable;

use crate::bar::TerminalBar;
use crate::ls::{describe_outage, describe_state, seconds_since};
use crate::output::FactPrinter;
use crate::units;

/// Show the state of a VM.
#[derive(Debug, ClapArgs)]
#[command(after_long_help = "Examples:
  firn status web
  # wait until the checkpoint or restore is finished
  firn status web --watch")]
pub struct StatusArgs {
    /// The VM.
    name: VmName,
    /// Wait until the running operation is finished; show progress on a terminal.
    #[arg(long, short)]
    watch: bool,
}

impl StatusArgs {
    /// Runs the verb.
    pub fn run(&self, out: FactPrinter) -> Result<(), Failure> {
        let base = crate::hidden::runtime_dir()?;
        if self.watch {
            wait_until_idle(&base, &self.name)?;
        }
        let vm = base.vm_dir(&self.name);
        let status = inspect_vm(&base, &vm)?;
        out.print_facts(&status, || describe_status(&status, &vm.qemu_log().display().to_string()))
    }
}

/// Waits until no operation is running any more.
pub fn wait_until_idle(base: &RuntimeDir, name: &VmName) -> Result<(), Failure> {
    let vm = base.vm_dir(name);
    if query_status(base, &vm)?.exit.is_some() {
        return Ok(());
    }
    let mut bar = TerminalBar::new();
    send_request(base, name, &SupervisorRequest::Watch, &mut |progress| bar.show_progress(progress))
        .map(drop)
}

fn describe_protection(protection: &ProtectionStatus) -> String {
    let ProtectionStatus { to, interval_ms, epoch, committed, .. } = protection;
    format!("by {to}, every {interval_ms} ms; epoch {epoch}, of which {committed} are committed")
}

fn describe_standby(standby: &StandbyStatus) -> String {
    let StandbyStatus { complete, committed, ended, .. } = standby;
    let ended =
        ended.as_ref().map(|why| format!("; the stream has ended: {why}")).unwrap_or_default();
    format!("{complete} epochs, of which {committed} are committed{ended}")
}

fn describe_memory_use(memory_use: &MemoryUse) -> String {
    let [shared, private, pss] =
        [memory_use.shared_bytes, memory_use.private_bytes, memory_use.pss_bytes]
            .map(units::format_bytes);
    format!("{shared} of the template, {private} of its own; its part of both (PSS): {pss}")
}

fn card_line(card: &CardStatus) -> String {
    let uplink = match card.filtered {
        true => "its back end, by filters".to_owned(),
        false => card.uplink.display().to_string(),
    };
    let there = if card.connected { "" } else { ", not connected" };
    let how = match card.open {
        true => "open".to_owned(),
        false => {
            let bytes = units::format_bytes(card.held_bytes as u64);
            format!(
                "{} frames buffered ({bytes}), delay {} ms",
                card.held_frames,
                format_percentiles(card.delay_ms)
            )
        }
    };
    format!("{} to {uplink}{there}; {how}", card.id)
}

fn format_percentiles(values: Percentiles) -> String {
    format!("{:.1} (95 %: {:.1})", values.p50, values.p95)
}

fn describe_status(status: &VmStatus, qemu_log: &str) -> String {
    let mut text = String::new();
    let mut line = |key: &str, value: String| {
        let _ = writeln!(text, "{key:<11}{}", make_printable(&value));
    };
    line("name", status.name.to_string());
    line("state", describe_state(status));
    if let Some(unattended) = &status.unattended {
        line("trouble", unattended.why.clone());
        line("try", unattended.hint.clone());
    }
    if let Some(waiting) = &status.waiting {
        line("storage", describe_outage(waiting));
    }
    if status.frozen {
        line("frozen", "its file systems, for a checkpoint; they are being thawed".to_owned());
    }
    if let Some(image) = &status.image {
        line("image", image.display().to_string());
    }
    if let Some(pid) = status.pid {
        let how = if status.launched { "started by Firn" } else { "attached to" };
        line("process", format!("{pid}, {how}"));
    }
    line("memory", units::format_bytes(status.memory_bytes));
    if let Some(family) = &status.family {
        line("clone of", family.image.display().to_string());
    }
    for rule in &status.forwards {
        line("port", rule.clone());
    }
    if let Some(memory_use) = &status.memory_use {
        line("memory use", describe_memory_use(memory_use));
    }
    line("vCPUs", format!("{}, {}", status.vcpus, status.accel));
    line("QEMU", status.qemu.clone());
    if let Some(qmp) = &status.qmp {
        line("monitor", qmp.to_string());
    }
    if let Some(protection) = &status.protection {
        line("protected", describe_protection(protection));
        if let Some(trouble) = protection.trouble {
            line(
                "trouble",
                format!(
                    "{}; its standby has the same trouble or will have it",
                    trouble.description()
                ),
            );
        }
        line("downtime", format!("{} ms an epoch", format_percentiles(protection.downtime_ms)));
        line("pages", format!("{} sent an epoch", format_percentiles(protection.sent_pages)));
    }
    if let Some(standby) = &status.standby {
        line("standby", describe_standby(standby));
        if standby.is_over() {
            line("not lost", format!("`firn stop {}` removes this standby", status.name));
        }
    }
    for card in &status.network {
        line("network", card_line(card));
    }
    for overlay in &status.overlays {
        line("writes to", overlay.display().to_string());
    }
    line("output", qemu_log.to_owned());
    line("since", format!("{} ago", units::format_seconds(seconds_since(status.since))));
    if let Some(note) = &status.last {
        line(
            "last",
            format!("{} ({} ago)", note.text, units::format_seconds(seconds_since(note.at))),
        );
    }
    if status.recoveries > 0 {
        line("recovered", format!("{} times from the death of its supervisor", status.recoveries));
    }
    text
}
