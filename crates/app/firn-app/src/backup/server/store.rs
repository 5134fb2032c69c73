//! Store of one session on a backup server: its log, its state, and the connection that writes it.

use std::path::Path;
use std::time::Instant;

use crate::backup::error::BackupError;
use crate::backup::image::{ApplicationState, StagedState};
use crate::backup::log::ApplicationLog;
use crate::backup::record::{EncodedRecord, RecordHeader, RecordKind};
use crate::backup::settings::{Compression, FsyncPolicy};

/// A log, its state, and the connection that may write it.
pub(in crate::backup) struct SessionStore {
    pub(in crate::backup) log: ApplicationLog,
    pub(in crate::backup) image: ApplicationState,
    /// The newest connection of a writer.
    pub(super) connection: u64,
    /// A transaction whose last record has not arrived. Later ones, and a later writer, drop it.
    staged: Option<StagedTransaction>,
    /// The state in memory or the end of the log is unknown: the log must be read again.
    pub(super) is_broken: bool,
    synced: Instant,
}

struct StagedTransaction {
    state: StagedState,
    /// The log that replaces the present one, if the transaction is a whole state.
    new_log: Option<ApplicationLog>,
}

impl SessionStore {
    pub(super) fn open(path: &Path, session: &str) -> Result<Self, BackupError> {
        let (log, image) = ApplicationLog::open(path, session)?;
        let (staged, is_broken, synced) = (None, false, Instant::now());
        Ok(Self { log, image, connection: 0, staged, is_broken, synced })
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
        self.drop_staged()?;
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
            RecordKind::Change if header.id.generation == generation => {}
            RecordKind::State if header.id.generation <= generation => {
                self.check_replacement(header, can_replace)?;
            }
            _ => return Err(BackupError::Malformed("a record of another session")),
        }
        match self.staged.take() {
            None if header.kind == RecordKind::Change && !header.is_continued => {
                self.store_change(header, payload, record)
            }
            None => {
                let staged = self.begin_staged(header)?;
                self.store_part(staged, header, payload, record)
            }
            Some(staged) => self.store_part(staged, header, payload, record),
        }
    }

    /// Stores a change of one record.
    fn store_change(
        &mut self,
        header: &RecordHeader,
        payload: &[u8],
        record: &EncodedRecord<'_>,
    ) -> Result<(), BackupError> {
        // After an error in the middle, the state in memory is one that no transaction committed.
        self.is_broken = true;
        self.image.begin(header.kind, header.id)?;
        self.image.apply_payload(payload)?;
        self.log.append_record(record)?;
        self.is_broken = false;
        Ok(())
    }

    fn begin_staged(&self, header: &RecordHeader) -> Result<StagedTransaction, BackupError> {
        let state = StagedState::begin(&self.image, header)?;
        let new_log = match header.kind {
            RecordKind::State => Some(self.log.begin_replacement()?),
            _ => None,
        };
        Ok(StagedTransaction { state, new_log })
    }

    /// Stores a record of a transaction that has begun. The last one makes it count.
    fn store_part(
        &mut self,
        mut staged: StagedTransaction,
        header: &RecordHeader,
        payload: &[u8],
        record: &EncodedRecord<'_>,
    ) -> Result<(), BackupError> {
        let log = staged.new_log.as_mut().unwrap_or(&mut self.log);
        let stored =
            staged.state.apply_record(header, payload).and_then(|()| log.append_record(record));
        self.staged = Some(staged);
        if let Err(error) = stored {
            self.drop_staged()?;
            return Err(error);
        }
        match header.is_continued {
            true => Ok(()),
            false => self.finish_staged(),
        }
    }

    fn finish_staged(&mut self) -> Result<(), BackupError> {
        let Some(staged) = self.staged.take() else { return Ok(()) };
        if let Some(new_log) = staged.new_log {
            let replaced = self.log.finish_replacement(new_log);
            self.is_broken |= self.log.is_torn();
            replaced?;
        }
        self.image = staged.state.into_state();
        Ok(())
    }

    /// Drops a transaction whose last record has not arrived.
    pub(in crate::backup) fn drop_staged(&mut self) -> Result<(), BackupError> {
        if let Some(new_log) = self.staged.take().and_then(|staged| staged.new_log) {
            new_log.remove_file();
        }
        let dropped = self.log.drop_unfinished();
        self.is_broken |= self.log.is_torn();
        dropped
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

    /// Makes all records safe.
    pub(super) fn make_safe(&mut self, fsync: FsyncPolicy) -> Result<(), BackupError> {
        if self.staged.is_some() {
            return Err(BackupError::Malformed("the last record of a transaction is missing"));
        }
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
