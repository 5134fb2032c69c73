//! A target in a file: appends commits to a log.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use super::error::BackupError;
use super::helper::BackupConnection;
use super::image::{ApplicationState, StateId};
use super::log::ApplicationLog;
use super::settings::{Compression, FsyncPolicy};
use super::transaction::Commit;

/// The idle interval of a log that has nothing to do.
const IDLE: Duration = Duration::from_secs(3600);

/// A log, and the state that it describes.
#[derive(Debug)]
pub(crate) struct FileTarget {
    log: ApplicationLog,
    id: StateId,
    fsync: FsyncPolicy,
    compression: Compression,
    synced: Instant,
    dirty: bool,
    is_marked: bool,
}

impl FileTarget {
    /// A log that has the state `id`.
    pub(crate) fn new(
        log: ApplicationLog,
        id: StateId,
        fsync: FsyncPolicy,
        compression: Compression,
    ) -> Self {
        let is_marked = is_left_out(log.path());
        Self { log, id, fsync, compression, synced: Instant::now(), dirty: false, is_marked }
    }

    fn is_sync_due(&self) -> bool {
        match self.fsync {
            FsyncPolicy::EveryCommit => true,
            FsyncPolicy::Interval(time) => self.synced.elapsed() >= time,
            FsyncPolicy::Never => false,
        }
    }

    fn sync_log(&mut self) -> Result<(), BackupError> {
        self.log.sync_file()?;
        (self.synced, self.dirty) = (Instant::now(), false);
        Ok(())
    }
}

impl BackupConnection for FileTarget {
    fn connect(&mut self) -> Result<Option<StateId>, BackupError> {
        if self.dirty && self.fsync == FsyncPolicy::EveryCommit && !self.log.is_torn() {
            self.sync_log()?;
        }
        Ok((!self.log.is_torn()).then_some(self.id))
    }

    fn append_commits(&mut self, commits: &[Commit]) -> Result<(), BackupError> {
        // A compacted log may be later than the commits.
        let has = self.id;
        for commit in commits.iter().filter(|commit| commit.id > has) {
            let log = &mut self.log;
            commit.encode(self.compression, |record| log.append_record(record))?;
            (self.id, self.dirty) = (commit.id, true);
        }
        if self.is_sync_due() {
            self.sync_log()?;
        }
        Ok(())
    }

    fn replace_state(&mut self, state: &ApplicationState) -> Result<(), BackupError> {
        self.log.replace_by_state(state, self.compression)?;
        (self.id, self.synced, self.dirty) = (state.id(), Instant::now(), false);
        Ok(())
    }

    fn idle_timeout(&self) -> Duration {
        match self.fsync {
            FsyncPolicy::Interval(time) if self.dirty => time.saturating_sub(self.synced.elapsed()),
            _ => IDLE,
        }
    }

    fn do_idle_work(&mut self) -> Result<(), BackupError> {
        match self.dirty && self.fsync != FsyncPolicy::Never {
            true => self.sync_log(),
            false => Ok(()),
        }
    }

    fn finish(&mut self) -> Result<(), BackupError> {
        self.do_idle_work()
    }

    fn is_oversized(&self, state_bytes: u64) -> bool {
        self.log.is_large(state_bytes)
    }

    fn compact(&mut self, state: &ApplicationState) -> Result<(), BackupError> {
        if self.log.compact(state, self.compression)? {
            (self.id, self.synced, self.dirty) = (state.id(), Instant::now(), false);
        }
        Ok(())
    }

    fn mark_left_out(&mut self, is_left_out: bool) -> Result<(), BackupError> {
        if self.is_marked == is_left_out {
            return Ok(());
        }
        self.log.set_mark(&mark_path(self.log.path()), is_left_out)?;
        self.is_marked = is_left_out;
        Ok(())
    }
}

/// The file that marks a log that may lack acknowledged transactions.
fn mark_path(log: &Path) -> PathBuf {
    let mut path = log.to_owned().into_os_string();
    path.push(".behind");
    path.into()
}

/// Whether the log may lack transactions that other targets have acknowledged.
pub(crate) fn is_left_out(log: &Path) -> bool {
    std::fs::symlink_metadata(mark_path(log)).is_ok()
}
