//! Reads the records of a log, one at a time, and finds where its last complete transaction ends.

use std::fs::File;
use std::io::{self, BufReader, Read as _, Seek as _, SeekFrom};
use std::os::unix::fs::FileExt as _;
use std::path::Path;

use super::file_error;
use crate::backup::error::BackupError;
use crate::backup::image::ApplicationState;
use crate::backup::record::{HEADER, MAGIC, PAYLOAD_MAX, RecordHeader, RecordKind};

/// Bytes that are read at once.
const BUFFER: usize = 256 << 10;

/// What the complete transactions of a log contain.
#[derive(Default)]
pub(super) struct ReplayedLog {
    pub(super) image: ApplicationState,
    pub(super) fence: u64,
    /// The offset at which the last of them ends.
    pub(super) len: u64,
}

/// Reads a log from the end of its preamble to `end`.
pub(super) fn replay_records(
    path: &Path,
    file: &File,
    start: u64,
    end: u64,
) -> Result<ReplayedLog, BackupError> {
    let read_error = file_error("cannot read", path);
    let mut reader = RecordReader::new(file, start, end).map_err(&read_error)?;
    let mut log = ReplayedLog { len: start, ..ReplayedLog::default() };
    while log.len < end {
        match log.replay_transaction(&mut reader) {
            Ok(()) => log.len = reader.next,
            Err(ReadError::File(source)) => return Err(read_error(source)),
            Err(ReadError::Malformed(why)) => {
                if is_truncated(file, reader.at, end).map_err(&read_error)? {
                    break;
                }
                let (path, offset) = (path.to_owned(), reader.at);
                return Err(BackupError::Damaged { path, offset, why });
            }
        }
    }
    Ok(log)
}

impl ReplayedLog {
    /// Applies the next transaction. One of several records is applied to the state itself, not to
    /// a copy, so the last record must be there before the first is applied.
    fn replay_transaction(&mut self, reader: &mut RecordReader<'_>) -> Result<(), ReadError> {
        let first = reader.read_header()?;
        if first.0.is_continued && !reader.is_complete(&first.0)? {
            return Err(reader.find_end(first));
        }
        let (id, kind) = (first.0.id, first.0.kind);
        let mut payload = reader.read_payload(&first)?;
        self.fence = self.fence.max(id.generation);
        if kind == RecordKind::Fence {
            return check_fence(&payload);
        }
        self.image.begin(kind, id)?;
        self.image.apply_payload(&payload)?;
        let mut is_continued = first.0.is_continued;
        while is_continued {
            let next = reader.read_header()?;
            payload = reader.read_payload(&next)?;
            if (next.0.id, next.0.kind) != (id, kind) {
                return Err(ReadError::Malformed("it is of another transaction"));
            }
            self.image.apply_payload(&payload)?;
            is_continued = next.0.is_continued;
        }
        Ok(())
    }
}

fn check_fence(payload: &[u8]) -> Result<(), ReadError> {
    match payload {
        [] => Ok(()),
        _ => Err(ReadError::Malformed("a fence has a payload")),
    }
}

enum ReadError {
    File(io::Error),
    Malformed(&'static str),
}

impl From<BackupError> for ReadError {
    fn from(error: BackupError) -> Self {
        match error {
            BackupError::Malformed(why) => Self::Malformed(why),
            _ => Self::Malformed("it cannot be read"),
        }
    }
}

impl From<io::Error> for ReadError {
    fn from(error: io::Error) -> Self {
        Self::File(error)
    }
}

/// Reads records in order.
struct RecordReader<'a> {
    file: &'a File,
    reader: BufReader<&'a File>,
    /// The offsets of the record that is being read, and of the next one.
    at: u64,
    next: u64,
    end: u64,
}

/// A header, and its bytes.
type ReadHeader = (RecordHeader, [u8; HEADER]);

impl<'a> RecordReader<'a> {
    fn new(file: &'a File, start: u64, end: u64) -> io::Result<Self> {
        let mut reader = BufReader::with_capacity(BUFFER, file);
        reader.seek(SeekFrom::Start(start))?;
        Ok(Self { file, reader, at: start, next: start, end })
    }

    fn read_header(&mut self) -> Result<ReadHeader, ReadError> {
        self.at = self.next;
        check_length(HEADER as u64, self.end - self.at)?;
        let mut head = [0; HEADER];
        self.reader.read_exact(&mut head)?;
        Ok((RecordHeader::parse_header(&head)?, head))
    }

    fn read_payload(&mut self, (header, head): &ReadHeader) -> Result<Vec<u8>, ReadError> {
        let start = self.at + HEADER as u64;
        check_length(header.stored, self.end - start)?;
        let mut stored = vec![0; header.stored as usize];
        self.reader.read_exact(&mut stored)?;
        let payload = match header.decode_payload(head, &stored)? {
            std::borrow::Cow::Owned(payload) => payload,
            std::borrow::Cow::Borrowed(_) => stored,
        };
        self.next = start + header.stored;
        Ok(payload)
    }

    /// Whether all records of the transaction that begins here are there, by their headers.
    fn is_complete(&self, first: &RecordHeader) -> io::Result<bool> {
        let (mut at, mut header) = (self.at, *first);
        loop {
            let next = at + HEADER as u64 + header.stored;
            if !header.is_continued || next + HEADER as u64 > self.end {
                return Ok(!header.is_continued && next <= self.end);
            }
            let mut head = [0; HEADER];
            self.file.read_exact_at(&mut head, next)?;
            let Ok(parsed) = RecordHeader::parse_header(&head) else { return Ok(false) };
            (at, header) = (next, parsed);
        }
    }

    /// Finds the record at which an incomplete transaction ends. The headers before it may be
    /// damaged, too: then it is the first such record.
    fn find_end(&mut self, first: ReadHeader) -> ReadError {
        let mut header = first;
        loop {
            if let Err(error) = self.read_payload(&header) {
                return error;
            }
            match self.read_header() {
                Ok(next) => header = next,
                Err(error) => return error,
            }
        }
    }
}

fn check_length(len: u64, left: u64) -> Result<(), ReadError> {
    match len <= left {
        true => Ok(()),
        false => Err(ReadError::Malformed("it is truncated")),
    }
}

/// Whether the bytes from `start`, which are no record and extend to the end of the log, are the
/// rest of a truncated record.
fn is_truncated(file: &File, start: u64, end: u64) -> io::Result<bool> {
    if are_zeros(file, start, end)? {
        return Ok(true);
    }
    if end - start >= HEADER as u64 + PAYLOAD_MAX {
        return Ok(false);
    }
    let mut rest = vec![0; (end - start) as usize];
    file.read_exact_at(&mut rest, start)?;
    let is_shorter = match rest.first_chunk::<HEADER>() {
        None => MAGIC.starts_with(&rest[..rest.len().min(MAGIC.len())]),
        Some(head) => is_missing_bytes(head, &rest[HEADER..]),
    };
    Ok(is_shorter && !contains_record(rest.get(1..).unwrap_or_default()))
}

fn are_zeros(file: &File, start: u64, end: u64) -> io::Result<bool> {
    let (mut at, mut piece) = (start, vec![0; BUFFER]);
    while at < end {
        let now = (end - at).min(BUFFER as u64) as usize;
        file.read_exact_at(&mut piece[..now], at)?;
        if piece[..now].iter().any(|byte| *byte != 0) {
            return Ok(false);
        }
        at += now as u64;
    }
    Ok(true)
}

/// Whether a record's header names more bytes than there are. False if only its length is damaged,
/// and these bytes are all of the record.
fn is_missing_bytes(head: &[u8; HEADER], stored: &[u8]) -> bool {
    let Ok(header) = RecordHeader::parse_header(head) else { return false };
    header.stored > stored.len() as u64 && !RecordHeader::is_whole_except_length(head, stored)
}

fn contains_record(bytes: &[u8]) -> bool {
    let places = bytes.windows(MAGIC.len()).enumerate().filter(|(_, window)| *window == MAGIC);
    places.map(|(at, _)| at).any(|at| starts_record(&bytes[at..]))
}

fn starts_record(bytes: &[u8]) -> bool {
    let Some(head) = bytes.first_chunk::<HEADER>() else { return false };
    let Ok(header) = RecordHeader::parse_header(head) else { return false };
    let stored = bytes[HEADER..].get(..header.stored as usize);
    stored.is_some_and(|stored| header.decode_payload(head, stored).is_ok())
}
