//! A backup in a file: appends transactions to a log.

use std::time::{Duration, Instant};

use super::error::BackupError;
use super::helper::{BackupJob, BackupSink};
use super::image::ApplicationState;
use super::log::ApplicationLog;
use super::record::{RecordKind, encode_record};
use super::settings::{Compression, FsyncPolicy};

/// A log, and the state that it describes.
#[derive(Debug)]
pub(crate) struct FileSink {
    log: ApplicationLog,
    image: ApplicationState,
    fsync: FsyncPolicy,
    compression: Compression,
    synced: Instant,
    dirty: bool,
}

impl FileSink {
    /// A log whose state is already `image`.
    pub(crate) fn new(
        log: ApplicationLog,
        image: ApplicationState,
        fsync: FsyncPolicy,
        compression: Compression,
    ) -> Self {
        Self { log, image, fsync, compression, synced: Instant::now(), dirty: false }
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

impl BackupSink for FileSink {
    fn store_transactions(&mut self, jobs: &[BackupJob]) -> Result<u64, BackupError> {
        for job in jobs {
            let record =
                encode_record(RecordKind::Change, job.sequence, &job.payload, self.compression);
            self.log.append_record(&record)?;
            self.dirty = true;
            self.image.apply_record(RecordKind::Change, job.sequence, &job.payload)?;
        }
        if self.is_sync_due() {
            self.sync_log()?;
        }
        self.log.compact_if_large(&self.image, self.compression)?;
        Ok(self.image.sequence())
    }

    fn idle_timeout(&self) -> Option<Duration> {
        match self.fsync {
            FsyncPolicy::Interval(time) if self.dirty => {
                Some(time.saturating_sub(self.synced.elapsed()))
            }
            _ => None,
        }
    }

    fn finish_pending_work(&mut self) -> Result<(), BackupError> {
        match self.dirty && self.fsync != FsyncPolicy::Never {
            true => self.sync_log(),
            false => Ok(()),
        }
    }
}
