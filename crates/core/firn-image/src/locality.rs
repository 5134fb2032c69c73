//! Locality blocks: the containers of memory blocks, each read from disk at once.
//!
//! ```text
//!   one locality block (64 KiB)
//!   0          3112      5224                13416          60790     65536
//!   | block 77 | block 78 | block 1024 (raw) |     ...      | zeros |
//!     slot 0     slot 1     slot 2                            padding
//! ```
//!
//! A locality block holds data only. The location of each memory block is in the index, so that
//! eight incompressible blocks of 8 KiB fill 64 KiB exactly. Memory blocks follow one another
//! without gaps, in the order in which they were pushed; the next one that does not fit starts a
//! new locality block, and the remainder is zeros.

use std::fmt;
use std::ops::Range;

use firn_types::{Block, VcpuId};
use serde::{Deserialize, Serialize};

use crate::codec::StoredAs;
use crate::compress::PackedBlock;
use crate::geometry::Geometry;

/// The maximum number of memory blocks in one locality block.
pub const ENTRIES_MAX: usize = 4096;

/// The number of a locality block: its position in the file.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct LocalityBlockId(pub u32);

impl LocalityBlockId {
    /// The number as an index into a table with one entry per locality block.
    pub fn index(self) -> usize {
        self.0 as usize
    }
}

impl fmt::Debug for LocalityBlockId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "locality block {}", self.0)
    }
}

impl fmt::Display for LocalityBlockId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(self, f)
    }
}

/// The location of one memory block in its locality block.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct BlockEntry {
    /// The memory block.
    pub block: Block,
    /// Its offset in the locality block, in bytes.
    pub offset: u32,
    /// Its stored length in bytes.
    pub stored_len: u32,
    /// The form in which it is stored.
    pub stored_as: StoredAs,
    /// xxh3 (64 bits) of its uncompressed bytes.
    pub checksum: u64,
}

impl BlockEntry {
    /// The range of its bytes in the locality block.
    pub fn range(&self) -> Range<usize> {
        self.offset as usize..self.end_offset()
    }

    pub(crate) fn end_offset(&self) -> usize {
        self.offset as usize + self.stored_len as usize
    }
}

/// The origin of the memory blocks of a locality block (Halite, section 5.1: one vCPU's accesses do
/// not predict another's).
#[derive(
    Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default, Serialize, Deserialize,
)]
#[serde(rename_all = "lowercase")]
pub enum FilledBy {
    /// First touched by this vCPU.
    Vcpu(VcpuId),
    /// First touched by the hypervisor itself: emulated devices.
    Device,
    /// Not touched before the background sweep copied it.
    Sweep,
    /// Not recorded.
    #[default]
    Unknown,
}

const CODE_DEVICE: u16 = 0xfffd;
const CODE_SWEEP: u16 = 0xfffe;
const CODE_UNKNOWN: u16 = 0xffff;

impl FilledBy {
    /// Its number in the index: a vCPU's own, or one of the three largest numbers.
    pub(crate) fn code(self) -> u16 {
        match self {
            Self::Vcpu(VcpuId(id)) if id < CODE_DEVICE => id,
            Self::Vcpu(_) | Self::Unknown => CODE_UNKNOWN,
            Self::Device => CODE_DEVICE,
            Self::Sweep => CODE_SWEEP,
        }
    }

    pub(crate) fn from_code(code: u16) -> Self {
        match code {
            CODE_DEVICE => Self::Device,
            CODE_SWEEP => Self::Sweep,
            CODE_UNKNOWN => Self::Unknown,
            id => Self::Vcpu(VcpuId(id)),
        }
    }
}

/// A filled locality block, ready to be written.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct LocalityBlock {
    /// The origin of its memory blocks.
    pub filled_by: FilledBy,
    /// Its memory blocks, in order of [`BlockEntry::offset`].
    pub entries: Vec<BlockEntry>,
    /// Their stored bytes, without padding.
    pub bytes: Vec<u8>,
}

/// Fills locality blocks with memory blocks, in the order in which they arrive.
///
/// Pure: blocks in, locality blocks out. A save has one packer for each vCPU and one for the sweep.
#[derive(Debug)]
pub struct LocalityBlockPacker {
    capacity: usize,
    filled_by: FilledBy,
    open: LocalityBlock,
}

impl LocalityBlockPacker {
    /// A packer of blocks whose origin is not recorded.
    pub fn new(geometry: Geometry) -> Self {
        Self::filled_by(geometry, FilledBy::Unknown)
    }

    /// A packer whose locality blocks record the origin of their memory blocks.
    pub fn filled_by(geometry: Geometry, filled_by: FilledBy) -> Self {
        let capacity = geometry.locality_block_bytes as usize;
        let open = LocalityBlock { filled_by, ..LocalityBlock::default() };
        Self { capacity, filled_by, open }
    }

    /// Adds a block. Returns the locality block before it if this one did not fit any more.
    pub fn push_block(&mut self, packed: PackedBlock) -> Option<LocalityBlock> {
        debug_assert!(packed.stored.len() <= self.capacity, "a memory block fits a locality block");
        let full = if self.has_room(packed.stored.len()) { None } else { self.take_filled() };
        self.open.entries.push(BlockEntry {
            block: packed.block,
            offset: self.open.bytes.len() as u32,
            stored_len: packed.stored.len() as u32,
            stored_as: packed.stored_as,
            checksum: packed.checksum,
        });
        if self.open.bytes.is_empty() {
            self.open.bytes.reserve_exact(self.capacity);
        }
        self.open.bytes.extend_from_slice(&packed.stored);
        full
    }

    fn has_room(&self, bytes: usize) -> bool {
        self.open.bytes.len() + bytes <= self.capacity && self.open.entries.len() < ENTRIES_MAX
    }

    /// Whether it has a memory block that is in no locality block yet.
    pub fn has_open_block(&self, block: Block) -> bool {
        self.open.entries.iter().any(|entry| entry.block == block)
    }

    /// Returns the locality block that was filled so far, if it has any block. The packer can be
    /// used further.
    pub fn take_filled(&mut self) -> Option<LocalityBlock> {
        let empty = LocalityBlock { filled_by: self.filled_by, ..LocalityBlock::default() };
        let open = std::mem::replace(&mut self.open, empty);
        (!open.entries.is_empty()).then_some(open)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn packed(block: u32, len: usize) -> PackedBlock {
        let stored = vec![block as u8; len];
        PackedBlock { block: Block(block), stored, stored_as: StoredAs::Raw, checksum: 0 }
    }

    #[test]
    fn eight_raw_blocks_fill_a_locality_block_exactly() {
        let mut packer = LocalityBlockPacker::new(Geometry::new(100));
        let full: Vec<_> =
            (0..17).filter_map(|block| packer.push_block(packed(block, 8192))).collect();
        assert_eq!(full.len(), 2);
        assert_eq!(full[0].bytes.len(), 65_536);
        assert_eq!(full[1].entries[0].block, Block(8));
        assert_eq!(packer.take_filled().map(|rest| rest.entries.len()), Some(1));
        assert_eq!(packer.take_filled(), None);
    }

    #[test]
    fn blocks_follow_one_another_without_gaps() {
        let mut packer = LocalityBlockPacker::filled_by(Geometry::new(100), FilledBy::Sweep);
        assert_eq!(packer.push_block(packed(1, 10)), None);
        assert_eq!(packer.push_block(packed(2, 20)), None);
        let filled = packer.take_filled().unwrap();
        assert_eq!(filled.entries[1].range(), 10..30);
        assert_eq!(&filled.bytes[filled.entries[1].range()], [2; 20]);
        assert_eq!(filled.filled_by, FilledBy::Sweep);
    }

    #[test]
    fn tiny_blocks_are_limited_in_number() {
        let mut packer = LocalityBlockPacker::new(Geometry::new(100));
        let full = (0..=ENTRIES_MAX as u32).find_map(|block| packer.push_block(packed(block, 1)));
        assert_eq!(full.map(|full| full.entries.len()), Some(ENTRIES_MAX));
    }

    #[test]
    fn codes_are_inverse() {
        let vcpu = FilledBy::Vcpu(VcpuId(3));
        for by in [vcpu, FilledBy::Device, FilledBy::Sweep, FilledBy::Unknown] {
            assert_eq!(FilledBy::from_code(by.code()), by);
        }
        assert_eq!(FilledBy::Vcpu(VcpuId(CODE_SWEEP)).code(), CODE_UNKNOWN);
    }
}
