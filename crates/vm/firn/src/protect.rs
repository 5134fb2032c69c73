//! `firn protect`

use std::time::Duration;

use clap::{ArgGroup, Args as ClapArgs};
use firn_control::api::ProtectVmRequest;
use firn_control::{HostName, client};
use firn_epochs::endpoint::BackupEndpoint;
use firn_supervisor::{
    Failure, FailureKind, OnProgress, ProtectRequest, RuntimeDir, SupervisorRequest, VmName,
    send_request,
};
use firn_types::make_printable;
use serde_json::Value;

use crate::bar::TerminalBar;
use crate::output::FactPrinter;

/// Replicate a VM to a standby, several times a second.
///
/// Each epoch ends with a pause of some milliseconds, in which Firn copies the pages that the VM
/// has written. Firn sends the pages while the VM runs. The standby commits an epoch only when it
/// has the next one, too. So a failover continues the VM from the epoch before the newest that
/// arrived. The command returns when the standby is able to run the VM. The protection continues
/// until `firn release`, or until the connection ends. `firn status` shows its state.
///
/// With --backup, this host's agent makes the other host's agent start a standby of the same name,
/// and transfers the epochs by TLS (see `firn-agent --help`). `firn failover` on that host runs the
/// standby. The other host may have a standby of this VM already. If that standby was released, the
/// agent there replaces it. If it was not released, the command fails, because the old standby may
/// be the only remaining copy of the VM. With --to, the epochs are sent unencrypted, to a socket on
/// this host (see `firn standby --help`). Firn first copies the disks that it serves (`firn run
/// --help`) while the VM runs; each epoch has the changes to them. A VM that can write to any other
/// disk is refused.
///
/// Firn buffers the frames that the VM sends until no failover can undo the state that sent them.
/// While the protection works, that takes two intervals. For a network card that is not Firn's own
/// (`firn run --help`), Firn adds filters to the running QEMU, and removes them at the release. The
/// command names the cards that can't have filters, for example with vhost: through these, peers may
/// receive frames that a failover undoes. When the
/// standby is lost, the VM continues to run, but its output stays buffered: a user or the other
/// host may have made the standby run, and then two instances would send. `firn release` releases
/// the output.
///
/// Where the hosts have consensus (`[membership]`, see `firn-agent --help`), a VM with --backup
/// fails over automatically when its host is lost, and is then protected by another host. Its
/// output leaves only while its host holds a lease.
///
/// QEMU saves all devices in each pause. That is quickest if virtio devices have
/// `disable-modern=on`, and a virtio-serial device the lowest possible `max_ports`.
#[derive(Debug, ClapArgs)]
#[command(group = ArgGroup::new("where").required(true), after_long_help = r"Examples:
  firn protect web --backup host2
  firn protect web --to unix:/run/web.standby \
    --interval 50ms --json")]
pub struct ProtectArgs {
    /// The VM.
    name: VmName,
    /// The address on which the standby listens: unix:PATH.
    #[arg(long, value_name = "ADDRESS", group = "where")]
    to: Option<BackupEndpoint>,
    /// The host whose agent is to start a standby.
    #[arg(long, value_name = "HOST", group = "where")]
    backup: Option<HostName>,
    /// The time from one cut to the next, 50ms to 500ms.
    #[arg(long, default_value = "100ms", value_parser = parse_interval)]
    interval: Duration,
    /// When the standby is lost, release the buffered output and continue without a standby.
    ///
    /// Use this option only if you make sure that a lost standby does not run: two instances of a
    /// VM on one network do harm.
    #[arg(long, alias = "go-on-alone", conflicts_with = "backup")]
    continue_unprotected: bool,
    /// Copy all written pages in the pause, and none before it.
    #[arg(long)]
    no_prediction: bool,
}

impl ProtectArgs {
    /// Runs the verb.
    pub fn run(&self, out: FactPrinter) -> Result<(), Failure> {
        let base = crate::hidden::runtime_dir()?;
        let mut bar = TerminalBar::new();
        let facts = self
            .begin_protection(&base, &mut |progress| bar.show_progress(progress))
            .map_err(|failure| failure.while_doing(format!("can't protect {}", self.name)))?;
        out.print_facts(&facts, || self.describe_protection(&facts))
    }

    fn describe_protection(&self, facts: &Value) -> String {
        let (name, ms) = (&self.name, self.interval.as_millis());
        let cards = facts["not_held"].as_array().into_iter().flatten();
        let not_held = cards.filter_map(|card| card.as_str());
        let not_held = not_held
            .map(|card| format!("output through {} is not buffered\n", make_printable(card)));
        let not_held = not_held.collect::<String>();
        format!("{name} is protected: every {ms} ms to {}\n{not_held}", self.describe_target())
    }

    fn begin_protection(
        &self,
        base: &RuntimeDir,
        on_progress: OnProgress<'_>,
    ) -> Result<Value, Failure> {
        let interval_ms = self.interval.as_millis() as u64;
        let predicts = !self.no_prediction;
        match (&self.backup, &self.to) {
            (Some(host), _) => {
                let (vm, backup) = (self.name.clone(), host.clone());
                let wanted = ProtectVmRequest { vm, backup, interval_ms, predicts };
                client::protect_vm(base, &wanted, on_progress)
            }
            (None, Some(to)) => {
                let (to, alone) = (to.clone(), self.continue_unprotected);
                let how = ProtectRequest { to, interval_ms, predicts, alone, lease: None };
                let request = SupervisorRequest::Protect(how);
                send_request(base, &self.name, &request, on_progress)
            }
            (None, None) => Err(Failure::new(FailureKind::Usage, "give --backup or --to")),
        }
    }

    fn describe_target(&self) -> String {
        let host = self.backup.as_ref().map(HostName::to_string);
        host.or_else(|| self.to.as_ref().map(BackupEndpoint::to_string)).unwrap_or_default()
    }
}

/// Parses milliseconds with their unit.
pub fn parse_interval(words: &str) -> Result<Duration, String> {
    let ms = words.strip_suffix("ms").and_then(|number| number.parse().ok());
    match ms {
        Some(ms @ 50..=500) => Ok(Duration::from_millis(ms)),
        _ => Err("give 50ms to 500ms".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn intervals_have_a_unit_and_bounds() {
        assert_eq!(parse_interval("50ms"), Ok(Duration::from_millis(50)));
        for words in ["49ms", "501ms", "100", "1s", "", "ms"] {
            assert!(parse_interval(words).is_err(), "{words}");
        }
    }
}
