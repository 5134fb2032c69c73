//! The log: a file of records, one for each committed transaction.
//!
//! ```text
//!   "FIRNAPPL" | version u32 | name length u32 | name | xxh3 of that u64 | record | record | ...
//! ```
//!
//! A log is written at its end only. A record that was cut short there (the process died, the disk was full) never was
//! acknowledged, and is cut off: what is left of it is the beginning of a record that says it is longer, or zeros, which some
//! file systems leave after a power cut. Anything else that is no record is damage, and an error: a transaction that was
//! acknowledged may be lost, and nothing can say which. A length that was damaged does not make a record one that was cut
//! short: with the length that is there its checksum is right.
//!
//! When the log has grown to several times its state, it is written anew: one state record in a new file, which then takes
//! the name. Whoever writes a log holds a lock on the file.

use std::fs::{File, OpenOptions};
use std::io::{self, Read as _, Seek as _, SeekFrom, Write as _};
use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::fs::FlockOperation;
use twox_hash::XxHash3_64;

use super::error::BackupError;
use super::record::{HEADER, Header, MAGIC, encode_state};
use super::{Compression, Image};
use crate::sys::fork::ParentOnly;

const START: [u8; 8] = *b"FIRNAPPL";
const VERSION: u32 = 1;
/// How long a log may be locked before it counts as in use: a process that is being started has its parent's locks until
/// it has become another program.
const LOCK_WAIT: Duration = Duration::from_secs(1);
const LOCK_RETRY: Duration = Duration::from_millis(5);
/// A log is not written anew before it has so many bytes.
const SMALL: u64 = 4 << 20;
/// ... and so many times those of its state.
const GROWTH: u64 = 4;

/// A log that is open for writing.
#[derive(Debug)]
pub(crate) struct Log {
    path: PathBuf,
    name: String,
    file: ParentOnly,
    len: u64,
    /// Not written anew before it has so many bytes: the last time there was no room.
    compact_from: u64,
}

impl Log {
    /// Opens the log of a session, or makes one, and reads the last committed state.
    pub(crate) fn open(path: &Path, name: &str) -> Result<(Self, Image), BackupError> {
        let mut file = open_locked(path)?;
        let mut bytes = Vec::new();
        file.read_to_end(&mut bytes).map_err(failed("cannot read", path))?;
        let start = start(name);
        // Shorter than any start: made, and never written.
        if bytes.len() < START.len() + 8 || bytes.len() < start.len() && start.starts_with(&bytes) {
            let (path, name) = (path.to_owned(), name.to_owned());
            let mut log = Self { path, name, file, len: 0, compact_from: 0 };
            log.cut(0)?;
            log.append(&start)?;
            log.sync()?;
            sync_parent(&log.path)?;
            return Ok((log, Image::default()));
        }
        check_start(path, name, &bytes, &start)?;
        // Left by who wrote it anew and was killed: nobody does while the log is locked.
        let _ = std::fs::remove_file(beside(path));
        let (image, len) = replay(path, &bytes, start.len())?;
        let (path, name) = (path.to_owned(), name.to_owned());
        let mut log = Self { path, name, file, len, compact_from: 0 };
        if len < bytes.len() as u64 {
            log.cut(len)?;
        }
        log.file.seek(SeekFrom::Start(len)).map_err(failed("cannot read", &log.path))?;
        Ok((log, image))
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Writes a record. If that fails, the log ends where it did.
    pub(crate) fn append(&mut self, record: &[u8]) -> Result<(), BackupError> {
        let written = self.file.write_all(record).map_err(failed("cannot write", &self.path));
        match written {
            Ok(()) => self.len += record.len() as u64,
            Err(_) => self.cut(self.len)?,
        }
        written
    }

    fn cut(&mut self, len: u64) -> Result<(), BackupError> {
        let cut = self.file.set_len(len).and_then(|()| self.file.seek(SeekFrom::Start(len)));
        cut.map(drop).map_err(failed("cannot shorten", &self.path))
    }

    /// Forces what was written to disk.
    pub(crate) fn sync(&self) -> Result<(), BackupError> {
        self.file.sync_data().map_err(failed("cannot sync", &self.path))
    }

    /// Writes the log anew if it has grown enough. `image` is its state. Where there is no room for that the log goes on as it
    /// is.
    pub(crate) fn compact_if_large(
        &mut self,
        image: &Image,
        codec: Compression,
    ) -> Result<(), BackupError> {
        if self.len <= SMALL.max(GROWTH * image.bytes()).max(self.compact_from) {
            return Ok(());
        }
        match self.written_anew(&encode_state(image, codec)) {
            Ok(new) => self.give_way_to(new),
            Err(error) if error.is_for_want_of_room() => {
                self.compact_from = 2 * self.len;
                Ok(())
            }
            Err(error) => Err(error),
        }
    }

    /// Replaces all of it by one record. After a crash it is the old log or the new one.
    pub(crate) fn replace(&mut self, state: &[u8]) -> Result<(), BackupError> {
        let new = self.written_anew(state)?;
        self.give_way_to(new)
    }

    /// A log beside this one, of one record, on the disk.
    fn written_anew(&self, state: &[u8]) -> Result<Self, BackupError> {
        let path = beside(&self.path);
        let mut how = OpenOptions::new();
        how.read(true).write(true).create(true).truncate(true).mode(0o600);
        let file = ParentOnly::open(&path, &how).map_err(failed("cannot make", &path))?;
        lock(&file, &path)?;
        let name = self.name.clone();
        let mut new = Self { path, name, file, len: 0, compact_from: 0 };
        let written = new.append(&start(&self.name)).and_then(|()| new.append(state));
        match written.and_then(|()| new.sync()) {
            Ok(()) => Ok(new),
            Err(error) => {
                // The first error is the one to report.
                let _ = std::fs::remove_file(&new.path);
                Err(error)
            }
        }
    }

    fn give_way_to(&mut self, new: Self) -> Result<(), BackupError> {
        if let Err(error) = std::fs::rename(&new.path, &self.path) {
            // That is the error to report.
            let _ = std::fs::remove_file(&new.path);
            return Err(failed("cannot rename", &new.path)(error));
        }
        *self = Self { path: std::mem::take(&mut self.path), ..new };
        sync_parent(&self.path)
    }
}

/// Where a log is written anew.
fn beside(path: &Path) -> PathBuf {
    let mut path = path.to_owned().into_os_string();
    path.push(".new");
    path.into()
}

fn start(name: &str) -> Vec<u8> {
    let mut start = START.to_vec();
    start.extend(VERSION.to_le_bytes());
    start.extend((name.len() as u32).to_le_bytes());
    start.extend(name.as_bytes());
    start.extend(XxHash3_64::oneshot(&start).to_le_bytes());
    start
}

fn check_start(path: &Path, name: &str, bytes: &[u8], expected: &[u8]) -> Result<(), BackupError> {
    if bytes.starts_with(expected) {
        return Ok(());
    }
    let other = name_in(bytes).filter(|found| bytes.starts_with(&start(found)));
    Err(match other {
        Some(found) => {
            BackupError::OtherSession { path: path.to_owned(), found, expected: name.to_owned() }
        }
        None => BackupError::NoLog { path: path.to_owned() },
    })
}

fn name_in(bytes: &[u8]) -> Option<String> {
    let len = u32::from_le_bytes(bytes.get(12..16)?.try_into().ok()?) as usize;
    String::from_utf8(bytes.get(16..16_usize.checked_add(len)?)?.to_vec()).ok()
}

/// The state after all whole records, and where the last of them ends.
fn replay(path: &Path, bytes: &[u8], start: usize) -> Result<(Image, u64), BackupError> {
    let (mut image, mut at) = (Image::default(), start);
    while at < bytes.len() {
        match read_record(&bytes[at..]) {
            Ok((header, payload, len)) => {
                image.apply(header.kind, header.sequence, &payload).map_err(|error| {
                    BackupError::Damaged {
                        path: path.to_owned(),
                        offset: at as u64,
                        why: why(&error),
                    }
                })?;
                at += len;
            }
            Err(_) if is_cut(&bytes[at..]) => break,
            Err(error) => {
                let (path, offset) = (path.to_owned(), at as u64);
                return Err(BackupError::Damaged { path, offset, why: why(&error) });
            }
        }
    }
    Ok((image, at as u64))
}

fn why(error: &BackupError) -> &'static str {
    match error {
        BackupError::Malformed(why) => why,
        _ => "it cannot be read",
    }
}

/// The record at the start of some bytes: its header, its payload, its length.
fn read_record(bytes: &[u8]) -> Result<(Header, Vec<u8>, usize), BackupError> {
    let short = || BackupError::Malformed("it is cut short");
    let head: &[u8; HEADER] = bytes.first_chunk().ok_or_else(short)?;
    let header = Header::parse(head)?;
    let len = usize::try_from(header.stored).ok().and_then(|len| len.checked_add(HEADER));
    let stored = len.and_then(|len| bytes.get(HEADER..len)).ok_or_else(short)?;
    let payload = header.payload(head, stored)?;
    Ok((header, payload, HEADER + stored.len()))
}

/// Whether these bytes, which are no record and run to the end of the log, are what is left of one that was cut short.
fn is_cut(rest: &[u8]) -> bool {
    let is_shorter = match rest.first_chunk::<HEADER>() {
        None => MAGIC.starts_with(&rest[..rest.len().min(MAGIC.len())]),
        Some(head) => is_shorter(head, &rest[HEADER..]),
    };
    rest.iter().all(|byte| *byte == 0) || is_shorter && !whole_record_in(&rest[1..])
}

/// Whether a record has more bytes than there are, unless its length was damaged and it has just these.
fn is_shorter(head: &[u8; HEADER], stored: &[u8]) -> bool {
    let Ok(header) = Header::parse(head) else { return false };
    header.stored > stored.len() as u64 && !Header::is_whole_but_for_its_length(head, stored)
}

fn whole_record_in(bytes: &[u8]) -> bool {
    let places = bytes.windows(MAGIC.len()).enumerate().filter(|(_, window)| *window == MAGIC);
    places.map(|(at, _)| at).any(|at| read_record(&bytes[at..]).is_ok())
}

fn open_locked(path: &Path) -> Result<ParentOnly, BackupError> {
    loop {
        let mut how = OpenOptions::new();
        how.read(true).write(true).create(true).truncate(false).mode(0o600);
        let file = ParentOnly::open(path, &how).map_err(failed("cannot open", path))?;
        // A device could be read for ever.
        if !file.metadata().is_ok_and(|metadata| metadata.is_file()) {
            return Err(BackupError::NoLog { path: path.to_owned() });
        }
        lock(&file, path)?;
        // Somebody may have written it anew before the lock was ours.
        let same = match (file.metadata(), std::fs::metadata(path)) {
            (Ok(ours), Ok(named)) => ours.ino() == named.ino() && ours.dev() == named.dev(),
            _ => false,
        };
        if same {
            return Ok(file);
        }
    }
}

fn lock(file: &File, path: &Path) -> Result<(), BackupError> {
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
    File::open(parent).and_then(|dir| dir.sync_all()).map_err(failed("cannot sync", parent))
}

fn failed(what: &'static str, path: &Path) -> impl Fn(io::Error) -> BackupError {
    let path = path.to_owned();
    move |source| BackupError::File { what, path: path.clone(), source }
}

#[cfg(test)]
mod tests;
