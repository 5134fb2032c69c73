//! `firn-app-backup`: keeps the logs of applications that run on other hosts.
//!
//! Exit code: 0 ended by SIGTERM or SIGINT, 1 it could not start.

#![forbid(unsafe_code)]

use std::io::Write as _;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context as _, Result};
use clap::Parser;
use firn_app::{Fsync, Identity, Server, ServerOptions};
use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::iterator::Signals;

/// Receives committed transactions of applications and keeps them, one log for each session.
///
/// An application whose host is gone is started here, with a session that has the log NAME.log as its target: end this
/// program first, which holds the logs.
#[derive(Parser)]
#[command(version)]
struct Cli {
    /// Where to listen: HOST:PORT.
    #[arg(long)]
    listen: String,
    /// Where the logs go.
    #[arg(long)]
    directory: PathBuf,
    /// This host's certificate (PEM).
    #[arg(long)]
    certificate: PathBuf,
    /// Its private key (PEM).
    #[arg(long)]
    key: PathBuf,
    /// The authority that signed the applications' certificates (PEM).
    #[arg(long)]
    authority: PathBuf,
    /// When logs are forced to disk: commit, never, or a number of milliseconds.
    #[arg(long, default_value = "commit", value_parser = fsync)]
    fsync: Fsync,
}

fn fsync(text: &str) -> Result<Fsync, String> {
    match text {
        "commit" => Ok(Fsync::EveryCommit),
        "never" => Ok(Fsync::Never),
        number => number
            .parse()
            .map(|ms| Fsync::Interval(Duration::from_millis(ms)))
            .map_err(|_| "commit, never, or a number of milliseconds".to_owned()),
    }
}

fn main() -> ExitCode {
    match run(Cli::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("firn-app-backup: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(cli: Cli) -> Result<()> {
    let mut signals = Signals::new([SIGINT, SIGTERM]).context("cannot wait for signals")?;
    let Cli { certificate, key, authority, .. } = cli;
    let identity = Identity { certificate, key, authority };
    let (listen, directory, fsync) = (cli.listen, cli.directory, cli.fsync);
    let server = Server::start(ServerOptions { listen, identity, directory, fsync })?;
    // For whoever started it with port 0.
    println!("listening on {}", server.address());
    std::io::stdout().flush().context("cannot say where")?;
    signals.forever().next();
    drop(server);
    Ok(())
}
