//! The verbs of Firn's own processes.

use clap::Args as ClapArgs;
use firn_supervisor::{
    Context, Failure, FailureKind, RuntimeDir, VmName, guard, recover, supervise, watcher,
};

/// Manages a VM.
#[derive(Debug, ClapArgs)]
pub struct Supervise {
    /// The VM.
    name: VmName,
    /// Recover after a supervisor that died.
    #[arg(long)]
    recover: bool,
}

/// Restarts a VM's supervisor.
#[derive(Debug, ClapArgs)]
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
        let base = runtime_dir()?;
        let done = match self.recover {
            true => recover(&base, &self.name),
            false => supervise(&base, &self.name),
        };
        done.doing("supervising the VM")
    }
}

impl Guard {
    /// Runs the verb.
    pub fn run(&self) -> Result<(), Failure> {
        let base = runtime_dir()?;
        let done = match self.watcher {
            true => watcher(&base, &self.name),
            false => guard(&base, &self.name),
        };
        done.doing("guarding the supervisor")
    }
}

/// The runtime directory that the environment names.
pub fn runtime_dir() -> Result<RuntimeDir, Failure> {
    RuntimeDir::from_env()
        .doing_or(FailureKind::Host, "there is no runtime directory for VMs")
        .map_err(|failure| failure.hint("set FIRN_RUNTIME_DIR to a directory of your own"))
}
