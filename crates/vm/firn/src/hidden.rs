//! The verbs of Firn's own processes.

use clap::Args as ClapArgs;
use firn_supervisor::{
    Failure, FailureContext, FailureKind, RuntimeDir, VmName, run_guard, run_successor,
    run_supervisor, run_template_holder, run_watcher,
};

/// Manages a VM.
#[derive(Debug, ClapArgs)]
pub struct SuperviseVmArgs {
    /// The VM.
    name: VmName,
    /// Recover after a supervisor that died.
    #[arg(long)]
    recover: bool,
}

/// Restarts a VM's supervisor.
#[derive(Debug, ClapArgs)]
pub struct GuardVmArgs {
    /// The VM.
    name: VmName,
    /// Act only where the guard does not.
    #[arg(long)]
    watcher: bool,
}

/// Holds the template of clones.
#[derive(Debug, ClapArgs)]
pub struct HoldTemplateArgs {}

impl HoldTemplateArgs {
    /// Runs the verb.
    pub fn run(&self) -> Result<(), Failure> {
        run_template_holder().while_doing("holding a template of guest memory")
    }
}

impl SuperviseVmArgs {
    /// Runs the verb.
    pub fn run(&self) -> Result<(), Failure> {
        let base = runtime_dir()?;
        let done = match self.recover {
            true => run_successor(&base, &self.name),
            false => run_supervisor(&base, &self.name),
        };
        done.while_doing("supervising the VM")
    }
}

impl GuardVmArgs {
    /// Runs the verb.
    pub fn run(&self) -> Result<(), Failure> {
        let base = runtime_dir()?;
        let done = match self.watcher {
            true => run_watcher(&base, &self.name),
            false => run_guard(&base, &self.name),
        };
        done.while_doing("guarding the supervisor")
    }
}

/// The runtime directory that the environment names.
pub fn runtime_dir() -> Result<RuntimeDir, Failure> {
    RuntimeDir::from_env()
        .while_doing_as(FailureKind::Host, "there is no runtime directory for VMs")
        .map_err(|failure| failure.with_hint("set FIRN_RUNTIME_DIR to a directory of your own"))
}
