//! One change of a disk's bytes.
//!
//! The server decides what a trimmed range contains (NBD, `NBD_CMD_TRIM`). Firn fills it with
//! zeros, or leaves it as it is. So there are only two kinds of changes, and both have the same
//! result on every file system.

use std::io;
use std::mem::size_of;

use crate::store::DiskStore;

/// A change of a disk. Offsets count bytes from the beginning of the disk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum DiskChange {
    /// Writes bytes.
    Write {
        /// The offset of the first byte.
        at: u64,
        /// The new bytes.
        bytes: Vec<u8>,
    },
    /// Writes zeros.
    Zero {
        /// The offset of the first byte.
        at: u64,
        /// The number of bytes.
        length: u64,
        /// The zeros may be a hole, which takes no space.
        hole: bool,
    },
}

impl DiskChange {
    /// The offset of its first byte.
    pub fn start_offset(&self) -> u64 {
        match self {
            Self::Write { at, .. } | Self::Zero { at, .. } => *at,
        }
    }

    /// The number of bytes that it changes.
    pub fn length(&self) -> u64 {
        match self {
            Self::Write { bytes, .. } => bytes.len() as u64,
            Self::Zero { length, .. } => *length,
        }
    }

    /// Whether it lies within a disk of `size` bytes.
    pub fn is_within(&self, size: u64) -> bool {
        self.start_offset().checked_add(self.length()).is_some_and(|end| end <= size)
    }

    /// The number of bytes of memory that it occupies.
    pub fn memory_bytes(&self) -> usize {
        size_of::<Self>()
            + match self {
                Self::Write { bytes, .. } => bytes.len(),
                Self::Zero { .. } => 0,
            }
    }

    /// The part of it that lies before `end`.
    pub fn truncated_at(self, end: u64) -> Option<Self> {
        let left = end.checked_sub(self.start_offset()).filter(|&left| left > 0)?;
        Some(match self {
            Self::Write { at, mut bytes } => {
                bytes.truncate(usize::try_from(left).unwrap_or(usize::MAX));
                Self::Write { at, bytes }
            }
            Self::Zero { at, length, hole } => Self::Zero { at, length: length.min(left), hole },
        })
    }

    /// Makes the change in a store.
    ///
    /// # Errors
    /// If the store fails. A part of the change may have been made.
    pub fn apply_to(&self, store: &dyn DiskStore) -> io::Result<()> {
        match self {
            Self::Write { at, bytes } => store.write_at(*at, bytes),
            Self::Zero { at, length, hole } => store.zero_range(*at, *length, *hole),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_part_before_a_place() {
        let write = |bytes: &[u8]| DiskChange::Write { at: 4, bytes: bytes.to_vec() };
        let zero = |length| DiskChange::Zero { at: 4, length, hole: true };
        for (end, length) in [(5, 1), (6, 2), (7, 3), (9, 3)] {
            assert_eq!(write(b"abc").truncated_at(end), Some(write(&b"abc"[..length])));
            assert_eq!(zero(3).truncated_at(end), Some(zero(length as u64)));
        }
        for end in [0, 3, 4] {
            assert_eq!(write(b"abc").truncated_at(end), None);
            assert_eq!(zero(3).truncated_at(end), None);
        }
    }

    #[test]
    fn a_change_beyond_the_disk_does_not_fit() {
        let zero = |at, length| DiskChange::Zero { at, length, hole: false };
        assert!(
            zero(4, 4).is_within(8)
                && !zero(4, 5).is_within(8)
                && !zero(u64::MAX, 2).is_within(u64::MAX)
        );
    }
}
