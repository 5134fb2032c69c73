//! `firn cluster`

use clap::{Args as ClapArgs, Subcommand};
use firn_supervisor::Failure;

use crate::output::Output;

mod create;
mod forget;
mod status;
mod verbs;

/// Protect several VMs together, and ask what hosts agree on.
///
/// All verbs are for the host that keeps the copies, where the cluster was made; where hosts agree, `protect` is for any other as well, and
/// `forget` for every host.
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
