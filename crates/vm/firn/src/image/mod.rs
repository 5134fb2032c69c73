//! `firn image`: its subcommands.

use clap::{Args as ClapArgs, Subcommand};
use firn_supervisor::Failure;

use crate::output::FactPrinter;

mod chain;
mod compare;
mod inspect;
mod merge;
pub mod open;
mod rebase;
mod reorder;
mod restorable;
mod rewrite;
mod rm;
mod verify;

/// Inspect, check and rewrite images.
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
        }
    }
}
