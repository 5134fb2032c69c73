//! `firn status`

use std::fmt::Write;

use clap::Args as ClapArgs;
use firn_supervisor::{
    CardStatus, Failure, Percentiles, Protection, Readiness, Request, RuntimeDir, Status, VmName,
    ask, inspect, status,
};
use firn_types::printable;

use crate::bar::Bar;
use crate::ls::{age, outage, state};
use crate::output::Output;
use crate::units;

/// Show the state of a VM.
///
/// Examples:
///   firn status web
///   firn status web --watch     wait until the running checkpoint or restore is finished
#[derive(Debug, ClapArgs)]
#[command(verbatim_doc_comment)]
pub struct Args {
    /// The VM.
    name: VmName,
    /// Wait until the running operation is finished; show progress on a terminal.
    #[arg(long, short)]
    watch: bool,
}

impl Args {
    /// Runs the verb.
    pub fn run(&self, out: Output) -> Result<(), Failure> {
        let base = crate::hidden::runtime_dir()?;
        if self.watch {
            watch(&base, &self.name)?;
        }
        let vm = base.vm(&self.name);
        let status = inspect(&base, &vm)?;
        out.facts(&status, || describe(&status, &vm.qemu_log().display().to_string()))
    }
}

/// Waits until no operation is running any more.
pub fn watch(base: &RuntimeDir, name: &VmName) -> Result<(), Failure> {
    let vm = base.vm(name);
    if status(base, &vm)?.exit.is_some() {
        return Ok(());
    }
    let mut bar = Bar::new();
    ask(base, name, &Request::Watch, &mut |progress| bar.show(progress)).map(drop)
}

fn by(protection: &Protection) -> String {
    let Protection { to, interval_ms, epoch, committed, .. } = protection;
    format!("by {to}, every {interval_ms} ms; epoch {epoch}, of which {committed} are committed")
}

fn of(standby: &Readiness) -> String {
    let Readiness { complete, committed, ended, .. } = standby;
    let ended = ended.as_ref().map(|why| format!("; the stream has ended: {why}")).unwrap_or_default();
    format!("{complete} epochs, of which {committed} are committed{ended}")
}

fn card_line(card: &CardStatus) -> String {
    let uplink = card.uplink.display();
    let there = if card.connected { "" } else { ", not connected" };
    let how = match card.open {
        true => "open".to_owned(),
        false => {
            let bytes = units::bytes(card.held_bytes as u64);
            format!(
                "{} frames buffered ({bytes}), delay {} ms",
                card.held_frames,
                percentiles(card.delay_ms)
            )
        }
    };
    format!("{} to {uplink}{there}; {how}", card.id)
}

fn percentiles(values: Percentiles) -> String {
    format!("{:.1} (95 %: {:.1})", values.p50, values.p95)
}

fn describe(status: &Status, qemu_log: &str) -> String {
    let mut text = String::new();
    let mut line = |key: &str, value: String| {
        let _ = writeln!(text, "{key:<11}{}", printable(&value));
    };
    line("name", status.name.to_string());
    line("state", state(status));
    if let Some(unattended) = &status.unattended {
        line("trouble", unattended.why.clone());
        line("try", unattended.hint.clone());
    }
    if let Some(waiting) = &status.waiting {
        line("storage", outage(waiting));
    }
    if let Some(image) = &status.image {
        line("image", image.display().to_string());
    }
    if let Some(pid) = status.pid {
        let how = if status.launched { "started by Firn" } else { "attached to" };
        line("process", format!("{pid}, {how}"));
    }
    line("memory", units::bytes(status.memory_bytes));
    line("vCPUs", format!("{}, {}", status.vcpus, status.accel));
    line("QEMU", status.qemu.clone());
    if let Some(qmp) = &status.qmp {
        line("monitor", qmp.display().to_string());
    }
    if let Some(protection) = &status.protection {
        line("protected", by(protection));
        if let Some(trouble) = protection.trouble {
            line(
                "trouble",
                format!("{}; its standby has the same trouble or will have it", trouble.word()),
            );
        }
        line("downtime", format!("{} ms an epoch", percentiles(protection.downtime_ms)));
        line("pages", format!("{} sent an epoch", percentiles(protection.sent_pages)));
    }
    if let Some(standby) = &status.standby {
        line("standby", of(standby));
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
    line("since", format!("{} ago", units::seconds(age(status.since))));
    if let Some(note) = &status.last {
        line("last", format!("{} ({} ago)", note.text, units::seconds(age(note.at))));
    }
    if status.recoveries > 0 {
        line("recovered", format!("{} times from the death of its supervisor", status.recoveries));
    }
    text
}
