//! `firn stop`

use clap::Args as ClapArgs;
use firn_supervisor::{
    Failure, FailureKind, Request, RuntimeDir, StopRequest, VmName, ask, inspect, stop_by_force,
};

use crate::output::Output;
use crate::overlays;

/// End a VM.
///
/// Without options this is pulling the plug: QEMU flushes its disks and ends, the guest is not asked. A QEMU that does not end by that
/// is left as it is: only --force kills it.
///
/// A VM that was checkpointed may write to layers over its disks' files. The command line to continue with, which names the
/// newest ones, is printed then; `firn disk commit` returns a running VM to its disks' own files.
///
/// Examples:
///   firn stop web
///   firn stop web --powerdown        press the guest's power button, and wait a minute
///   firn stop web --powerdown=10     ... ten seconds
///   firn stop web --discard          forget what it wrote to its disks since the last checkpoint
#[derive(Debug, ClapArgs)]
#[command(verbatim_doc_comment)]
pub struct Args {
    /// The VM.
    name: VmName,
    /// Press the guest's power button and wait this many seconds; it runs on if that is not enough.
    #[arg(
        long,
        value_name = "SECONDS",
        num_args = 0..=1,
        require_equals = true,
        default_missing_value = "60"
    )]
    powerdown: Option<u64>,
    /// End it in any case: while a checkpoint is being written (which is lost), if QEMU does not end when it is asked to (what it
    /// has not written to its disks is lost), and if its supervisor is gone or does not answer.
    #[arg(long)]
    force: bool,
    /// Remove the overlays that it writes to: what it wrote since it was last saved or restored is lost.
    #[arg(long, conflicts_with = "keep")]
    discard: bool,
    /// Leave the overlays that it writes to, and say where they are (the default).
    #[arg(long)]
    keep: bool,
}

impl Args {
    /// Runs the verb.
    pub fn run(&self, out: Output) -> Result<(), Failure> {
        let base = crate::hidden::runtime_dir()?;
        // Nobody can be asked afterwards.
        let overlays = overlays::of(&base, &self.name);
        let command = self.next_command(&base);
        self.stop(&base)
            .map_err(|failure| failure.while_doing(format!("can't stop {}", self.name)))?;
        let overlays = overlays::left(overlays);
        let facts = serde_json::json!({
            "name": self.name,
            "stopped": true,
            "overlays": overlays,
            "command": command.as_ref().map(|it| &it.words),
        });
        out.facts(&facts, || {
            let go_on = command.map_or(String::new(), |it| it.line("continue with"));
            format!("{} has ended\n{}{go_on}", self.name, overlays::lines(&overlays))
        })
    }

    /// The command line that starts the VM again on its newest layers. A supervisor that does not answer is not asked.
    fn next_command(&self, base: &RuntimeDir) -> Option<overlays::Command> {
        let inspected = inspect(base, &base.vm(&self.name)).ok()?;
        let is_attended = inspected.unattended.is_none() && !self.discard;
        is_attended.then(|| overlays::command(base, &self.name)).flatten()
    }

    fn stop(&self, base: &RuntimeDir) -> Result<(), Failure> {
        let (powerdown_s, force, discard) = (self.powerdown, self.force, self.discard);
        let request = StopRequest { powerdown_s, force, discard };
        if force {
            return stop_by_force(base, &self.name, request);
        }
        // One that does not answer would be waited for without end.
        if let Some(silent) = inspect(base, &base.vm(&self.name))?.unattended {
            return Err(Failure::new(FailureKind::Busy, silent.why).hint(silent.hint));
        }
        ask(base, &self.name, &Request::Stop(request), &mut |_| ()).map(drop)
    }
}
