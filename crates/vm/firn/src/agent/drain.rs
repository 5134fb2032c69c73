//! `firn agent drain` and `firn agent undrain`

use clap::Args as ClapArgs;
use firn_control::api::{DRAIN, DrainReport, DrainRequest};
use firn_control::{HostName, client};
use firn_supervisor::{Failure, FailureContext as _, FailureKind};
use firn_types::make_printable;

use crate::bar::TerminalBar;
use crate::move_vm::describe_pause;
use crate::output::FactPrinter;

/// Move all VMs of a host to their backups, for example before maintenance.
///
/// Each VM is moved as by `firn move`. The host is marked first: it accepts no standbys until `firn
/// agent undrain`, also if its agent is started again. So the VMs are protected again by other
/// hosts, as far as there are any.
///
/// A VM that can't be moved is in the way: one that is not protected, that belongs to a cluster, or
/// whose hosts have no consensus. Then nothing is moved, and the command names these VMs. Standbys of
/// other hosts' VMs stay on the host; the command lists them.
#[derive(Debug, ClapArgs)]
#[command(after_long_help = "Examples:
  firn agent drain host1
  firn agent drain host1 --at-once 2 --json")]
pub struct DrainArgs {
    /// The host.
    host: HostName,
    /// How many VMs are moved at a time.
    #[arg(long, value_name = "COUNT", default_value_t = 1)]
    at_once: u32,
}

/// Let a drained host accept standbys again.
///
/// No VM moves by that. `firn move` moves a VM back, once the host is its backup.
#[derive(Debug, ClapArgs)]
#[command(after_long_help = "Example:
  firn agent undrain host1")]
pub struct UndrainArgs {
    /// The host.
    host: HostName,
}

impl DrainArgs {
    /// Runs the verb.
    pub fn run(&self, out: FactPrinter) -> Result<(), Failure> {
        let (host, at_once) = (self.host.clone(), self.at_once);
        let doing = format!("can't drain {host}");
        let report = send_request(DrainRequest { host, at_once, undo: false }, doing)?;
        match report.failed.is_empty() {
            true => out.print_facts(&report, || describe_drain(&report)),
            false => Err(describe_failures(&report)),
        }
    }
}

impl UndrainArgs {
    /// Runs the verb.
    pub fn run(&self, out: FactPrinter) -> Result<(), Failure> {
        let host = self.host.clone();
        let doing = format!("can't end the drain of {host}");
        let report = send_request(DrainRequest { host, at_once: 1, undo: true }, doing)?;
        out.print_facts(&report, || format!("host {} accepts standbys again\n", report.host))
    }
}

fn send_request(wanted: DrainRequest, doing: String) -> Result<DrainReport, Failure> {
    let base = crate::hidden::runtime_dir()?;
    let mut bar = TerminalBar::new();
    let facts = client::send_long_request(&base, DRAIN, &wanted, &mut |now| bar.show_progress(now));
    let facts = facts.map_err(|failure| failure.while_doing(doing))?;
    serde_json::from_value(facts).while_doing("reading the agent's reply")
}

fn describe_drain(report: &DrainReport) -> String {
    let moved: String = report.moved.iter().map(describe_pause).collect();
    let host = &report.host;
    let names: Vec<&str> = report.standbys.iter().map(|vm| vm.as_str()).collect();
    let standbys = match names.is_empty() {
        true => String::new(),
        false => format!("it still has the standbys of {}\n", names.join(", ")),
    };
    format!(
        "{moved}host {host} is drained: {} VMs were moved, and it accepts no standbys\n{standbys}",
        report.moved.len()
    )
}

fn describe_failures(report: &DrainReport) -> Failure {
    let failed = report.failed.iter().map(|(vm, why)| format!("{vm} ({})", make_printable(why)));
    let failed: Vec<String> = failed.collect();
    let (host, moved) = (&report.host, report.moved.len());
    let text = format!("{moved} VMs left host {host}, and these did not: {}", failed.join(", "));
    let hint =
        format!("`firn agent drain {host}` again; `firn agent undrain {host}` ends the drain");
    Failure::new(FailureKind::Other, text).with_hint(hint)
}
