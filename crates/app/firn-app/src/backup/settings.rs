//! Where committed changes are written to, and when a commit returns.

use std::path::PathBuf;
use std::time::Duration;

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
    Remote { address: String, identity: TlsIdentity, reconnect_timeout: Duration },
}

impl BackupTarget {
    /// A log in a file, forced to disk at every commit.
    pub fn file(path: impl Into<PathBuf>) -> Self {
        Self::at_location(TargetLocation::File {
            path: path.into(),
            fsync: FsyncPolicy::EveryCommit,
        })
    }

    /// A backup process on another host, `HOST:PORT`. When the connection is lost, Firn tries to
    /// reconnect for 10 s.
    pub fn remote(address: impl Into<String>, identity: TlsIdentity) -> Self {
        let patience = Duration::from_secs(10);
        Self::at_location(TargetLocation::Remote {
            address: address.into(),
            identity,
            reconnect_timeout: patience,
        })
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

    /// Sets how long the helper tries to restore a lost connection before commits fail.
    pub fn reconnect_timeout(mut self, time: Duration) -> Self {
        if let TargetLocation::Remote { reconnect_timeout: patience, .. } = &mut self.location {
            *patience = time;
        }
        self
    }
}
