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
//! When the log has grown to several times its state, it is compacted: one state record in a new
//! file, which then replaces the log by its name. The process that writes a log holds a lock on the
//! file.

use std::borrow::Cow;
use std::fs::{File, OpenOptions};
use std::io::{self, Read as _, Seek as _, SeekFrom, Write as _};
use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::fs::FlockOperation;
use twox_hash::XxHash3_64;

use super::error::BackupError;
use super::image::{ApplicationState, StateId};
use super::record::{
    EncodedRecord, HEADER, MAGIC, RecordHeader, RecordKind, encode_record, encode_state,
};
use super::settings::Compression;
use crate::sys::fork::ParentOnly;

const MAGIC_BYTES: [u8; 8] = *b"FIRNAPPL";
const VERSION: u32 = 2;
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
        file.read_to_end(&mut bytes).map_err(file_error("cannot read", path))?;
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
        let ReplayedLog { image, fence, len } = replay_records(path, &bytes, preamble.len())?;
        let mut log = Self::at_end(path.to_owned(), name.to_owned(), file, len);
        log.fence = fence;
        if len < bytes.len() as u64 {
            log.truncate_to(len)?;
        }
        log.file.seek(SeekFrom::Start(len)).map_err(file_error("cannot read", &log.path))?;
        Ok((log, image))
    }

    fn at_end(path: PathBuf, name: String, file: ParentOnly, len: u64) -> Self {
        Self { path, name, file, len, fence: 0, is_torn: false, compact_bytes_min: 0 }
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
        let id = StateId { generation, sequence: 0 };
        let record = encode_record(RecordKind::Fence, id, Cow::Borrowed(&[]), Compression::None);
        self.append_record(&record)?;
        self.sync_file()?;
        self.fence = self.fence.max(generation);
        Ok(())
    }

    /// Writes a record. If that fails, the log ends where it did before.
    pub(crate) fn append_record(&mut self, record: &EncodedRecord<'_>) -> Result<(), BackupError> {
        self.append_bytes(record.byte_count(), |file| record.write_to(file))
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
                self.is_torn = true;
                self.truncate_to(self.len)?;
                self.is_torn = false;
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
            true => self.compact(&encode_state(image, codec)).map(drop),
            false => Ok(()),
        }
    }

    /// Replaces the log by a record of its state. If the disk has no space for that, the log
    /// continues as it is. Returns whether it was replaced.
    pub(crate) fn compact(&mut self, state: &EncodedRecord<'_>) -> Result<bool, BackupError> {
        match self.replace_by_record(state) {
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

    /// Replaces the whole log by one record. After a crash the file is the old log or the new one.
    pub(crate) fn replace_by_record(
        &mut self,
        state: &EncodedRecord<'_>,
    ) -> Result<(), BackupError> {
        let new = self.write_compacted(state)?;
        self.replace_by_log(new)
    }

    /// Writes a log of one record beside this one, and forces it to disk.
    fn write_compacted(&self, state: &EncodedRecord<'_>) -> Result<Self, BackupError> {
        let path = compacted_path(&self.path);
        let mut how = OpenOptions::new();
        how.read(true).write(true).create(true).truncate(true).mode(0o600);
        let file = ParentOnly::open(&path, &how).map_err(file_error("cannot make", &path))?;
        lock_file(&file, &path)?;
        let name = self.name.clone();
        let mut new = Self::at_end(path, name, file, 0);
        let preamble = encode_preamble(&self.name);
        let written = new
            .append_bytes(preamble.len() as u64, |file| file.write_all(&preamble))
            .and_then(|()| new.append_record(state));
        match written.and_then(|()| new.append_fence(self.fence)) {
            Ok(()) => Ok(new),
            Err(error) => {
                // The first error is the one to report.
                let _ = std::fs::remove_file(&new.path);
                Err(error)
            }
        }
    }

    fn replace_by_log(&mut self, new: Self) -> Result<(), BackupError> {
        if let Err(error) = std::fs::rename(&new.path, &self.path) {
            // The error of the rename is the one to report.
            let _ = std::fs::remove_file(&new.path);
            return Err(file_error("cannot rename", &new.path)(error));
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

/// What the whole records of a log contain.
struct ReplayedLog {
    image: ApplicationState,
    fence: u64,
    /// The offset at which the last of them ends.
    len: u64,
}

fn replay_records(path: &Path, bytes: &[u8], start: usize) -> Result<ReplayedLog, BackupError> {
    let (mut image, mut at, mut fence) = (ApplicationState::default(), start, 0);
    while at < bytes.len() {
        let damaged = |error: &BackupError| BackupError::Damaged {
            path: path.to_owned(),
            offset: at as u64,
            why: damage_reason(error),
        };
        match read_record(&bytes[at..]) {
            Ok((header, payload, len)) => {
                image
                    .apply_record(header.kind, header.id, &payload)
                    .map_err(|error| damaged(&error))?;
                fence = fence.max(header.id.generation);
                at += len;
            }
            Err(_) if is_truncated(&bytes[at..]) => break,
            Err(error) => return Err(damaged(&error)),
        }
    }
    Ok(ReplayedLog { image, fence, len: at as u64 })
}

fn damage_reason(error: &BackupError) -> &'static str {
    match error {
        BackupError::Malformed(why) => why,
        _ => "it cannot be read",
    }
}

/// Reads the record at the start of some bytes: its header, its payload, its length.
fn read_record(bytes: &[u8]) -> Result<(RecordHeader, Cow<'_, [u8]>, usize), BackupError> {
    let short = || BackupError::Malformed("it is truncated");
    let head: &[u8; HEADER] = bytes.first_chunk().ok_or_else(short)?;
    let header = RecordHeader::parse_header(head)?;
    let len = usize::try_from(header.stored).ok().and_then(|len| len.checked_add(HEADER));
    let stored = len.and_then(|len| bytes.get(HEADER..len)).ok_or_else(short)?;
    let payload = header.decode_payload(head, stored)?;
    Ok((header, payload, HEADER + stored.len()))
}

/// Whether these bytes, which are no record and extend to the end of the log, are the rest of a
/// truncated record.
fn is_truncated(rest: &[u8]) -> bool {
    let is_shorter = match rest.first_chunk::<HEADER>() {
        None => MAGIC.starts_with(&rest[..rest.len().min(MAGIC.len())]),
        Some(head) => is_missing_bytes(head, &rest[HEADER..]),
    };
    rest.iter().all(|byte| *byte == 0) || is_shorter && !contains_record(&rest[1..])
}

/// Whether a record's header names more bytes than there are. False if only its length is damaged,
/// and these bytes are all of the record.
fn is_missing_bytes(head: &[u8; HEADER], stored: &[u8]) -> bool {
    let Ok(header) = RecordHeader::parse_header(head) else { return false };
    header.stored > stored.len() as u64 && !RecordHeader::is_whole_except_length(head, stored)
}

fn contains_record(bytes: &[u8]) -> bool {
    let places = bytes.windows(MAGIC.len()).enumerate().filter(|(_, window)| *window == MAGIC);
    places.map(|(at, _)| at).any(|at| read_record(&bytes[at..]).is_ok())
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

#[cfg(test)]
mod tests;
