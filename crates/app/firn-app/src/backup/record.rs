//! Records: a committed transaction, or a whole state, as bytes.
//!
//! ```text
//!   0   magic "FARc"        16  sequence u64
//!   4   kind                24  bytes of the payload as stored     u64
//!   5   codec               32  bytes of the payload               u64
//!   6   1: continued         40  xxh3 of bytes 0 to 39 and of the stored payload
//!   7   0
//!   8   generation u64      48  payload
//!
//!   payload   areas u32     { number u32, length u64, name length u8, name }
//!             changes u32   { area u32, offset u64, length u64 }
//!             the bytes of the changes, one after the other
//! ```
//!
//! All numbers are little-endian. A *change* record holds the changes of a transaction, and defines
//! the areas that occur in it for the first time. A *state* record defines all areas, which begin
//! as zeros; records before it do not matter. A *fence* record has no payload: from it on, sessions
//! of an older generation can't write.
//!
//! A large transaction, or state, is several records with the same kind and id, so that neither
//! side needs memory for all of it. All but the last are marked as continued; the transaction
//! counts once the last one is there.

use std::borrow::Cow;
use std::hash::Hasher as _;
use std::io::{self, Write};

use twox_hash::XxHash3_64;

use super::error::BackupError;
use super::image::StateId;
use super::settings::Compression;

pub(crate) const HEADER: usize = 48;
pub(crate) const MAGIC: [u8; 4] = *b"FARc";
/// The maximum size of a payload that is copied to be written together with its header, in bytes.
const ONE_WRITE_MAX: usize = 64 << 10;
/// The maximum factor by which LZ4 can compress: a header with a greater factor is wrong.
const RATIO_MAX: u64 = 255;
/// The maximum size of a payload in bytes: a greater length is taken for an error.
pub(crate) const PAYLOAD_MAX: u64 = 128 << 20;

/// The kind of a record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RecordKind {
    Change,
    State,
    Fence,
}

/// A record's header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct RecordHeader {
    pub(crate) kind: RecordKind,
    codec: Compression,
    /// The next record continues the transaction.
    pub(crate) is_continued: bool,
    /// The state after the transaction; of a fence, its generation.
    pub(crate) id: StateId,
    pub(crate) stored: u64,
    raw: u64,
    checksum: u64,
}

/// Builds the payload of a record from areas and changes. Their bytes are copied once, at the end.
#[derive(Clone, Debug, Default)]
pub(crate) struct PayloadBuilder<'a> {
    areas: (u32, Vec<u8>),
    changes: (u32, Vec<u8>),
    bytes: Vec<&'a [u8]>,
    /// The sum of their lengths.
    len: usize,
}

/// A whole record: its header and its stored payload.
#[derive(Debug)]
pub(crate) struct EncodedRecord<'a> {
    pub(crate) head: [u8; HEADER],
    pub(crate) stored: Cow<'a, [u8]>,
}

impl<'a> PayloadBuilder<'a> {
    pub(crate) fn add_area(&mut self, number: u32, len: u64, name: &str) {
        self.areas.0 += 1;
        let to = &mut self.areas.1;
        to.extend(number.to_le_bytes());
        to.extend(len.to_le_bytes());
        to.push(name.len() as u8);
        to.extend(name.as_bytes());
    }

    pub(crate) fn add_change(&mut self, area: u32, offset: u64, bytes: &'a [u8]) {
        self.changes.0 += 1;
        let to = &mut self.changes.1;
        to.extend(area.to_le_bytes());
        to.extend(offset.to_le_bytes());
        to.extend((bytes.len() as u64).to_le_bytes());
        self.bytes.push(bytes);
        self.len += bytes.len();
    }

    /// The size of the payload so far, in bytes.
    pub(crate) fn byte_count(&self) -> usize {
        8 + self.areas.1.len() + self.changes.1.len() + self.len
    }

    pub(crate) fn into_bytes(self) -> Vec<u8> {
        let mut all = Vec::with_capacity(self.byte_count());
        for (count, entries) in [self.areas, self.changes] {
            all.extend(count.to_le_bytes());
            all.extend(entries);
        }
        self.bytes.iter().for_each(|part| all.extend_from_slice(part));
        all
    }
}

/// Encodes a record. An uncompressed payload is not copied.
pub(crate) fn encode_record(
    kind: RecordKind,
    id: StateId,
    payload: Cow<'_, [u8]>,
    codec: Compression,
    is_continued: bool,
) -> EncodedRecord<'_> {
    let packed = match codec {
        Compression::None => None,
        Compression::Lz4 => Some(lz4_flex::block::compress(&payload)),
    };
    let packed = packed.filter(|packed| packed.len() < payload.len());
    let (is_packed, len) = (packed.is_some(), payload.len());
    let stored = packed.map_or(payload, Cow::Owned);
    let mut head = [0; HEADER];
    head[..4].copy_from_slice(&MAGIC);
    head[4..7].copy_from_slice(&[kind as u8, u8::from(is_packed), u8::from(is_continued)]);
    let numbers = [id.generation, id.sequence, stored.len() as u64, len as u64];
    for (at, number) in numbers.into_iter().enumerate() {
        head[8 + 8 * at..16 + 8 * at].copy_from_slice(&number.to_le_bytes());
    }
    let sum = checksum(&head, &stored);
    head[HEADER - 8..].copy_from_slice(&sum.to_le_bytes());
    EncodedRecord { head, stored }
}

impl EncodedRecord<'_> {
    /// Whether the next record continues the transaction.
    pub(crate) fn is_continued(&self) -> bool {
        self.head[6] == 1
    }

    /// The size of the record in bytes.
    pub(crate) fn byte_count(&self) -> u64 {
        (HEADER + self.stored.len()) as u64
    }

    /// Writes the record: a small one by one call.
    pub(crate) fn write_to(&self, to: &mut impl Write) -> io::Result<()> {
        if self.stored.len() <= ONE_WRITE_MAX {
            return to.write_all(&[&self.head[..], &self.stored].concat());
        }
        to.write_all(&self.head)?;
        to.write_all(&self.stored)
    }
}

fn checksum(head: &[u8], stored: &[u8]) -> u64 {
    let mut hash = XxHash3_64::new();
    hash.write(&head[..HEADER - 8]);
    hash.write(stored);
    hash.finish()
}

impl RecordHeader {
    /// Parses a header. Its fields are trusted only once the payload matches the checksum.
    pub(crate) fn parse_header(bytes: &[u8; HEADER]) -> Result<Self, BackupError> {
        let number = |at: usize| u64::from_le_bytes(copy_array(&bytes[at..at + 8]));
        if bytes[..4] != MAGIC {
            return Err(BackupError::Malformed("no record starts here"));
        }
        let kind = match bytes[4] {
            0 => RecordKind::Change,
            1 => RecordKind::State,
            2 => RecordKind::Fence,
            _ => return Err(BackupError::Malformed("unknown kind of record")),
        };
        let codec = match bytes[5] {
            0 => Compression::None,
            1 => Compression::Lz4,
            _ => return Err(BackupError::Malformed("unknown codec")),
        };
        let is_continued = match bytes[6..8] {
            [0, 0] => false,
            [1, 0] if kind != RecordKind::Fence => true,
            _ => return Err(BackupError::Malformed("unknown flags")),
        };
        let [generation, sequence, stored, raw, checksum] = [8, 16, 24, 32, 40].map(number);
        let plausible = match codec {
            Compression::None => raw == stored,
            Compression::Lz4 => raw / RATIO_MAX <= stored,
        };
        if !plausible || raw.max(stored) > PAYLOAD_MAX {
            return Err(BackupError::Malformed("impossible length"));
        }
        let id = StateId { generation, sequence };
        Ok(Self { kind, codec, is_continued, id, stored, raw, checksum })
    }

    /// Whether the record's checksum would be right if its length field named this count of stored
    /// bytes.
    pub(crate) fn is_whole_except_length(head: &[u8; HEADER], stored: &[u8]) -> bool {
        let mut head = *head;
        head[24..32].copy_from_slice(&(stored.len() as u64).to_le_bytes());
        let said = u64::from_le_bytes(copy_array(&head[40..48]));
        checksum(&head, stored) == said
    }

    /// Decodes the payload, if the stored bytes match the checksum.
    /// A payload that is not compressed is not copied.
    pub(crate) fn decode_payload<'a>(
        &self,
        head: &[u8; HEADER],
        stored: &'a [u8],
    ) -> Result<Cow<'a, [u8]>, BackupError> {
        if stored.len() as u64 != self.stored || checksum(head, stored) != self.checksum {
            return Err(BackupError::Malformed("wrong checksum"));
        }
        match self.codec {
            Compression::None => Ok(Cow::Borrowed(stored)),
            Compression::Lz4 => lz4_flex::block::decompress(stored, self.raw as usize)
                .ok()
                .filter(|payload| payload.len() as u64 == self.raw)
                .map(Cow::Owned)
                .ok_or(BackupError::Malformed("the payload cannot be decompressed")),
        }
    }
}

/// Reads the fields of a payload in order.
pub(crate) struct PayloadReader<'a>(pub(crate) &'a [u8]);

impl<'a> PayloadReader<'a> {
    pub(crate) fn read_bytes(&mut self, len: u64) -> Result<&'a [u8], BackupError> {
        let len = usize::try_from(len).unwrap_or(usize::MAX);
        let (now, later) = self
            .0
            .split_at_checked(len)
            .ok_or(BackupError::Malformed("the payload is too short"))?;
        self.0 = later;
        Ok(now)
    }

    pub(crate) fn read_u8(&mut self) -> Result<u8, BackupError> {
        Ok(self.read_bytes(1)?[0])
    }

    pub(crate) fn read_u32(&mut self) -> Result<u32, BackupError> {
        self.read_bytes(4).map(|bytes| u32::from_le_bytes(copy_array(bytes)))
    }

    pub(crate) fn read_u64(&mut self) -> Result<u64, BackupError> {
        self.read_bytes(8).map(|bytes| u64::from_le_bytes(copy_array(bytes)))
    }
}

fn copy_array<const N: usize>(bytes: &[u8]) -> [u8; N] {
    let mut array = [0; N];
    array.copy_from_slice(bytes);
    array
}
