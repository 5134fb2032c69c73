//! `firn disk`

use clap::{Args as ClapArgs, Subcommand};
use firn_supervisor::{Failure, SupervisorRequest, VmName, send_request};

use crate::bar::TerminalBar;
use crate::output::FactPrinter;

mod commit;
mod merge;

/// Merge the layers of a VM's disks.
#[derive(Debug, ClapArgs)]
pub struct DiskCommandArgs {
    #[command(subcommand)]
    verb: DiskCommand,
}

#[derive(Debug, Subcommand)]
enum DiskCommand {
    Commit(commit::DiskCommitArgs),
    Merge(merge::DiskMergeArgs),
}

impl DiskCommandArgs {
    /// Runs the verb.
    pub fn run(&self, out: FactPrinter) -> Result<(), Failure> {
        match &self.verb {
            DiskCommand::Commit(args) => args.run(out),
            DiskCommand::Merge(args) => args.run(out),
        }
    }
}

/// Requests a merge from a VM's supervisor, and shows its progress.
fn request_merge(name: &VmName, request: &SupervisorRequest) -> Result<serde_json::Value, Failure> {
    let base = crate::hidden::runtime_dir()?;
    let mut bar = TerminalBar::new();
    send_request(&base, name, request, &mut |progress| bar.show_progress(progress))
}
