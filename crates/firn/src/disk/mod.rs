//! `firn disk`

use clap::{Args as ClapArgs, Subcommand};
use firn_supervisor::{Failure, Request, VmName, ask};

use crate::bar::Bar;
use crate::output::Output;

mod commit;
mod merge;

/// Merge the layers of a VM's disks.
#[derive(Debug, ClapArgs)]
pub struct Args {
    #[command(subcommand)]
    verb: Verb,
}

#[derive(Debug, Subcommand)]
enum Verb {
    Commit(commit::Args),
    Merge(merge::Args),
}

impl Args {
    /// Runs the verb.
    pub fn run(&self, out: Output) -> Result<(), Failure> {
        match &self.verb {
            Verb::Commit(args) => args.run(out),
            Verb::Merge(args) => args.run(out),
        }
    }
}

/// Requests a merge from a VM's supervisor, and shows its progress.
fn merge(name: &VmName, request: &Request) -> Result<serde_json::Value, Failure> {
    let base = crate::hidden::runtime_dir()?;
    let mut bar = Bar::new();
    ask(&base, name, request, &mut |progress| bar.show(progress))
}
