//! `firn standby`

use std::path::PathBuf;

use clap::Args as ClapArgs;
use firn_epochs::endpoint::Endpoint;
use firn_supervisor::{Failure, Plan, VmName, start};

use crate::bar::Bar;
use crate::output::Output;

/// Receive what a VM elsewhere writes, and be ready to run it.
///
/// Listens, waits until `firn protect` connects there, and starts a QEMU like the VM's own, which waits. The memory it will have
/// is brought up to date with each epoch, one behind the newest. `firn failover` has it run; `firn stop` ends it. Disks that
/// the VM reads must be at the same places here, and the same.
///
/// A disk that the VM's Firn serves (`firn run --help`) is copied to a file here, NAME.ID.FORMAT in this directory unless --disk says
/// where. It is that of the epoch which a failover runs. `firn stop` leaves it, `firn stop --discard` removes it.
///
/// Whoever connects says how QEMU is to be started: the socket is for you alone. Where the VM runs on another host, `firn protect
/// NAME --backup HOST` does all this by the hosts' agents; without them, have the socket carried by what knows who is there,
/// such as ssh.
///
/// Examples:
///   firn standby web-2 --listen unix:/run/web.standby
///   firn standby web-2 --listen unix:/run/web.standby --uplink net0=/run/passt-2.sock
///   ssh -N -L /run/web.standby:/run/web.standby backup     (where the VM runs)
#[derive(Debug, ClapArgs)]
#[command(verbatim_doc_comment)]
pub struct Args {
    /// What the VM is to be called here.
    name: VmName,
    /// Where its primary connects to: unix:PATH.
    #[arg(long, value_name = "ADDRESS")]
    listen: Endpoint,
    /// Another uplink for a network card here: the socket that its frames go to.
    #[arg(long = "uplink", value_name = "ID=PATH", value_parser = uplink)]
    uplinks: Vec<(String, String)>,
    /// The file of a disk of Firn's here. It must not be there yet.
    #[arg(long = "disk", value_name = "ID=PATH", value_parser = disk)]
    disks: Vec<(String, PathBuf)>,
}

impl Args {
    /// Runs the verb.
    pub fn run(&self, out: Output) -> Result<(), Failure> {
        let base = crate::hidden::runtime_dir()?;
        let plan = Plan::Standby {
            listen: self.listen.clone(),
            uplinks: self.uplinks.iter().cloned().collect(),
            disks: self.disks.iter().cloned().collect(),
        };
        let mut bar = Bar::new();
        let facts = start(&base, &self.name, &plan, &mut |progress| bar.show(progress))
            .map_err(|failure| failure.while_doing(format!("can't keep {} ready", self.name)))?;
        out.facts(&facts, || format!("{} receives, and waits for `firn failover`\n", self.name))
    }
}

/// A path that is absolute, for another directory is the VM's.
fn uplink(words: &str) -> Result<(String, String), String> {
    match words.split_once('=') {
        Some((id, path)) if !id.is_empty() && path.starts_with('/') => Ok((id.into(), path.into())),
        _ => Err("give ID=PATH, with an absolute path".to_owned()),
    }
}

/// From here on: the directory of the VM is another.
fn disk(words: &str) -> Result<(String, PathBuf), String> {
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
        assert_eq!(disk("d=/a=1"), Ok(("d".into(), "/a=1".into())));
        assert!(disk("d=a").unwrap().1.is_absolute());
        for words in ["", "d", "d=", "=/a"] {
            assert!(disk(words).is_err(), "{words}");
        }
    }

    #[test]
    fn an_uplink_has_an_id_and_an_absolute_path() {
        assert_eq!(uplink("net0=/run/u=1"), Ok(("net0".into(), "/run/u=1".into())));
        for words in ["", "net0", "net0=", "=/run/u", "net0=u"] {
            assert!(uplink(words).is_err(), "{words}");
        }
    }
}
