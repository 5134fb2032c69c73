//! The `firn-agent` program: one per host.
//!
//! The agent starts the supervisors of standbys, and is their parent as long as it runs. It reaps
//! supervisors that have ended. Supervisors continue to run when the agent ends.

#![forbid(unsafe_code)]
#![allow(rustdoc::broken_intra_doc_links, reason = "doc comments of options are the help")]

use std::io::{self, Write as _};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use clap::{CommandFactory, Parser, Subcommand};
use clap_complete::Shell;
use firn_agent::{AgentConfig, DetectorTiming, HostIdentity, PreparedAgent, SupervisedVms};
use firn_control::AgentPaths;
use firn_control::usage;
use firn_supervisor::{Failure, FailureContext as _, FailureKind, RuntimeDir, restart_supervisors};
use rustix::process::{WaitOptions, wait};
use tokio::signal::unix::{SignalKind, signal};
use tracing_subscriber::EnvFilter;

mod internal_commands;

/// The environment variable that sets the log level, as for supervisors.
const LOG_VARIABLE: &str = "FIRN_LOG";

/// The default log level. Raft logs ten lines a second about a server that is lost; the agent logs
/// the important part of that itself.
const LOG_DEFAULT: &str = "info,openraft=off";

/// Time between two checks whether a VM has lost its supervisor and all of its guards.
const REVIVE_INTERVAL: Duration = Duration::from_secs(2);

/// The example of a configuration in the help. No line has more than 60 columns.
const NOTES: &str = r#"The configuration, with paths relative to it:
  # this host; its certificate is for this name
  name = "a"
  # for the peers; a host alone needs only its name
  listen = "10.0.0.1:7415"
  certificate = "a.pem"
  # for the owner alone
  key = "a.key"
  # has issued the certificates of all hosts
  authority = "ca.pem"
  # optional; metrics and a page, on this host only
  metrics = "127.0.0.1:9415"
  # optional; the page can move and fail over VMs
  page-actions = true
  # optional; names in certificates that open the page
  page-clients = ["ops"]
  # optional; as for firn(1)
  runtime-dir = "/run/firn"

  [peers]
  # its certificate must be for "b"
  b = "10.0.0.2:7415"

  # optional: a network of VMs, on all hosts that name it
  [networks.lan]
  # optional: a socket such as passt's, or tap = "tap0"
  uplink = "/run/passt.sock"

  # optional; how hosts agree which one may run which VM
  [membership]
  # this host or peers, three or more; then, once on each
  # of them: firn-agent found
  servers = ["a", "b", "c"]
  # the state that a server must not lose
  state-dir = "/var/lib/firn"
  # optional
  lease-ms = 800
  silence-ms = 1500

Membership where there is an etcd:
  [membership]
  etcd = ["https://10.0.0.9:2379"]
  # optional; the prefix of all keys
  prefix = "firn"
  # for https; has issued the certificates of the servers
  authority = "etcd-ca.pem"
  # optional, with key; the certificate of this host
  certificate = "etcd.pem"
  key = "etcd.key"

Environment:
  FIRN_RUNTIME_DIR  the directory of VMs, if runtime-dir is
                    not set; as for firn(1)
  FIRN_LOG          log level of standard error: error, warn,
                    info (the default), debug, trace"#;

/// Watch other hosts, and carry the epochs of protected VMs to them and from them.
///
/// One agent runs on each host, as the user of the VMs. `firn protect NAME --backup HOST` and `firn
/// agent status` send their requests to this agent. Its peers are the agents of other hosts, which
/// identify themselves by certificates. A peer can have programs run on this host, so the
/// configuration must name only hosts that may do that.
///
/// Exit codes are those of firn(1). The agent ends by SIGTERM or SIGINT with 0; protected VMs then
/// continue unprotected, and standbys wait.
#[derive(Debug, Parser)]
#[command(name = "firn-agent", version, disable_help_subcommand = true, after_long_help = NOTES)]
struct Cli {
    #[command(subcommand)]
    verb: AgentVerb,
}

#[derive(Debug, Subcommand)]
enum AgentVerb {
    /// Run this host's agent until a signal ends it.
    Run {
        /// The configuration.
        file: PathBuf,
    },
    /// Check a configuration and its certificates.
    Check {
        /// The configuration.
        file: PathBuf,
    },
    /// Make this host a server of a new cluster.
    ///
    /// Run this command once on each host that `servers` of `[membership]` names, before the agent
    /// of that host runs. From then on records are stored in `state-dir`. A host that has lost this
    /// directory must not return under the same name: the host could have forgotten what it has
    /// acknowledged.
    Found {
        /// The configuration.
        file: PathBuf,
    },
    /// Print a shell's completion script.
    Completions {
        /// The shell.
        shell: Shell,
    },
    /// Write the manual pages, for `make install`.
    #[command(name = "__man", hide = true)]
    Man {
        /// The directory.
        directory: PathBuf,
    },
    #[command(name = firn_supervisor::SUPERVISE, hide = true)]
    Supervise(internal_commands::SuperviseArgs),
    #[command(name = firn_supervisor::GUARD, hide = true)]
    Guard(internal_commands::GuardArgs),
}

fn main() -> ExitCode {
    let done = match Cli::try_parse() {
        Ok(cli) => run_verb(cli.verb),
        Err(error) => match usage::usage_failure(&error) {
            Some(failure) => Err(failure),
            None => error.exit(),
        },
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => {
            // There is no other output for this error.
            let _ = io::stderr().lock().write_all(failure.describe("firn-agent").as_bytes());
            ExitCode::from(failure.kind.exit_code())
        }
    }
}

fn run_verb(verb: AgentVerb) -> Result<(), Failure> {
    match verb {
        AgentVerb::Run { file } => run(&file),
        AgentVerb::Check { file } => check_config(&file),
        AgentVerb::Found { file } => bootstrap_server(&file),
        AgentVerb::Completions { shell } => {
            let mut script = Vec::new();
            clap_complete::generate(shell, &mut Cli::command(), "firn-agent", &mut script);
            print_text(&String::from_utf8_lossy(&script))
        }
        AgentVerb::Man { directory } => clap_mangen::generate_to(Cli::command(), &directory)
            .while_doing(format!("writing manual pages to {}", directory.display())),
        AgentVerb::Supervise(args) => args.run(),
        AgentVerb::Guard(args) => args.run(),
    }
}

/// Prints to standard output. A reader that has closed the pipe is no error.
fn print_text(text: &str) -> Result<(), Failure> {
    let mut out = io::stdout().lock();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Err(error) if error.kind() != io::ErrorKind::BrokenPipe => {
            Err(error).while_doing("writing to standard output")
        }
        _ => Ok(()),
    }
}

fn load_config(file: &Path) -> Result<AgentConfig, Failure> {
    AgentConfig::load(file)
        .while_doing_as(FailureKind::Usage, format!("can't use {}", file.display()))
}

fn check_config(file: &Path) -> Result<(), Failure> {
    let config = load_config(file)?;
    HostIdentity::load(&config)
        .while_doing_as(FailureKind::Usage, format!("can't use {}", file.display()))?;
    let (name, peers) = (&config.name, config.peers.len());
    print_text(&match &config.entrance {
        Some(entrance) => format!("host {name} with {peers} peers, at {}\n", entrance.listen),
        None => format!("host {name} alone: it has no peers\n"),
    })
}

fn bootstrap_server(file: &Path) -> Result<(), Failure> {
    let config = load_config(file)?;
    let servers = firn_agent::membership::bootstrap_server(&config)?;
    print_text(&format!("host {} is one of the servers {}\n", config.name, servers.join(", ")))
}

fn run(file: &Path) -> Result<(), Failure> {
    start_logging();
    let config = load_config(file)?;
    let base = match &config.runtime_dir {
        Some(path) => RuntimeDir::from_path(path),
        None => RuntimeDir::from_env()
            .while_doing_as(FailureKind::Host, "there is no runtime directory")
            .map_err(|failure| failure.with_hint("set runtime-dir in the configuration"))?,
    };
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build();
    let runtime = runtime.while_doing_as(FailureKind::Host, "starting threads")?;
    let done = runtime.block_on(serve_agent(config, base));
    // Threads that wait for a supervisor do not delay the end of the process.
    runtime.shutdown_background();
    done
}

async fn serve_agent(config: AgentConfig, base: RuntimeDir) -> Result<(), Failure> {
    let mut end = [SignalKind::terminate(), SignalKind::interrupt()].map(signal);
    let [Ok(terminate), Ok(interrupt)] = &mut end else {
        return Err(Failure::new(FailureKind::Host, "signals can't be waited for"));
    };
    let children = signal(SignalKind::child()).while_doing("waiting for children")?;
    let vms = Arc::new(SupervisedVms(base.clone()));
    let ready =
        PreparedAgent::new(config, AgentPaths::new(base.clone()), vms, DetectorTiming::default())
            .await?;
    revive_for_ever(base)?;
    let agent = ready.agent();
    // For a caller that has configured port 0.
    let name = &agent.config.name;
    print_text(&match agent.listen {
        Some(listen) => format!("host {name} listens at {listen}\n"),
        None => format!("host {name} runs alone\n"),
    })?;
    tokio::spawn(reap_children(children));
    tokio::select! {
        () = ready.serve_forever() => Err(Failure::new(FailureKind::Other, "a part of the agent has ended")),
        _ = terminate.recv() => Ok(()),
        _ = interrupt.recv() => Ok(()),
    }
}

/// Starts supervisors for VMs of this host whose supervisor and guards have all died.
fn revive_for_ever(base: RuntimeDir) -> Result<(), Failure> {
    let thread = std::thread::Builder::new().name("revive".into());
    let revived = thread.spawn(move || {
        loop {
            std::thread::sleep(REVIVE_INTERVAL);
            restart_supervisors(&base);
        }
    });
    revived.map(drop).while_doing_as(FailureKind::Host, "starting threads")
}

/// Reaps supervisors: they are children that no other code waits for.
async fn reap_children(mut children: tokio::signal::unix::Signal) {
    while children.recv().await.is_some() {
        while let Ok(Some(_)) = wait(WaitOptions::NOHANG) {}
    }
}

fn start_logging() {
    let filter =
        EnvFilter::try_from_env(LOG_VARIABLE).unwrap_or_else(|_| EnvFilter::new(LOG_DEFAULT));
    let _ = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_ansi(false)
        .with_target(false)
        .with_writer(io::stderr)
        .try_init();
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_line_contradicts_itself_nowhere() {
        Cli::command().debug_assert();
    }
}
