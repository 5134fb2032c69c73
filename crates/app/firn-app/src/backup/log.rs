//! Application log: a file of records, one for each committed transaction.
//!
//! ```text
//!   "FIRNAPPL" | version u32 | name length u32 | name | xxh3 of that u64 | record | record | ...
//! ```
//!
//! A log is written at its end only. A record that is truncated there (the process died, the disk
//! was full) was never acknowledged, and is cut off. What remains of it is the beginning of a
//! record whose header names a greater length, or zeros, which some file systems leave after a
//! power failure. Any other bytes that are no record are damage, and an error: a transaction that
//! was acknowledged may be lost, and Firn cannot know which. A damaged length does not make a
//! record look truncated: with the length that is there its checksum is right.
//!
//! A transaction of several records counts when its last record is there; without it, all of them
//! are cut off.
//!
//! When the log has grown to several times its state, it is compacted: its state in a new file,
//! which then replaces the log by its name. The process that writes a log holds a lock on the file.

mod replay;

use std::borrow::Cow;
use std::fs::{File, OpenOptions};
use std::io::{self, Read as _, Seek as _, SeekFrom, Write as _};
use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::fs::FlockOperation;
use twox_hash::XxHash3_64;

use self::replay::{ReplayedLog, replay_records};
use super::error::BackupError;
use super::image::{ApplicationState, StateId};
use super::record::{EncodedRecord, RecordKind, encode_record};
use super::settings::Compression;
use super::transaction::encode_state;
use crate::sys::fork::ParentOnly;

const MAGIC_BYTES: [u8; 8] = *b"FIRNAPPL";
const VERSION: u32 = 3;
/// The maximum size of the preamble of a log, with the longest name of a session, in bytes.
const PREAMBLE_MAX: u64 = 4 + 8 + 8 + 64 + (1 << 16);
/// How long to wait for a locked log before it counts as in use: a process that is just being
/// started has its parent's locks until execve(2).
const LOCK_WAIT: Duration = Duration::from_secs(1);
const LOCK_RETRY: Duration = Duration::from_millis(5);
/// The minimum size of a log that is compacted, in bytes.
const COMPACT_BYTES_MIN: u64 = 4 << 20;
/// The minimum ratio of a log's size to that of its state before the log is compacted.
const COMPACT_RATIO: u64 = 4;

/// A log that is open for writing.
#[derive(Debug)]
pub(crate) struct ApplicationLog {
    path: PathBuf,
    name: String,
    file: ParentOnly,
    len: u64,
    /// The offset of a transaction whose last record is not there yet.
    unfinished: Option<u64>,
    /// The greatest generation of its records: sessions of an older one can't write any more.
    fence: u64,
    /// The end of the file is unknown: a record could be neither written nor removed.
    is_torn: bool,
    /// The log is not compacted below this size: the disk had no space the last time.
    compact_bytes_min: u64,
}

impl ApplicationLog {
    /// Opens the log of a session, or creates one, and reads the last committed state.
    pub(crate) fn open(path: &Path, name: &str) -> Result<(Self, ApplicationState), BackupError> {
        let mut file = open_locked(path)?;
        let mut bytes = Vec::new();
        let read = (&mut *file).take(PREAMBLE_MAX).read_to_end(&mut bytes);
        let end =
            read.and_then(|_| file.metadata()).map_err(file_error("cannot read", path))?.len();
        let preamble = encode_preamble(name);
        // Shorter than any preamble: created, but never written.
        if bytes.len() < MAGIC_BYTES.len() + 8
            || bytes.len() < preamble.len() && preamble.starts_with(&bytes)
        {
            let mut log = Self::at_end(path.to_owned(), name.to_owned(), file, 0);
            log.truncate_to(0)?;
            log.append_bytes(preamble.len() as u64, |file| file.write_all(&preamble))?;
            log.sync_file()?;
            sync_parent(&log.path)?;
            return Ok((log, ApplicationState::default()));
        }
        check_preamble(path, name, &bytes, &preamble)?;
        // A process that was killed while it compacted the log left this file. No process does so
        // now: the log is locked.
        let _ = std::fs::remove_file(compacted_path(path));
        let start = preamble.len() as u64;
        let ReplayedLog { image, fence, len } = replay_records(path, &file, start, end)?;
        let mut log = Self::at_end(path.to_owned(), name.to_owned(), file, len);
        log.fence = fence;
        if len < end {
            log.truncate_to(len)?;
        }
        log.file.seek(SeekFrom::Start(len)).map_err(file_error("cannot read", &log.path))?;
        Ok((log, image))
    }

    fn at_end(path: PathBuf, name: String, file: ParentOnly, len: u64) -> Self {
        let (fence, is_torn, compact_bytes_min, unfinished) = (0, false, 0, None);
        Self { path, name, file, len, unfinished, fence, is_torn, compact_bytes_min }
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// The greatest generation that has written, or fenced, this log.
    pub(crate) fn fence(&self) -> u64 {
        self.fence
    }

    /// Whether the end of the file is unknown, so that only a new log is right again.
    pub(crate) fn is_torn(&self) -> bool {
        self.is_torn
    }

    /// Records that sessions of generations before this one can't write any more.
    pub(crate) fn append_fence(&mut self, generation: u64) -> Result<(), BackupError> {
        let (id, payload) = (StateId { generation, sequence: 0 }, Cow::Borrowed(&[][..]));
        let record = encode_record(RecordKind::Fence, id, payload, Compression::None, false);
        self.append_record(&record)?;
        self.sync_file()?;
        self.fence = self.fence.max(generation);
        Ok(())
    }

    /// Writes a record. If that fails, the log ends where its transaction began.
    pub(crate) fn append_record(&mut self, record: &EncodedRecord<'_>) -> Result<(), BackupError> {
        let start = self.unfinished.unwrap_or(self.len);
        self.append_bytes(record.byte_count(), |file| record.write_to(file))?;
        self.unfinished = record.is_continued().then_some(start);
        Ok(())
    }

    /// Removes a transaction whose last record has not been written.
    pub(crate) fn drop_unfinished(&mut self) -> Result<(), BackupError> {
        let Some(start) = self.unfinished.take() else { return Ok(()) };
        self.is_torn = true;
        self.truncate_to(start)?;
        (self.len, self.is_torn) = (start, false);
        Ok(())
    }

    fn append_bytes(
        &mut self,
        len: u64,
        write: impl FnOnce(&mut File) -> io::Result<()>,
    ) -> Result<(), BackupError> {
        let written = write(&mut self.file).map_err(file_error("cannot write", &self.path));
        match written {
            Ok(()) => self.len += len,
            Err(_) => {
                self.unfinished.get_or_insert(self.len);
                self.drop_unfinished()?;
            }
        }
        written
    }

    fn truncate_to(&mut self, len: u64) -> Result<(), BackupError> {
        let cut = self.file.set_len(len).and_then(|()| self.file.seek(SeekFrom::Start(len)));
        cut.map(drop).map_err(file_error("cannot shorten", &self.path))
    }

    /// Forces the log to disk. After an error the kernel may have dropped what was written, so the
    /// log is torn.
    pub(crate) fn sync_file(&mut self) -> Result<(), BackupError> {
        let synced = self.file.sync_data().map_err(file_error("cannot sync", &self.path));
        self.is_torn |= synced.is_err();
        synced
    }

    /// Whether the log has grown to several times its state, which has this size.
    pub(crate) fn is_large(&self, state_bytes: u64) -> bool {
        let min = COMPACT_BYTES_MIN.max(COMPACT_RATIO * state_bytes);
        self.len > min.max(self.compact_bytes_min)
    }

    /// Compacts the log if it has grown enough. `image` is its state.
    pub(crate) fn compact_if_large(
        &mut self,
        image: &ApplicationState,
        codec: Compression,
    ) -> Result<(), BackupError> {
        match self.is_large(image.byte_count()) {
            true => self.compact(image, codec).map(drop),
            false => Ok(()),
        }
    }

    /// Replaces the log by its state. If the disk has no space for that, the log continues as it
    /// is. Returns whether it was replaced.
    pub(crate) fn compact(
        &mut self,
        state: &ApplicationState,
        codec: Compression,
    ) -> Result<bool, BackupError> {
        match self.replace_by_state(state, codec) {
            Err(error) if error.is_out_of_space() && !self.is_torn => {
                self.compact_bytes_min = 2 * self.len;
                Ok(false)
            }
            result => result.map(|()| true),
        }
    }

    /// Creates or removes an empty file beside the log, for good.
    pub(crate) fn set_mark(&self, mark: &Path, exists: bool) -> Result<(), BackupError> {
        let result = match exists {
            true => File::create(mark).map(drop),
            false => std::fs::remove_file(mark),
        };
        match result {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            result => result.map_err(file_error("cannot mark the log by", mark))?,
        }
        sync_parent(&self.path)
    }

    /// Replaces the whole log by a state. After a crash the file is the old log or the new one.
    pub(crate) fn replace_by_state(
        &mut self,
        state: &ApplicationState,
        codec: Compression,
    ) -> Result<(), BackupError> {
        let mut new = self.begin_replacement()?;
        match encode_state(state, codec, |record| new.append_record(record)) {
            Ok(()) => self.finish_replacement(new),
            Err(error) => {
                new.remove_file();
                Err(error)
            }
        }
    }

    /// Makes an empty log beside this one, which is to replace it.
    pub(crate) fn begin_replacement(&self) -> Result<Self, BackupError> {
        let path = compacted_path(&self.path);
        let mut how = OpenOptions::new();
        how.read(true).write(true).create(true).truncate(true).mode(0o600);
        let file = ParentOnly::open(&path, &how).map_err(file_error("cannot make", &path))?;
        lock_file(&file, &path)?;
        let mut new = Self::at_end(path, self.name.clone(), file, 0);
        let preamble = encode_preamble(&self.name);
        let written = new.append_bytes(preamble.len() as u64, |file| file.write_all(&preamble));
        match written {
            Ok(()) => Ok(new),
            Err(error) => {
                new.remove_file();
                Err(error)
            }
        }
    }

    /// Forces a log that is to replace this one to disk, and gives it the name of this one.
    pub(crate) fn finish_replacement(&mut self, mut new: Self) -> Result<(), BackupError> {
        match new.append_fence(self.fence) {
            Ok(()) => self.replace_by_log(new),
            Err(error) => {
                new.remove_file();
                Err(error)
            }
        }
    }

    /// Removes a log that is not to replace another one after all. The error that led to that is
    /// the one to report.
    pub(crate) fn remove_file(self) {
        let _ = std::fs::remove_file(&self.path);
    }

    fn replace_by_log(&mut self, new: Self) -> Result<(), BackupError> {
        if let Err(error) = std::fs::rename(&new.path, &self.path) {
            let error = file_error("cannot rename", &new.path)(error);
            new.remove_file();
            return Err(error);
        }
        *self = Self { path: std::mem::take(&mut self.path), is_torn: true, ..new };
        sync_parent(&self.path)?;
        self.is_torn = false;
        Ok(())
    }
}

/// The path at which a compacted log is written.
fn compacted_path(path: &Path) -> PathBuf {
    let mut path = path.to_owned().into_os_string();
    path.push(".new");
    path.into()
}

fn encode_preamble(name: &str) -> Vec<u8> {
    let mut start = MAGIC_BYTES.to_vec();
    start.extend(VERSION.to_le_bytes());
    start.extend((name.len() as u32).to_le_bytes());
    start.extend(name.as_bytes());
    start.extend(XxHash3_64::oneshot(&start).to_le_bytes());
    start
}

fn check_preamble(
    path: &Path,
    name: &str,
    bytes: &[u8],
    expected: &[u8],
) -> Result<(), BackupError> {
    if bytes.starts_with(expected) {
        return Ok(());
    }
    let other = session_name(bytes).filter(|found| bytes.starts_with(&encode_preamble(found)));
    Err(match other {
        Some(found) => {
            BackupError::OtherSession { path: path.to_owned(), found, expected: name.to_owned() }
        }
        None => BackupError::NoLog { path: path.to_owned() },
    })
}

fn session_name(bytes: &[u8]) -> Option<String> {
    let len = u32::from_le_bytes(bytes.get(12..16)?.try_into().ok()?) as usize;
    String::from_utf8(bytes.get(16..16_usize.checked_add(len)?)?.to_vec()).ok()
}

fn open_locked(path: &Path) -> Result<ParentOnly, BackupError> {
    loop {
        let mut how = OpenOptions::new();
        how.read(true).write(true).create(true).truncate(false).mode(0o600);
        let file = ParentOnly::open(path, &how).map_err(file_error("cannot open", path))?;
        // A read from a device might never end.
        if !file.metadata().is_ok_and(|metadata| metadata.is_file()) {
            return Err(BackupError::NoLog { path: path.to_owned() });
        }
        lock_file(&file, path)?;
        // Another process may have compacted the log before this one got the lock.
        let same = match (file.metadata(), std::fs::metadata(path)) {
            (Ok(ours), Ok(named)) => ours.ino() == named.ino() && ours.dev() == named.dev(),
            _ => false,
        };
        if same {
            return Ok(file);
        }
    }
}

fn lock_file(file: &File, path: &Path) -> Result<(), BackupError> {
    let until = Instant::now() + LOCK_WAIT;
    while rustix::fs::flock(file, FlockOperation::NonBlockingLockExclusive).is_err() {
        if Instant::now() >= until {
            return Err(BackupError::InUse { path: path.to_owned() });
        }
        std::thread::sleep(LOCK_RETRY);
    }
    Ok(())
}

fn sync_parent(path: &Path) -> Result<(), BackupError> {
    let parent = path.parent().filter(|parent| !parent.as_os_str().is_empty());
    let parent = parent.unwrap_or(Path::new("."));
    File::open(parent).and_then(|dir| dir.sync_all()).map_err(file_error("cannot sync", parent))
}

fn file_error(what: &'static str, path: &Path) -> impl Fn(io::Error) -> BackupError {
    let path = path.to_owned();
    move |source| BackupError::File { what, path: path.clone(), source }
}
