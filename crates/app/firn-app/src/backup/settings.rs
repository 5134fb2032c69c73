//! Where committed changes are written to, and when a commit returns.

use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use thiserror::Error;

use super::tls::TlsIdentity;

/// The condition under which a commit returns.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AcknowledgePolicy {
    /// When the backup has stored the transaction.
    Sync,
    /// When at most `lag_max` transactions are not acknowledged yet: these can be lost.
    Async {
        /// The maximum count of transactions that are not acknowledged.
        lag_max: u64,
    },
}

/// The times at which a log is forced to disk. If it is not forced, the kernel decides what a crash
/// of the host loses. The death of a process loses nothing in any case.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FsyncPolicy {
    /// Before any transaction is acknowledged.
    EveryCommit,
    /// When this time has passed since the last fsync.
    Interval(Duration),
    /// Never.
    Never,
}

/// The encoding in which records are stored and sent.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Compression {
    /// Uncompressed.
    #[default]
    None,
    /// LZ4, where that makes a record smaller.
    Lz4,
}

/// A target that committed changes are written to.
#[derive(Clone, Debug)]
pub struct BackupTarget {
    pub(crate) location: TargetLocation,
    pub(crate) acknowledge: AcknowledgePolicy,
    pub(crate) compression: Compression,
}

#[derive(Clone, Debug)]
pub(crate) enum TargetLocation {
    File { path: PathBuf, fsync: FsyncPolicy },
    Remote { address: String, identity: TlsIdentity },
}

impl BackupTarget {
    /// A log in a file, forced to disk at every commit.
    pub fn file(path: impl Into<PathBuf>) -> Self {
        Self::at_location(TargetLocation::File {
            path: path.into(),
            fsync: FsyncPolicy::EveryCommit,
        })
    }

    /// A backup process on another host, `HOST:PORT`. When the connection is lost, Firn connects
    /// again as soon as that is possible, and sends what the backup lacks.
    pub fn remote(address: impl Into<String>, identity: TlsIdentity) -> Self {
        Self::at_location(TargetLocation::Remote { address: address.into(), identity })
    }

    fn at_location(location: TargetLocation) -> Self {
        Self { location, acknowledge: AcknowledgePolicy::Sync, compression: Compression::default() }
    }

    /// Sets when a commit returns. [`AcknowledgePolicy::Sync`] by default.
    pub fn acknowledge(mut self, acknowledge: AcknowledgePolicy) -> Self {
        self.acknowledge = acknowledge;
        self
    }

    /// Sets the encoding of stored and sent records. Uncompressed by default.
    pub fn compression(mut self, compression: Compression) -> Self {
        self.compression = compression;
        self
    }

    /// Sets when a log file is forced to disk. A remote backup decides that by itself.
    pub fn fsync(mut self, policy: FsyncPolicy) -> Self {
        if let TargetLocation::File { fsync, .. } = &mut self.location {
            *fsync = policy;
        }
        self
    }

    /// The path of the log, or the address of the host.
    pub(crate) fn name(&self) -> String {
        match &self.location {
            TargetLocation::File { path, .. } => path.display().to_string(),
            TargetLocation::Remote { address, .. } => address.clone(),
        }
    }

    pub(crate) fn is_local(&self) -> bool {
        matches!(self.location, TargetLocation::File { .. })
    }
}

/// How many targets must have stored a transaction before a commit returns.
///
/// With every setting each commit is sent to all targets, and a target that was away gets what it
/// lacks when it returns. A log in a file is waited for whenever it can be written, so one that
/// was never left out has all acknowledged transactions.
///
/// A session that opens finds the last acknowledged transaction if it can read enough targets: one
/// with `All`; with fewer, a log that was never left out, or so many targets that at least one of
/// them has acknowledged each transaction. The list of targets and this setting must then be those
/// of the session before.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum RequiredTargets {
    /// Every target. Each of them alone is enough to recover.
    #[default]
    All,
    /// Any one target.
    Any,
    /// This count of targets; at least one, at most all of them.
    Count(usize),
}

impl RequiredTargets {
    /// The count, of so many targets.
    pub(crate) fn count_of(self, targets: usize) -> usize {
        match self {
            Self::All => targets,
            Self::Any => targets.min(1),
            Self::Count(count) => count.clamp(1, targets.max(1)),
        }
    }
}

/// The text is not `all`, `any` or a number above 0.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("{0:?} is no count of backups: all, any, or a number from 1")]
pub struct UnknownRequirement(String);

impl FromStr for RequiredTargets {
    type Err = UnknownRequirement;

    fn from_str(text: &str) -> Result<Self, UnknownRequirement> {
        match (text, text.parse()) {
            ("all", _) => Ok(Self::All),
            ("any", _) => Ok(Self::Any),
            (_, Ok(count)) if count > 0 => Ok(Self::Count(count)),
            _ => Err(UnknownRequirement(text.to_owned())),
        }
    }
}
