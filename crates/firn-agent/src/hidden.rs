//! Internal commands: supervisors and guards run the same program that starts them.

use clap::Args;
use firn_supervisor::{
    Context as _, Failure, RuntimeDir, VmName, guard, recover, supervise, watcher,
};

/// Manages a VM.
#[derive(Debug, Args)]
pub struct Supervise {
    /// The VM.
    name: VmName,
    /// Take over from a dead supervisor.
    #[arg(long)]
    recover: bool,
}

/// Restarts a VM's supervisor.
#[derive(Debug, Args)]
pub struct Guard {
    /// The VM.
    name: VmName,
    /// Act only where the guard does not.
    #[arg(long)]
    watcher: bool,
}

impl Supervise {
    /// Runs the verb.
    pub fn run(&self) -> Result<(), Failure> {
        let base = RuntimeDir::from_env().doing("managing the VM")?;
        let done = match self.recover {
            true => recover(&base, &self.name),
            false => supervise(&base, &self.name),
        };
        done.doing("managing the VM")
    }
}

impl Guard {
    /// Runs the verb.
    pub fn run(&self) -> Result<(), Failure> {
        let base = RuntimeDir::from_env().doing("guarding the supervisor")?;
        let done = match self.watcher {
            true => watcher(&base, &self.name),
            false => guard(&base, &self.name),
        };
        done.doing("guarding the supervisor")
    }
}
