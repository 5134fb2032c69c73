//! Internal commands: supervisors and guards run the same program that starts them.

use clap::Args;
use firn_supervisor::{
    Failure, FailureContext as _, RuntimeDir, VmName, run_guard, run_successor, run_supervisor,
    run_watcher,
};

/// Manages a VM.
#[derive(Debug, Args)]
pub struct SuperviseArgs {
    /// The VM.
    name: VmName,
    /// Take over from a dead supervisor.
    #[arg(long)]
    recover: bool,
}

/// Restarts a VM's supervisor.
#[derive(Debug, Args)]
pub struct GuardArgs {
    /// The VM.
    name: VmName,
    /// Act only where the guard does not.
    #[arg(long)]
    watcher: bool,
}

impl SuperviseArgs {
    /// Runs the verb.
    pub fn run(&self) -> Result<(), Failure> {
        let base = RuntimeDir::from_env().while_doing("managing the VM")?;
        let done = match self.recover {
            true => run_successor(&base, &self.name),
            false => run_supervisor(&base, &self.name),
        };
        done.while_doing("managing the VM")
    }
}

impl GuardArgs {
    /// Runs the verb.
    pub fn run(&self) -> Result<(), Failure> {
        let base = RuntimeDir::from_env().while_doing("guarding the supervisor")?;
        let done = match self.watcher {
            true => run_watcher(&base, &self.name),
            false => run_guard(&base, &self.name),
        };
        done.while_doing("guarding the supervisor")
    }
}
