//! `firn agent`

use clap::{Args as ClapArgs, Subcommand};
use firn_supervisor::Failure;

use crate::output::Output;

mod status;

/// Query this host's agent about other hosts.
#[derive(Debug, ClapArgs)]
pub struct Args {
    #[command(subcommand)]
    verb: Verb,
}

#[derive(Debug, Subcommand)]
enum Verb {
    Status(status::Args),
}

impl Args {
    /// Runs the verb.
    pub fn run(&self, out: Output) -> Result<(), Failure> {
        match &self.verb {
            Verb::Status(args) => args.run(out),
        }
    }
}
