//! `firn image`: its subcommands.

use clap::{Args as ClapArgs, Subcommand};
use firn_supervisor::Failure;

use crate::output::FactPrinter;

mod chain;
mod compare;
mod inspect;
mod ls;
mod merge;
pub mod open;
mod pull;
mod push;
mod rebase;
mod reorder;
mod restorable;
mod rewrite;
mod rm;
pub mod stored;
mod verify;

/// Inspect, check, rewrite, push and pull images.
#[derive(Debug, ClapArgs)]
pub struct ImageCommandArgs {
    #[command(subcommand)]
    verb: ImageCommand,
}

#[derive(Debug, Subcommand)]
enum ImageCommand {
    Inspect(inspect::ImageInspectArgs),
    Verify(verify::ImageVerifyArgs),
    Reorder(reorder::ImageReorderArgs),
    Chain(chain::ImageChainArgs),
    Merge(merge::ImageMergeArgs),
    Rebase(rebase::ImageRebaseArgs),
    Rm(rm::ImageRmArgs),
    Compare(compare::ImageCompareArgs),
    Push(push::ImagePushArgs),
    Pull(pull::ImagePullArgs),
    Ls(ls::ImageLsArgs),
}

impl ImageCommandArgs {
    /// Runs the subcommand that the user chose.
    pub fn run(&self, out: FactPrinter) -> Result<(), Failure> {
        match &self.verb {
            ImageCommand::Inspect(args) => args.run(out),
            ImageCommand::Verify(args) => args.run(out),
            ImageCommand::Reorder(args) => args.run(out),
            ImageCommand::Chain(args) => args.run(out),
            ImageCommand::Merge(args) => args.run(out),
            ImageCommand::Rebase(args) => args.run(out),
            ImageCommand::Rm(args) => args.run(out),
            ImageCommand::Compare(args) => args.run(out),
            ImageCommand::Push(args) => args.run(out),
            ImageCommand::Pull(args) => args.run(out),
            ImageCommand::Ls(args) => args.run(out),
        }
    }
}
