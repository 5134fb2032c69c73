//! The program `firn-store`, which the verbs of `firn` run for what is in object storage.
//!
//! ```text
//!   firn image push web.firn s3://vms/web.firn        checks paths; prints facts, progress, failures
//!      |  firn-store push web.firn s3://vms/web.firn     ^
//!      v                                                 | standard output: one JSON value per line
//!   firn-store: clients of stores, TLS  -----------------'
//! ```
//!
//! So `firn`, of which each supervisor is an instance, is not linked with clients of stores. Credentials
//! are in the environment, and on no command line.

#![forbid(unsafe_code)]

use std::process::ExitCode;

use clap::Parser;
use firn_supervisor::SupervisorReply;
use rustix::process::{Signal, set_parent_process_death_signal};

mod commands;
mod store_failure;

use commands::StoreCommand;

/// Copies images to and from object storage, for `firn`.
///
/// `firn image push`, `pull`, `ls` and `rm` run this program. It prints one JSON value per line:
/// progress, then facts or a failure.
#[derive(Debug, Parser)]
#[command(name = "firn-store", version, disable_help_subcommand = true)]
struct StoreCli {
    #[command(subcommand)]
    command: StoreCommand,
}

fn main() -> ExitCode {
    let cli = StoreCli::parse();
    // An upload of a command that was killed does not continue.
    let _ = set_parent_process_death_signal(Some(Signal::KILL));
    match cli.command.run() {
        Ok(facts) => {
            commands::print_reply(&SupervisorReply::Done { facts });
            ExitCode::SUCCESS
        }
        Err(failure) => {
            let code = failure.kind.exit_code();
            commands::print_reply(&SupervisorReply::Failed(failure));
            ExitCode::from(code)
        }
    }
}
