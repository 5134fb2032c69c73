//! Disk change messages: changes of disks as bytes. Each is the body of one message in the
//! replication stream, whose header names the epoch (`firn-epochs`, `wire`).
//!
//! ```text
//!     0        4        8                 16              16 + 16 * count
//!   +--------+--------+-----------------+---------------+-----------------------------+
//!   | disk   | count  | check           | count entries | the bytes of the writes     |
//!   +--------+--------+-----------------+---------------+-----------------------------+
//!                       XXH3-64 of all the rest
//!
//!   entry:   0                 8        12       16
//!          +-----------------+--------+--------+
//!          | at              | length | kind   |   1: a write, 2: zeros, 3: zeros, maybe a hole
//!          +-----------------+--------+--------+
//! ```
//!
//! Numbers are little-endian. A message has at most [`BYTES_MAX`] bytes: a longer change is split,
//! which has the same result if the parts are made in order. The receiver checks the checksum
//! before it uses any other part of a message, and allocates no memory because of a length alone.

use std::hash::Hasher as _;

use thiserror::Error;
use twox_hash::XxHash3_64;

use crate::change::DiskChange;

/// The maximum length of a message in bytes.
pub const BYTES_MAX: usize = 1 << 20;

const HEAD_BYTES: usize = 16;
const ENTRY_BYTES: usize = 16;
/// The maximum number of bytes that one entry writes.
const WRITE_BYTES_MAX: usize = BYTES_MAX / 2;
/// The maximum number of zeros of one entry.
const ZEROS_MAX: u64 = 1 << 30;

const WRITE: u32 = 1;
const ZERO: u32 = 2;
const HOLE: u32 = 3;

/// Why bytes can't be decoded as changes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum DiskWireError {
    /// They are too short or too long for the changes that they announce.
    #[error("{bytes} bytes can't hold the {count} changes of a disk that they announce")]
    Length {
        /// The length in bytes.
        bytes: usize,
        /// The number of changes that they announce.
        count: u32,
    },
    /// The checksum is wrong.
    #[error("changes of a disk are damaged: their checksum is {found:#018x}, not {expected:#018x}")]
    Checksum {
        /// The checksum in the message.
        expected: u64,
        /// The checksum of the received bytes.
        found: u64,
    },
    /// An entry is invalid.
    #[error("change {index} of a disk is invalid: kind {kind}, {length} bytes at {at}")]
    Entry {
        /// The index of the entry.
        index: usize,
        /// Its kind.
        kind: u32,
        /// The offset of its first byte.
        at: u64,
        /// The number of bytes it changes.
        length: u32,
    },
}

struct ChangeEntry<'a> {
    at: u64,
    length: u32,
    kind: u32,
    bytes: &'a [u8],
}

/// Encodes changes of a disk as messages, in order.
pub fn encode_changes(disk: u32, changes: &[DiskChange]) -> impl Iterator<Item = Vec<u8>> {
    let mut entries = changes.iter().flat_map(split_entries).peekable();
    std::iter::from_fn(move || {
        entries.peek()?;
        let (mut heads, mut written) = (Vec::new(), Vec::new());
        let room = BYTES_MAX - HEAD_BYTES - ENTRY_BYTES;
        while let Some(entry) =
            entries.next_if(|entry| heads.len() + written.len() + entry.bytes.len() <= room)
        {
            heads.extend_from_slice(&entry.at.to_le_bytes());
            heads.extend_from_slice(&entry.length.to_le_bytes());
            heads.extend_from_slice(&entry.kind.to_le_bytes());
            written.extend_from_slice(entry.bytes);
        }
        Some(build_message(disk, &heads, &written))
    })
}

/// Splits a change into entries.
fn split_entries(change: &DiskChange) -> Box<dyn Iterator<Item = ChangeEntry<'_>> + '_> {
    match change {
        DiskChange::Write { at, bytes } => {
            let starts = (*at..).step_by(WRITE_BYTES_MAX);
            let entry = |(bytes, at)| write_entry(at, bytes);
            Box::new(bytes.chunks(WRITE_BYTES_MAX).zip(starts).map(entry))
        }
        DiskChange::Zero { at, length, hole } => {
            let (at, end, kind) = (*at, at + length, if *hole { HOLE } else { ZERO });
            let entry = move |at: u64| {
                let length = (end - at).min(ZEROS_MAX) as u32;
                ChangeEntry { at, length, kind, bytes: &[] }
            };
            Box::new((at..end).step_by(ZEROS_MAX as usize).map(entry))
        }
    }
}

fn write_entry(at: u64, bytes: &[u8]) -> ChangeEntry<'_> {
    ChangeEntry { at, length: bytes.len() as u32, kind: WRITE, bytes }
}

fn build_message(disk: u32, heads: &[u8], written: &[u8]) -> Vec<u8> {
    let count = (heads.len() / ENTRY_BYTES) as u32;
    let mut message = Vec::with_capacity(HEAD_BYTES + heads.len() + written.len());
    message.extend_from_slice(&disk.to_le_bytes());
    message.extend_from_slice(&count.to_le_bytes());
    message.extend_from_slice(&[0; 8]);
    message.extend_from_slice(heads);
    message.extend_from_slice(written);
    let check = message_checksum(&message);
    message[8..HEAD_BYTES].copy_from_slice(&check.to_le_bytes());
    message
}

/// The checksum of a message, without the field that contains it.
fn message_checksum(message: &[u8]) -> u64 {
    let mut sum = XxHash3_64::new();
    sum.write(&message[..8]);
    sum.write(&message[HEAD_BYTES..]);
    sum.finish()
}

/// Decodes a message: the number of the disk, and the changes.
///
/// # Errors
/// If [`encode_changes`] did not make it. The caller checks that the changes lie within the disk.
pub fn decode_changes(message: &[u8]) -> Result<(u32, Vec<DiskChange>), DiskWireError> {
    let bytes = message.len();
    let short = DiskWireError::Length { bytes, count: 0 };
    let (head, rest) = message.split_first_chunk::<HEAD_BYTES>().ok_or(short)?;
    let (disk, count) = (read_u32(head, 0), read_u32(head, 4));
    let (expected, found) = (read_u64(head, 8), message_checksum(message));
    if found != expected {
        return Err(DiskWireError::Checksum { expected, found });
    }
    let wrong = DiskWireError::Length { bytes, count };
    let heads = (count as usize).checked_mul(ENTRY_BYTES).ok_or(wrong)?;
    let (heads, mut written) = rest.split_at_checked(heads).ok_or(wrong)?;
    let mut changes = Vec::with_capacity(count as usize);
    for (index, head) in heads.chunks_exact(ENTRY_BYTES).enumerate() {
        changes.push(decode_entry(index, head, &mut written)?.ok_or(wrong)?);
    }
    written.is_empty().then_some((disk, changes)).ok_or(wrong)
}

/// Decodes an entry, and removes its bytes from the front of `written`; `None` if those are too
/// few.
fn decode_entry(
    index: usize,
    head: &[u8],
    written: &mut &[u8],
) -> Result<Option<DiskChange>, DiskWireError> {
    let (at, length, kind) = (read_u64(head, 0), read_u32(head, 8), read_u32(head, 12));
    let nonsense = DiskWireError::Entry { index, kind, at, length };
    if length == 0 || at.checked_add(length.into()).is_none() {
        return Err(nonsense);
    }
    let zero = |hole| Some(DiskChange::Zero { at, length: length.into(), hole });
    match kind {
        WRITE => {
            Ok(take_bytes(written, length as usize).map(|bytes| DiskChange::Write { at, bytes }))
        }
        ZERO => Ok(zero(false)),
        HOLE => Ok(zero(true)),
        _ => Err(nonsense),
    }
}

/// Removes `length` bytes from the front.
fn take_bytes(from: &mut &[u8], length: usize) -> Option<Vec<u8>> {
    let (bytes, rest) = from.split_at_checked(length)?;
    *from = rest;
    Some(bytes.to_vec())
}

/// Four bytes as a number. The caller has checked the length.
fn read_u32(bytes: &[u8], at: usize) -> u32 {
    bytes[at..at + 4].iter().rev().fold(0, |word, &byte| word << 8 | u32::from(byte))
}

/// Eight bytes as a number.
fn read_u64(bytes: &[u8], at: usize) -> u64 {
    u64::from(read_u32(bytes, at + 4)) << 32 | u64::from(read_u32(bytes, at))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn some() -> Vec<DiskChange> {
        vec![
            DiskChange::Write { at: 7, bytes: b"hello".to_vec() },
            DiskChange::Zero { at: 1 << 40, length: 4096, hole: true },
            DiskChange::Zero { at: 0, length: 1, hole: false },
            DiskChange::Write { at: 3, bytes: vec![9] },
        ]
    }

    fn decoded(changes: &[DiskChange]) -> Vec<DiskChange> {
        let all = encode_changes(5, changes).flat_map(|message| {
            assert!(message.len() <= BYTES_MAX);
            let (disk, changes) = decode_changes(&message).unwrap();
            assert_eq!(disk, 5);
            changes
        });
        all.collect()
    }

    #[test]
    fn changes_survive_the_wire() {
        assert_eq!(decoded(&some()), some());
        assert_eq!(encode_changes(5, &[]).count(), 0);
    }

    #[test]
    fn a_long_change_is_split() {
        let bytes: Vec<u8> = (0..3 << 20).map(|at: u32| (at / 100) as u8).collect();
        let long = [
            DiskChange::Write { at: 11, bytes: bytes.clone() },
            DiskChange::Zero { at: 0, length: 5 << 30, hole: true },
        ];
        let mut next = 11;
        let mut zeros = 0;
        for change in decoded(&long) {
            match &change {
                DiskChange::Write { at, bytes: part } => {
                    assert_eq!(
                        (*at, &part[..]),
                        (next, &bytes[next as usize - 11..][..part.len()])
                    );
                    next += change.length();
                }
                DiskChange::Zero { at, length, hole } => {
                    assert!(*hole && *at == zeros);
                    zeros += length;
                }
            }
        }
        assert_eq!((next, zeros), (11 + (3 << 20), 5 << 30));
    }

    #[test]
    fn many_changes_fit_into_messages() {
        let many = vec![DiskChange::Zero { at: 1, length: 1, hole: false }; 200_000];
        assert_eq!(decoded(&many), many);
    }

    #[test]
    fn every_truncation_is_an_error() {
        let message = encode_changes(0, &some()).next().unwrap();
        for length in 0..message.len() {
            decode_changes(&message[..length]).unwrap_err();
        }
    }

    #[test]
    fn a_complete_but_invalid_message_is_an_error() {
        let entry = |at: u64, length: u32, kind: u32| {
            [&at.to_le_bytes()[..], &length.to_le_bytes(), &kind.to_le_bytes()].concat()
        };
        for bad in [entry(0, 0, ZERO), entry(0, 1, 4), entry(u64::MAX, 2, HOLE)] {
            let refused = decode_changes(&build_message(0, &bad, &[])).unwrap_err();
            assert!(matches!(refused, DiskWireError::Entry { index: 0, .. }), "{refused}");
        }
        for (bad, written) in [(entry(0, 2, WRITE), &b"a"[..]), (entry(0, 2, WRITE), b"abc")] {
            let refused = decode_changes(&build_message(0, &bad, written)).unwrap_err();
            assert!(matches!(refused, DiskWireError::Length { .. }), "{refused}");
        }
    }

    proptest! {
        #[test]
        fn every_flipped_bit_is_an_error(at: prop::sample::Index, bit in 0..8_u8) {
            let mut message = encode_changes(0, &some()).next().unwrap();
            let at = at.index(message.len());
            message[at] ^= 1 << bit;
            prop_assert!(decode_changes(&message).is_err(), "bit {} of byte {}", bit, at);
        }

        #[test]
        fn no_bytes_make_decoding_panic(heads in prop::collection::vec(any::<u8>(), 0..80), count: u32) {
            let _ = decode_changes(&heads);
            let mut sealed = build_message(0, &heads, &[]);
            sealed[4..8].copy_from_slice(&count.to_le_bytes());
            let check = message_checksum(&sealed).to_le_bytes();
            sealed[8..16].copy_from_slice(&check);
            let _ = decode_changes(&sealed);
        }
    }
}
