//! Store of one session on a backup server: its log, its state, and the connection that writes it.

use std::path::Path;
use std::time::Instant;

use crate::backup::error::BackupError;
use crate::backup::image::ApplicationState;
use crate::backup::log::ApplicationLog;
use crate::backup::record::{EncodedRecord, RecordHeader, RecordKind};
use crate::backup::settings::{Compression, FsyncPolicy};

/// A log, its state, and the connection that may write it.
pub(in crate::backup) struct SessionStore {
    pub(in crate::backup) log: ApplicationLog,
    pub(in crate::backup) image: ApplicationState,
    /// The newest connection of a writer.
    pub(super) connection: u64,
    /// The state in memory or the end of the log is unknown: the log must be read again.
    pub(super) is_broken: bool,
    synced: Instant,
}

impl SessionStore {
    pub(super) fn open(path: &Path, session: &str) -> Result<Self, BackupError> {
        let (log, image) = ApplicationLog::open(path, session)?;
        Ok(Self { log, image, connection: 0, is_broken: false, synced: Instant::now() })
    }

    /// Refuses a writer of an older generation, and shuts out all writers before this one.
    pub(super) fn admit_writer(
        &mut self,
        generation: u64,
        connection: u64,
    ) -> Result<(), BackupError> {
        let fence = self.log.fence();
        if generation < fence {
            return Err(BackupError::Superseded { generation: fence });
        }
        if generation > fence {
            let fenced = self.log.append_fence(generation);
            self.is_broken |= self.log.is_torn();
            fenced?;
        }
        self.connection = connection;
        Ok(())
    }

    /// Checks that a writer has not been shut out.
    pub(super) fn check_writer(&self, generation: u64, connection: u64) -> Result<(), BackupError> {
        let fence = self.log.fence();
        if generation < fence {
            return Err(BackupError::Superseded { generation: fence });
        }
        match self.connection > connection {
            true => Err(BackupError::Failed("the session has a newer connection".into())),
            false => Ok(()),
        }
    }

    /// Applies a record of a writer of this generation, and writes it to the log.
    pub(super) fn store_record(
        &mut self,
        header: &RecordHeader,
        payload: &[u8],
        record: &EncodedRecord<'_>,
        generation: u64,
        can_replace: bool,
    ) -> Result<(), BackupError> {
        match header.kind {
            RecordKind::Change if header.id.generation == generation => {
                self.store_change(header, payload, record)
            }
            RecordKind::State if header.id.generation <= generation => {
                self.check_replacement(header, can_replace)?;
                self.store_state(header, payload, record)
            }
            _ => Err(BackupError::Malformed("a record of another session")),
        }
    }

    fn store_change(
        &mut self,
        header: &RecordHeader,
        payload: &[u8],
        record: &EncodedRecord<'_>,
    ) -> Result<(), BackupError> {
        // After an error in the middle, the state in memory is one that no transaction committed.
        self.is_broken = true;
        self.image.apply_record(header.kind, header.id, payload)?;
        self.log.append_record(record)?;
        self.is_broken = false;
        Ok(())
    }

    fn check_replacement(
        &self,
        header: &RecordHeader,
        can_replace: bool,
    ) -> Result<(), BackupError> {
        let (has, new) = (self.image.id(), header.id);
        if can_replace || new >= has && new.sequence >= has.sequence {
            return Ok(());
        }
        let (has, new) = (has.sequence, new.sequence);
        let why = "and the role append does not permit to replace it by an older state";
        Err(BackupError::Refused(format!("it has transaction {has}, the peer offers {new}, {why}")))
    }

    fn store_state(
        &mut self,
        header: &RecordHeader,
        payload: &[u8],
        record: &EncodedRecord<'_>,
    ) -> Result<(), BackupError> {
        let mut image = ApplicationState::default();
        image.apply_record(header.kind, header.id, payload)?;
        let replaced = self.log.replace_by_record(record);
        self.is_broken |= self.log.is_torn();
        replaced?;
        self.image = image;
        Ok(())
    }

    /// Makes all records safe.
    pub(super) fn make_safe(&mut self, fsync: FsyncPolicy) -> Result<(), BackupError> {
        let is_due = match fsync {
            FsyncPolicy::EveryCommit => true,
            FsyncPolicy::Interval(time) => self.synced.elapsed() >= time,
            FsyncPolicy::Never => false,
        };
        if is_due {
            let synced = self.log.sync_file();
            self.is_broken |= self.log.is_torn();
            synced?;
            self.synced = Instant::now();
        }
        let compacted = self.log.compact_if_large(&self.image, Compression::Lz4);
        self.is_broken |= self.log.is_torn();
        compacted
    }
}
