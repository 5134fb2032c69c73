//! `firn cluster`

use clap::{Args as ClapArgs, Subcommand};
use firn_supervisor::Failure;

use crate::output::FactPrinter;

mod create;
mod forget;
mod status;
mod verbs;

/// Protect several VMs as one virtual cluster, and show the records of the hosts' consensus.
///
/// All verbs are for the backup host, where the cluster was made. Where hosts have consensus, any
/// other host may run `protect` as well, and every host may run `forget`.
#[derive(Debug, ClapArgs)]
pub struct ClusterCommandArgs {
    #[command(subcommand)]
    verb: ClusterCommand,
}

#[derive(Debug, Subcommand)]
enum ClusterCommand {
    Create(create::ClusterCreateArgs),
    Protect(verbs::ClusterProtectArgs),
    Checkpoint(verbs::ClusterCheckpointArgs),
    Status(status::ClusterStatusArgs),
    Failover(verbs::ClusterFailoverArgs),
    Release(verbs::ClusterReleaseArgs),
    Forget(forget::ClusterForgetArgs),
}

impl ClusterCommandArgs {
    /// Runs the verb.
    pub fn run(&self, out: FactPrinter) -> Result<(), Failure> {
        match &self.verb {
            ClusterCommand::Create(args) => args.run(out),
            ClusterCommand::Protect(args) => args.run(out),
            ClusterCommand::Checkpoint(args) => args.run(out),
            ClusterCommand::Status(args) => args.run(out),
            ClusterCommand::Failover(args) => args.run(out),
            ClusterCommand::Release(args) => args.run(out),
            ClusterCommand::Forget(args) => args.run(out),
        }
    }
}
