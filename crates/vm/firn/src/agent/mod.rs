//! `firn agent`

use clap::{Args as ClapArgs, Subcommand};
use firn_supervisor::Failure;

use crate::output::FactPrinter;

mod drain;
mod status;

/// Query this host's agent about other hosts, and drain a host.
#[derive(Debug, ClapArgs)]
pub struct AgentCommandArgs {
    #[command(subcommand)]
    verb: AgentCommand,
}

#[derive(Debug, Subcommand)]
enum AgentCommand {
    Status(status::AgentStatusArgs),
    Drain(drain::DrainArgs),
    Undrain(drain::UndrainArgs),
}

impl AgentCommandArgs {
    /// Runs the verb.
    pub fn run(&self, out: FactPrinter) -> Result<(), Failure> {
        match &self.verb {
            AgentCommand::Status(args) => args.run(out),
            AgentCommand::Drain(args) => args.run(out),
            AgentCommand::Undrain(args) => args.run(out),
        }
    }
}
