//! `firn-app-backup`: stores the logs of applications that run on other hosts.
//!
//! Exit code: 0 ended by SIGTERM or SIGINT, 1 it could not start.

#![forbid(unsafe_code)]

use std::io::Write as _;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context as _, Result};
use clap::Parser;
use firn_app::{BackupServer, BackupServerOptions, FsyncPolicy, TlsIdentity};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;

/// Receives committed transactions of applications and stores them, one log for each session.
///
/// After the loss of an application's host, start the application here, with a session that has the
/// log NAME.log as its target. End this program first, because it locks the logs.
#[derive(Parser)]
#[command(version)]
struct BackupCommand {
    /// The address to listen on: HOST:PORT.
    #[arg(long)]
    listen: String,
    /// The directory of the logs.
    #[arg(long)]
    directory: PathBuf,
    /// This host's certificate (PEM).
    #[arg(long)]
    certificate: PathBuf,
    /// The certificate's private key (PEM).
    #[arg(long)]
    key: PathBuf,
    /// The authority that signed the applications' certificates (PEM).
    #[arg(long)]
    authority: PathBuf,
    /// A table of permissions (TOML): which certificates may read, append to and take over which
    /// sessions. The table is read for each new connection. After SIGHUP it also applies to open
    /// connections. Without a table, a session belongs to the certificate that created it.
    #[arg(long)]
    sessions: Option<PathBuf>,
    /// When logs are forced to disk: commit, never, or a number of milliseconds.
    #[arg(long, default_value = "commit", value_parser = parse_fsync)]
    fsync: FsyncPolicy,
}

fn parse_fsync(text: &str) -> Result<FsyncPolicy, String> {
    match text {
        "commit" => Ok(FsyncPolicy::EveryCommit),
        "never" => Ok(FsyncPolicy::Never),
        number => number
            .parse()
            .map(|ms| FsyncPolicy::Interval(Duration::from_millis(ms)))
            .map_err(|_| "commit, never, or a number of milliseconds".to_owned()),
    }
}

fn main() -> ExitCode {
    match run(BackupCommand::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("firn-app-backup: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(cli: BackupCommand) -> Result<()> {
    let mut signals = Signals::new([SIGHUP, SIGINT, SIGTERM]).context("cannot wait for signals")?;
    let BackupCommand { certificate, key, authority, .. } = cli;
    let identity = TlsIdentity { certificate, key, authority };
    let mut options =
        BackupServerOptions::new(cli.listen, identity, cli.directory).fsync(cli.fsync);
    if let Some(table) = cli.sessions {
        options = options.sessions(table);
    }
    let server = BackupServer::start(options)?;
    // The user needs the port if port 0 was given.
    println!("listening on {}", server.address());
    std::io::stdout().flush().context("cannot print the address")?;
    for signal in signals.forever() {
        if signal != SIGHUP {
            break;
        }
        if let Err(error) = server.reload() {
            eprintln!(
                "firn-app-backup: {error}; new connections are refused until the table is correct"
            );
        }
    }
    drop(server);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory as _;

    #[test]
    fn the_manual_page_has_every_option() {
        let page = include_str!("../man/firn-app-backup.1");
        let (_, options) = page.split_once(".SH OPTIONS").unwrap();
        let command = BackupCommand::command();
        let names: Vec<_> = command.get_arguments().filter_map(clap::Arg::get_long).collect();
        assert!(names.contains(&"fsync"), "{names:?}");
        for name in names {
            assert!(options.contains(&format!("--{name}")), "{name}");
        }
    }
}
