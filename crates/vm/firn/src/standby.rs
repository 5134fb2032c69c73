//! `firn standby`

use std::path::PathBuf;

use clap::Args as ClapArgs;
use firn_epochs::endpoint::BackupEndpoint;
use firn_supervisor::{Failure, SupervisorPlan, VmName, start_supervisor};

use crate::bar::TerminalBar;
use crate::output::FactPrinter;

/// Receive the epochs of a VM on another host, and be ready to run it.
///
/// The command listens, and waits until `firn protect` connects. Then it starts a QEMU like that of
/// the VM. This QEMU is the standby: its vCPUs do not run, and its memory is that of the epoch
/// before the newest that arrived. `firn failover` runs the standby; `firn stop` ends it. Disks
/// that the VM only reads must exist at the same paths on this host, with the same contents.
///
/// A disk that the VM's Firn serves (`firn run --help`) is copied to a file on this host,
/// NAME.ID.FORMAT in the current directory unless --disk gives a path. The file has the state of
/// the epoch from which a failover would continue. `firn stop` leaves the file, `firn stop
/// --discard` removes it.
///
/// Only you can access the socket, because the process that connects to it determines how QEMU is
/// started. If the VM runs on another host, `firn protect NAME --backup HOST` does all this through
/// the hosts' agents; without agents, forward the socket by a program that authenticates its peer,
/// such as ssh.
#[derive(Debug, ClapArgs)]
#[command(after_long_help = r"Examples:
  firn standby web-2 --listen unix:/run/web.standby
  firn standby web-2 --listen unix:/run/web.standby \
    --uplink net0=/run/passt-2.sock
  # on the host where the VM runs
  ssh -N -L /run/web.standby:/run/web.standby backup")]
pub struct StandbyArgs {
    /// The name to give the VM on this host.
    name: VmName,
    /// The address that its primary connects to: unix:PATH.
    #[arg(long, value_name = "ADDRESS")]
    listen: BackupEndpoint,
    /// Another uplink for a network card on this host: the socket that its frames go to.
    #[arg(long = "uplink", value_name = "ID=PATH", value_parser = parse_uplink)]
    uplinks: Vec<(String, String)>,
    /// The file on this host for a disk that Firn serves. It must not exist yet.
    #[arg(long = "disk", value_name = "ID=PATH", value_parser = parse_disk)]
    disks: Vec<(String, PathBuf)>,
}

impl StandbyArgs {
    /// Runs the verb.
    pub fn run(&self, out: FactPrinter) -> Result<(), Failure> {
        let base = crate::hidden::runtime_dir()?;
        let plan = SupervisorPlan::Standby {
            listen: self.listen.clone(),
            uplinks: self.uplinks.iter().cloned().collect(),
            disks: self.disks.iter().cloned().collect(),
        };
        let mut bar = TerminalBar::new();
        let facts =
            start_supervisor(&base, &self.name, &plan, &mut |progress| bar.show_progress(progress))
                .map_err(|failure| {
                    failure.while_doing(format!("cannot keep {} ready", self.name))
                })?;
        out.print_facts(&facts, || {
            format!("{} receives epochs, and waits for `firn failover`\n", self.name)
        })
    }
}

/// Parses an ID and a path. The path must be absolute, because the supervisor has another current
/// directory.
fn parse_uplink(words: &str) -> Result<(String, String), String> {
    match words.split_once('=') {
        Some((id, path)) if !id.is_empty() && path.starts_with('/') => Ok((id.into(), path.into())),
        _ => Err("give ID=PATH, with an absolute path".to_owned()),
    }
}

/// Parses an ID and a path. The path is made absolute, because the supervisor has another current
/// directory.
fn parse_disk(words: &str) -> Result<(String, PathBuf), String> {
    match words.split_once('=') {
        Some((id, path)) if !id.is_empty() && !path.is_empty() => {
            let path = std::path::absolute(path).map_err(|error| error.to_string())?;
            Ok((id.into(), path))
        }
        _ => Err("give ID=PATH".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_disk_has_an_id_and_a_path() {
        assert_eq!(parse_disk("d=/a=1"), Ok(("d".into(), "/a=1".into())));
        assert!(parse_disk("d=a").unwrap().1.is_absolute());
        for words in ["", "d", "d=", "=/a"] {
            assert!(parse_disk(words).is_err(), "{words}");
        }
    }

    #[test]
    fn an_uplink_has_an_id_and_an_absolute_path() {
        assert_eq!(parse_uplink("net0=/run/u=1"), Ok(("net0".into(), "/run/u=1".into())));
        for words in ["", "net0", "net0=", "=/run/u", "net0=u"] {
            assert!(parse_uplink(words).is_err(), "{words}");
        }
    }
}
