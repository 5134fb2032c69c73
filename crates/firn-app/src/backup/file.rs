//! A backup in a file: appends transactions to a log.

use std::time::{Duration, Instant};

use super::error::BackupError;
use super::helper::{Job, Sink};
use super::record::{RecordKind, encode};
use super::{Compression, Fsync, Image, Log};

/// A log, and the state that it describes.
#[derive(Debug)]
pub(crate) struct FileSink {
    log: Log,
    image: Image,
    fsync: Fsync,
    compression: Compression,
    synced: Instant,
    dirty: bool,
}

impl FileSink {
    /// A log whose state is already `image`.
    pub(crate) fn new(log: Log, image: Image, fsync: Fsync, compression: Compression) -> Self {
        Self { log, image, fsync, compression, synced: Instant::now(), dirty: false }
    }

    fn due(&self) -> bool {
        match self.fsync {
            Fsync::EveryCommit => true,
            Fsync::Interval(time) => self.synced.elapsed() >= time,
            Fsync::Never => false,
        }
    }

    fn sync(&mut self) -> Result<(), BackupError> {
        self.log.sync()?;
        (self.synced, self.dirty) = (Instant::now(), false);
        Ok(())
    }
}

impl Sink for FileSink {
    fn put(&mut self, jobs: &[Job]) -> Result<u64, BackupError> {
        for job in jobs {
            let record = encode(RecordKind::Change, job.sequence, &job.payload, self.compression);
            self.log.append(&record)?;
            self.dirty = true;
            self.image.apply(RecordKind::Change, job.sequence, &job.payload)?;
        }
        if self.due() {
            self.sync()?;
        }
        self.log.compact_if_large(&self.image, self.compression)?;
        Ok(self.image.sequence())
    }

    fn idle_after(&self) -> Option<Duration> {
        match self.fsync {
            Fsync::Interval(time) if self.dirty => Some(time.saturating_sub(self.synced.elapsed())),
            _ => None,
        }
    }

    fn idle(&mut self) -> Result<(), BackupError> {
        match self.dirty && self.fsync != Fsync::Never {
            true => self.sync(),
            false => Ok(()),
        }
    }
}
