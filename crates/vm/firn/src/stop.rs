//! `firn stop`

use clap::Args as ClapArgs;
use firn_supervisor::{
    Failure, FailureKind, RuntimeDir, StopRequest, SupervisorRequest, VmName, inspect_vm,
    send_request, stop_by_force,
};

use crate::output::FactPrinter;
use crate::overlays;
use crate::units;

/// End a VM.
///
/// Without options this is like pulling the plug: QEMU flushes its disks and ends, without notice
/// to the guest. If QEMU does not end on this request, the VM continues to run: only --force kills
/// QEMU.
///
/// After a checkpoint a VM may write to layers on top of its disks' files. Then the command prints
/// the command line that starts the VM with the newest layers. `firn disk commit` merges the layers
/// of a running VM into its disks' original files.
#[derive(Debug, ClapArgs)]
#[command(after_long_help = "Examples:
  firn stop web
  # press the guest's power button, and wait 10 seconds
  firn stop web --powerdown=10
  # drop what it wrote to disks since the last checkpoint
  firn stop web --discard")]
pub struct StopArgs {
    /// The VM.
    name: VmName,
    /// Press the guest's power button and wait this many seconds. If the guest needs longer to shut
    /// down, the VM continues to run.
    #[arg(
        long,
        value_name = "SECONDS",
        num_args = 0..=1,
        require_equals = true,
        default_missing_value = "60",
        value_parser = units::parse_number::<u64>(0..=u64::MAX)
    )]
    powerdown: Option<u64>,
    /// End the VM in three more cases. While a checkpoint is being written: the checkpoint is lost.
    /// If QEMU does not end on request: data that QEMU has not written to the disks is lost. If the
    /// supervisor is gone or does not answer.
    #[arg(long)]
    force: bool,
    /// Remove the overlays that the VM writes to. All that the VM has written to its disks since it
    /// was last saved or restored is lost.
    #[arg(long, conflicts_with = "keep")]
    discard: bool,
    /// Leave the overlays that the VM writes to, and print their paths (the default).
    #[arg(long)]
    keep: bool,
}

impl StopArgs {
    /// Runs the verb.
    pub fn run(&self, out: FactPrinter) -> Result<(), Failure> {
        let base = crate::hidden::runtime_dir()?;
        // The supervisor does not exist any more afterwards.
        let overlays = overlays::overlays_of(&base, &self.name);
        let command = self.next_command(&base);
        self.stop_vm(&base)
            .map_err(|failure| failure.while_doing(format!("can't stop {}", self.name)))?;
        let overlays = overlays::existing_overlays(overlays);
        let facts = serde_json::json!({
            "name": self.name,
            "stopped": true,
            "overlays": overlays,
            "command": command.as_ref().map(|it| &it.words),
        });
        out.print_facts(&facts, || {
            let go_on = command.map_or(String::new(), |it| it.describe_change("continue with"));
            format!("{} has ended\n{}{go_on}", self.name, overlays::overlay_lines(&overlays))
        })
    }

    /// The command line that starts the VM again on its newest layers. A supervisor that does not
    /// answer is not queried.
    fn next_command(&self, base: &RuntimeDir) -> Option<overlays::RestartCommand> {
        let inspected = inspect_vm(base, &base.vm_dir(&self.name)).ok()?;
        let is_attended = inspected.unattended.is_none() && !self.discard;
        is_attended.then(|| overlays::request_restart_command(base, &self.name)).flatten()
    }

    fn stop_vm(&self, base: &RuntimeDir) -> Result<(), Failure> {
        let (powerdown_s, force, discard) = (self.powerdown, self.force, self.discard);
        let request = StopRequest { powerdown_s, force, discard };
        if force {
            return stop_by_force(base, &self.name, request);
        }
        // A supervisor that does not answer would block this command for ever.
        if let Some(silent) = inspect_vm(base, &base.vm_dir(&self.name))?.unattended {
            return Err(Failure::new(FailureKind::Busy, silent.why).with_hint(silent.hint));
        }
        send_request(base, &self.name, &SupervisorRequest::Stop(request), &mut |_| ())
            .map(drop)
            .map_err(|failure| self.name_command(failure))
    }

    /// The supervisor's hint with the name of the VM, so that the user can copy the command.
    fn name_command(&self, mut failure: Failure) -> Failure {
        failure.hint = failure.hint.map(|hint| hint.replace("NAME", self.name.as_str()));
        failure
    }
}
