//! One change of a disk's bytes.
//!
//! What a trim leaves behind is for the server to say (NBD, `NBD_CMD_TRIM`). Here it becomes zeros, or nothing is done; so there
//! are only two changes, and both come out the same on any file system.

use std::io;
use std::mem::size_of;

use crate::store::Store;

/// A change, in bytes from the beginning of the disk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Change {
    /// These bytes are there now.
    Write {
        /// Where they begin.
        at: u64,
        /// What they are.
        bytes: Vec<u8>,
    },
    /// Zeros are there now.
    Zero {
        /// Where they begin.
        at: u64,
        /// How many.
        length: u64,
        /// They need not take room.
        hole: bool,
    },
}

impl Change {
    /// Its first byte.
    pub fn at(&self) -> u64 {
        match self {
            Self::Write { at, .. } | Self::Zero { at, .. } => *at,
        }
    }

    /// How many bytes it changes.
    pub fn length(&self) -> u64 {
        match self {
            Self::Write { bytes, .. } => bytes.len() as u64,
            Self::Zero { length, .. } => *length,
        }
    }

    /// Whether it lies within a disk of `size` bytes.
    pub fn fits(&self, size: u64) -> bool {
        self.at().checked_add(self.length()).is_some_and(|end| end <= size)
    }

    /// Bytes of memory that keeping it takes.
    pub fn cost(&self) -> usize {
        size_of::<Self>()
            + match self {
                Self::Write { bytes, .. } => bytes.len(),
                Self::Zero { .. } => 0,
            }
    }

    /// The part of it that lies before `end`.
    pub fn before(self, end: u64) -> Option<Self> {
        let left = end.checked_sub(self.at()).filter(|&left| left > 0)?;
        Some(match self {
            Self::Write { at, mut bytes } => {
                bytes.truncate(usize::try_from(left).unwrap_or(usize::MAX));
                Self::Write { at, bytes }
            }
            Self::Zero { at, length, hole } => Self::Zero { at, length: length.min(left), hole },
        })
    }

    /// Makes it.
    ///
    /// # Errors
    /// If the store can't. Some of it may have been made.
    pub fn apply(&self, store: &dyn Store) -> io::Result<()> {
        match self {
            Self::Write { at, bytes } => store.write(*at, bytes),
            Self::Zero { at, length, hole } => store.zero(*at, *length, *hole),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_part_before_a_place() {
        let write = |bytes: &[u8]| Change::Write { at: 4, bytes: bytes.to_vec() };
        let zero = |length| Change::Zero { at: 4, length, hole: true };
        for (end, length) in [(5, 1), (6, 2), (7, 3), (9, 3)] {
            assert_eq!(write(b"abc").before(end), Some(write(&b"abc"[..length])));
            assert_eq!(zero(3).before(end), Some(zero(length as u64)));
        }
        for end in [0, 3, 4] {
            assert_eq!(write(b"abc").before(end), None);
            assert_eq!(zero(3).before(end), None);
        }
    }

    #[test]
    fn what_reaches_beyond_the_disk_does_not_fit() {
        let zero = |at, length| Change::Zero { at, length, hole: false };
        assert!(zero(4, 4).fits(8) && !zero(4, 5).fits(8) && !zero(u64::MAX, 2).fits(u64::MAX));
    }
}
