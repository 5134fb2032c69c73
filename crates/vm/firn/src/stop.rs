//! `firn stop`

use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use clap::Args as ClapArgs;
use firn_supervisor::{
    Failure, FailureKind, RuntimeDir, StopRequest, SupervisorRequest, VmName, inspect_vm,
    send_request, stop_by_force,
};

use crate::output::FactPrinter;
use crate::overlays;
use crate::units;

/// End VMs.
///
/// Without options this is like pulling the plug: QEMU flushes its disks and ends, without notice
/// to the guest. If QEMU does not end on this request, the VM continues to run: only --force kills
/// QEMU.
///
/// After a checkpoint a VM may write to layers on top of its disks' files. Then the command prints
/// the command line that starts the VM with the newest layers. `firn disk commit` merges the layers
/// of a running VM into its disks' original files.
///
/// Several VMs are ended at the same time. If one of them can't be ended, the others are ended all the
/// same, and the command fails.
#[derive(Debug, ClapArgs)]
#[command(after_long_help = "Examples:
  firn stop web
  firn stop web-1 web-2 web-3 --discard
  # press the guest's power button, and wait 10 seconds
  firn stop web --powerdown=10
  # drop what it wrote to disks since the last checkpoint
  firn stop web --discard")]
pub struct StopArgs {
    /// The VMs.
    #[arg(required = true, value_name = "NAME")]
    names: Vec<VmName>,
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

/// The VMs that are ended at the same time.
const AT_ONCE: usize = 8;

impl StopArgs {
    /// Runs the verb.
    pub fn run(&self, out: FactPrinter) -> Result<(), Failure> {
        let base = crate::hidden::runtime_dir()?;
        let names = self.distinct_names();
        let ends = names.iter().map(|name| VmEnd { args: self, base: &base, name });
        let ended = end_all(&ends.collect::<Vec<_>>());
        let (stopped, failures): (Vec<_>, Vec<_>) = ended.into_iter().partition(Result::is_ok);
        let stopped: Vec<StoppedVm> = stopped.into_iter().filter_map(Result::ok).collect();
        let text = || stopped.iter().map(StoppedVm::describe).collect::<Vec<_>>().join("\n");
        match (&stopped[..], names.len()) {
            ([one], 1) => out.print_facts(&one.facts(), text)?,
            ([], _) => {}
            (all, _) => {
                let facts: Vec<_> = all.iter().map(StoppedVm::facts).collect();
                out.print_facts(&facts, text)?;
            }
        }
        let failures: Vec<Failure> = failures.into_iter().filter_map(Result::err).collect();
        join_failures(failures).map_or(Ok(()), Err)
    }

    fn distinct_names(&self) -> Vec<&VmName> {
        let mut names: Vec<&VmName> = Vec::new();
        for name in &self.names {
            if !names.contains(&name) {
                names.push(name);
            }
        }
        names
    }
}

/// Ends VMs, several at the same time. The results have their order.
fn end_all(ends: &[VmEnd<'_>]) -> Vec<Result<StoppedVm, Failure>> {
    let next = AtomicUsize::new(0);
    let results = Mutex::new(Vec::new());
    let end_next = || {
        while let Some((number, end)) = {
            let number = next.fetch_add(1, Ordering::Relaxed);
            ends.get(number).map(|end| (number, end))
        } {
            let result = end.end_vm();
            results
                .lock()
                .unwrap_or_else(std::sync::PoisonError::into_inner)
                .push((number, result));
        }
    };
    std::thread::scope(|scope| {
        (0..AT_ONCE.min(ends.len())).for_each(|_| drop(scope.spawn(end_next)));
    });
    let mut results = results.into_inner().unwrap_or_else(std::sync::PoisonError::into_inner);
    results.sort_by_key(|(number, _)| *number);
    results.into_iter().map(|(_, result)| result).collect()
}

/// One failure with the reasons of all.
fn join_failures(failures: Vec<Failure>) -> Option<Failure> {
    let mut failures = failures.into_iter();
    let mut first = failures.next()?;
    let others: Vec<String> = failures.map(|failure| failure.to_string()).collect();
    if !others.is_empty() {
        let all: Vec<String> = std::iter::once(first.to_string()).chain(others).collect();
        first.chain = vec![all.join("; ")];
    }
    Some(first)
}

/// A VM that has ended.
struct StoppedVm {
    name: VmName,
    overlays: Vec<std::path::PathBuf>,
    command: Option<overlays::RestartCommand>,
}

impl StoppedVm {
    fn facts(&self) -> serde_json::Value {
        serde_json::json!({
            "name": self.name,
            "stopped": true,
            "overlays": self.overlays,
            "command": self.command.as_ref().map(|it| &it.words),
        })
    }

    fn describe(&self) -> String {
        let command = self.command.as_ref();
        let go_on = command.map_or(String::new(), |it| it.describe_change("continue with"));
        let overlays = overlays::overlay_lines(&self.overlays);
        format!("{} has ended\n{overlays}{go_on}", self.name).trim_end_matches('\n').to_owned()
    }
}

/// The end of one VM.
struct VmEnd<'a> {
    args: &'a StopArgs,
    base: &'a RuntimeDir,
    name: &'a VmName,
}

impl VmEnd<'_> {
    fn end_vm(&self) -> Result<StoppedVm, Failure> {
        // The supervisor does not exist any more afterwards.
        let overlays = overlays::overlays_of(self.base, self.name);
        let command = self.next_command();
        self.stop_vm()
            .map_err(|failure| failure.while_doing(format!("can't stop {}", self.name)))?;
        let overlays = overlays::existing_overlays(overlays);
        Ok(StoppedVm { name: self.name.clone(), overlays, command })
    }

    /// The command line that starts the VM again on its newest layers. A supervisor that does not
    /// answer is not queried.
    fn next_command(&self) -> Option<overlays::RestartCommand> {
        let (base, name) = (self.base, self.name);
        let inspected = inspect_vm(base, &base.vm_dir(name)).ok()?;
        let is_attended = inspected.unattended.is_none() && !self.args.discard;
        is_attended.then(|| overlays::request_restart_command(base, name)).flatten()
    }

    fn stop_vm(&self) -> Result<(), Failure> {
        let (base, name) = (self.base, self.name);
        let StopArgs { powerdown: powerdown_s, force, discard, .. } = *self.args;
        let request = StopRequest { powerdown_s, force, discard };
        if force {
            return stop_by_force(base, name, request);
        }
        // A supervisor that does not answer would block this command for ever.
        if let Some(silent) = inspect_vm(base, &base.vm_dir(name))?.unattended {
            return Err(Failure::new(FailureKind::Busy, silent.why).with_hint(silent.hint));
        }
        send_request(base, name, &SupervisorRequest::Stop(request), &mut |_| ())
            .map(drop)
            .map_err(|failure| self.name_command(failure))
    }

    /// The supervisor's hint with the name of the VM, so that the user can copy the command.
    fn name_command(&self, mut failure: Failure) -> Failure {
        failure.hint = failure.hint.map(|hint| hint.replace("NAME", self.name.as_str()));
        failure
    }
}
