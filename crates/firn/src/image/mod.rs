//! `firn image`

use std::path::Path;

use clap::{Args as ClapArgs, Subcommand};
use firn_image::{Image, ImageError};
use firn_supervisor::{Failure, FailureKind};

use crate::output::Output;

mod chain;
mod compare;
mod inspect;
mod merge;
mod rebase;
mod reorder;
mod restorable;
mod rewrite;
mod rm;
mod verify;

/// Inspect, check and rewrite images.
#[derive(Debug, ClapArgs)]
pub struct Args {
    #[command(subcommand)]
    verb: Verb,
}

#[derive(Debug, Subcommand)]
enum Verb {
    Inspect(inspect::Args),
    Verify(verify::Args),
    Reorder(reorder::Args),
    Chain(chain::Args),
    Merge(merge::Args),
    Rebase(rebase::Args),
    Rm(rm::Args),
    Compare(compare::Args),
}

impl Args {
    /// Runs the verb.
    pub fn run(&self, out: Output) -> Result<(), Failure> {
        match &self.verb {
            Verb::Inspect(args) => args.run(out),
            Verb::Verify(args) => args.run(out),
            Verb::Reorder(args) => args.run(out),
            Verb::Chain(args) => args.run(out),
            Verb::Merge(args) => args.run(out),
            Verb::Rebase(args) => args.run(out),
            Verb::Rm(args) => args.run(out),
            Verb::Compare(args) => args.run(out),
        }
    }
}

/// Opens an image.
pub fn open(path: &Path) -> Result<Image, Failure> {
    Image::open(path)
        .map_err(|error| failure(&error).while_doing(format!("opening {}", path.display())))
}

/// The failure for an error of an image, with its kind.
pub fn failure(error: &ImageError) -> Failure {
    firn_supervisor::image_failure(error)
}

/// The failure for a damaged image.
pub fn damaged(text: String) -> Failure {
    Failure::new(FailureKind::Damaged, text)
}

/// The number of threads to use: that of the processors.
pub fn threads() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}
