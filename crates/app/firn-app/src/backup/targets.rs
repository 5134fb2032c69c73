//! Opens the targets of a session: finds which has the latest state, and updates the others to it.

use std::path::Path;
use std::time::Duration;

use super::error::BackupError;
use super::file::FileSink;
use super::helper::BackupHelper;
use super::image::ApplicationState;
use super::log::ApplicationLog;
use super::record::encode_state;
use super::remote::RemoteBackup;
use super::settings::{BackupTarget, Compression, FsyncPolicy, TargetLocation};
use super::tls::TlsIdentity;

enum OpenedTarget {
    File { log: ApplicationLog, sequence: u64, fsync: FsyncPolicy },
    Remote(Box<RemoteBackup>, u64),
}

/// Opens all targets, and returns the latest state that any of them has.
pub(crate) fn open_targets(
    name: &str,
    targets: &[BackupTarget],
    discard: bool,
) -> Result<(Vec<BackupHelper>, ApplicationState), BackupError> {
    let mut latest = ApplicationState::default();
    let mut opened = Vec::new();
    for target in targets {
        opened.push(match &target.location {
            TargetLocation::File { path, fsync } => open_file(path, name, *fsync, &mut latest)?,
            TargetLocation::Remote { address, identity, reconnect_timeout: patience } => {
                open_remote(address, name, identity, *patience, target.compression, &mut latest)?
            }
        });
    }
    if discard {
        latest = ApplicationState::default();
    }
    let helpers = opened
        .into_iter()
        .zip(targets)
        .map(|(opened, target)| start_helper(opened, target, &latest));
    Ok((helpers.collect::<Result<_, _>>()?, latest))
}

fn open_file(
    path: &Path,
    name: &str,
    fsync: FsyncPolicy,
    latest: &mut ApplicationState,
) -> Result<OpenedTarget, BackupError> {
    let (log, image) = ApplicationLog::open(path, name)?;
    let sequence = image.sequence();
    if sequence > latest.sequence() {
        *latest = image;
    }
    Ok(OpenedTarget::File { log, sequence, fsync })
}

fn open_remote(
    address: &str,
    name: &str,
    identity: &TlsIdentity,
    patience: Duration,
    compression: Compression,
    latest: &mut ApplicationState,
) -> Result<OpenedTarget, BackupError> {
    let (mut remote, sequence) =
        RemoteBackup::open(address, name, identity, patience, compression)?;
    if sequence > latest.sequence() {
        *latest = remote.fetch_state()?;
    }
    Ok(OpenedTarget::Remote(Box::new(remote), sequence))
}

fn start_helper(
    opened: OpenedTarget,
    target: &BackupTarget,
    latest: &ApplicationState,
) -> Result<BackupHelper, BackupError> {
    let (sequence, compression) = (latest.sequence(), target.compression);
    let started = match opened {
        OpenedTarget::File { mut log, sequence: has, fsync } => {
            if has != sequence {
                log.replace_by_record(&encode_state(latest, compression))?;
            }
            let sink = FileSink::new(log, latest.clone(), fsync, compression);
            BackupHelper::start(sink, sequence, target.acknowledge)
        }
        OpenedTarget::Remote(mut remote, has) => {
            match has == sequence {
                true => remote.set_state(latest.clone()),
                false => remote.replace_state(latest.clone())?,
            }
            BackupHelper::start(*remote, sequence, target.acknowledge)
        }
    };
    let path = || format!("firn-app-backup of {:?}", target.location).into();
    started.map_err(|source| BackupError::File {
        what: "cannot start the thread",
        path: path(),
        source,
    })
}
