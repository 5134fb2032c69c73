//! `firn cluster`

use clap::{Args as ClapArgs, Subcommand};
use firn_supervisor::Failure;

use crate::output::Output;

mod create;
mod forget;
mod status;
mod verbs;

/// Protect several VMs as one virtual cluster, and show what the hosts' consensus records.
///
/// All verbs are for the backup host, where the cluster was made. Where hosts have consensus, any
/// other host may run `protect` as well, and every host may run `forget`.
#[derive(Debug, ClapArgs)]
pub struct Args {
    #[command(subcommand)]
    verb: Verb,
}

#[derive(Debug, Subcommand)]
enum Verb {
    Create(create::Args),
    Protect(verbs::Protect),
    Checkpoint(verbs::Checkpoint),
    Status(status::Args),
    Failover(verbs::Failover),
    Release(verbs::Release),
    Forget(forget::Args),
}

impl Args {
    /// Runs the verb.
    pub fn run(&self, out: Output) -> Result<(), Failure> {
        match &self.verb {
            Verb::Create(args) => args.run(out),
            Verb::Protect(args) => args.run(out),
            Verb::Checkpoint(args) => args.run(out),
            Verb::Status(args) => args.run(out),
            Verb::Failover(args) => args.run(out),
            Verb::Release(args) => args.run(out),
            Verb::Forget(args) => args.run(out),
        }
    }
}
