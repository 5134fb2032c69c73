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

use std::path::Path;
use std::process::ExitCode;

use clap::Parser;
use firn_cache::CacheDir;
use firn_objects::{CacheLimits, run_server, start_server};
use firn_supervisor::SupervisorReply;
use rustix::process::{Signal, set_parent_process_death_signal};
use tracing_subscriber::EnvFilter;

mod commands;

use commands::StoreCommand;

/// The environment variable that sets the log level, as for supervisors.
const LOG_VARIABLE: &str = "FIRN_LOG";

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

/// Is the server of a cache, or starts it. Its errors are for a log.
fn serve(directory: &Path, is_foreground: bool) -> ExitCode {
    let cache = CacheDir::at(directory);
    let done = match is_foreground {
        true => {
            let level = std::env::var(LOG_VARIABLE).unwrap_or_else(|_| "warn".to_owned());
            let filter = EnvFilter::try_new(level).unwrap_or_else(|_| EnvFilter::new("warn"));
            tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr).init();
            CacheLimits::from_env().and_then(|limits| run_server(&cache, limits))
        }
        false => start_server(&cache),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => {
            eprint!("{}", failure.describe("firn-store"));
            ExitCode::from(failure.kind.exit_code())
        }
    }
}

fn main() -> ExitCode {
    let cli = StoreCli::parse();
    if cli.command.ends_with_parent() {
        // An upload of a command that was killed does not continue.
        let _ = set_parent_process_death_signal(Some(Signal::KILL));
    }
    if let StoreCommand::Serve { directory, foreground } = &cli.command {
        return serve(directory, *foreground);
    }
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
