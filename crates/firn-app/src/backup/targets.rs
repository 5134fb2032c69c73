//! Opens the targets of a session: finds which has the latest state, and updates the others to it.

use std::path::Path;
use std::time::Duration;

use super::error::BackupError;
use super::file::FileSink;
use super::record::encode_state;
use super::remote::Remote;
use super::tls::Identity;
use super::{Compression, Fsync, Helper, Image, Log, Place, Target};

enum Opened {
    File { log: Log, sequence: u64, fsync: Fsync },
    Remote(Box<Remote>, u64),
}

/// Opens all targets, and returns the latest state that any of them has.
pub(crate) fn open(
    name: &str,
    targets: &[Target],
    discard: bool,
) -> Result<(Vec<Helper>, Image), BackupError> {
    let mut latest = Image::default();
    let mut opened = Vec::new();
    for target in targets {
        opened.push(match &target.place {
            Place::File { path, fsync } => open_file(path, name, *fsync, &mut latest)?,
            Place::Remote { address, identity, patience } => {
                open_remote(address, name, identity, *patience, target.compression, &mut latest)?
            }
        });
    }
    if discard {
        latest = Image::default();
    }
    let helpers =
        opened.into_iter().zip(targets).map(|(opened, target)| start(opened, target, &latest));
    Ok((helpers.collect::<Result<_, _>>()?, latest))
}

fn open_file(
    path: &Path,
    name: &str,
    fsync: Fsync,
    latest: &mut Image,
) -> Result<Opened, BackupError> {
    let (log, image) = Log::open(path, name)?;
    let sequence = image.sequence();
    if sequence > latest.sequence() {
        *latest = image;
    }
    Ok(Opened::File { log, sequence, fsync })
}

fn open_remote(
    address: &str,
    name: &str,
    identity: &Identity,
    patience: Duration,
    compression: Compression,
    latest: &mut Image,
) -> Result<Opened, BackupError> {
    let (mut remote, sequence) = Remote::open(address, name, identity, patience, compression)?;
    if sequence > latest.sequence() {
        *latest = remote.get()?;
    }
    Ok(Opened::Remote(Box::new(remote), sequence))
}

fn start(opened: Opened, target: &Target, latest: &Image) -> Result<Helper, BackupError> {
    let (sequence, compression) = (latest.sequence(), target.compression);
    let started = match opened {
        Opened::File { mut log, sequence: has, fsync } => {
            if has != sequence {
                log.replace(&encode_state(latest, compression))?;
            }
            let sink = FileSink::new(log, latest.clone(), fsync, compression);
            Helper::start(sink, sequence, target.acknowledge)
        }
        Opened::Remote(mut remote, has) => {
            match has == sequence {
                true => remote.agree(latest.clone()),
                false => remote.replace(latest.clone())?,
            }
            Helper::start(*remote, sequence, target.acknowledge)
        }
    };
    let path = || format!("firn-app-backup of {:?}", target.place).into();
    started.map_err(|source| BackupError::File {
        what: "cannot start the thread",
        path: path(),
        source,
    })
}
