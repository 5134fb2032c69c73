//! `firn move`

use clap::Args as ClapArgs;
use firn_control::api::{MOVE, MoveReport, MoveVmRequest};
use firn_control::{HostName, client};
use firn_supervisor::{Failure, FailureContext as _, VmName};

use crate::bar::TerminalBar;
use crate::output::FactPrinter;

/// Move a protected VM to its backup, without losing anything.
///
/// The VM is paused for a last epoch, and continues at its backup from the end of that epoch. All
/// that it has sent before leaves its old host, and nothing is sent twice. Clients notice a pause of
/// the length of an epoch or two. Its old host becomes its new backup at once, so a failback is
/// another move. The command returns when the VM is protected again; the VM runs at the new host
/// long before that.
///
/// The VM must be protected by that host (`firn protect --backup`), and the hosts must have
/// consensus (`[membership]`, see `firn-agent --help`). Without a record of who runs the VM, two
/// hosts could run it after a failure, so the command is refused. It is refused, too, for a VM of a
/// cluster (`firn cluster`), because its VMs fail over as one.
///
/// If a host, an agent or a supervisor fails during the move, the VM continues on one of both hosts,
/// and nothing that it has sent is undone. The command may be run on any host that has an agent.
#[derive(Debug, ClapArgs)]
#[command(after_long_help = "Examples:
  firn move web --to host2
  firn move web --to host2 --json | jq .pause_ms")]
pub struct MoveArgs {
    /// The VM.
    name: VmName,
    /// Its backup, which is to run it.
    #[arg(long, value_name = "HOST")]
    to: HostName,
}

impl MoveArgs {
    /// Runs the verb.
    pub fn run(&self, out: FactPrinter) -> Result<(), Failure> {
        let base = crate::hidden::runtime_dir()?;
        let wanted = MoveVmRequest { vm: self.name.clone(), to: self.to.clone() };
        let mut bar = TerminalBar::new();
        let facts =
            client::send_long_request(&base, MOVE, &wanted, &mut |now| bar.show_progress(now))
                .map_err(|failure| failure.while_doing(format!("can't move {}", self.name)))?;
        let report: MoveReport =
            serde_json::from_value(facts).while_doing("reading the agent's reply")?;
        out.print_facts(&report, || describe_move(&report))
    }
}

/// Describes a move, with its new backup.
fn describe_move(report: &MoveReport) -> String {
    let backup = match &report.backup {
        Some(host) => format!("its backup is host {host}\n"),
        None => "it is not protected again yet: `firn agent status` shows why\n".to_owned(),
    };
    format!("{}{backup}", describe_pause(report))
}

/// Describes a move, without its new backup.
pub fn describe_pause(report: &MoveReport) -> String {
    let MoveReport { vm, from, to, epoch, pause_ms, generation, .. } = report;
    format!(
        "{vm} runs at host {to} from the end of epoch {epoch}, after a pause of {pause_ms:.0} ms \
         (before at host {from}, now generation {generation})\n"
    )
}
