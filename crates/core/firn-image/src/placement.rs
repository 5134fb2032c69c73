//! The map of memory blocks to their locations: one look-up, two loads, whatever the size of the
//! guest.
//!
//! ```text
//!   directory, one entry per 256 memory blocks        leaves, 256 to a table
//!   | untouched | zero | table 0 | sparse | ...       | lb 3 slot 7 | zero | untouched | lb 3 slot 8 | ...
//! ```
//!
//! A chunk that is zero or untouched throughout costs four bytes. The allocated memory therefore
//! grows with the contents of an index, not with the RAM size that a damaged or hostile one claims:
//! the directory of a large guest has larger chunks, and is in memory only where it is used; and
//! once tables have taken all that the length of the file justifies, chunks become sparse, with a
//! look-up in a tree of runs.

use std::collections::BTreeMap;
use std::ops::Range;

use firn_types::Block;

use crate::locality::LocalityBlockId;
use crate::runs::BlockRuns;

/// The location of a memory block in an image.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum BlockPlacement {
    /// It was all zeros.
    Zero,
    /// It was never backed by the hypervisor. It would read as zeros.
    Untouched,
    /// It is stored.
    Stored {
        /// The locality block.
        locality_block: LocalityBlockId,
        /// The number of its entry there.
        slot: u16,
    },
}

/// The minimum number of memory blocks in a chunk.
const CHUNK_MIN: usize = 256;

/// The maximum number of chunks: guests of more than 8 TiB have larger ones.
const CHUNKS_MAX: usize = 4 << 20;

/// Directory entries for chunks without a table of their own. Untouched is zero, so that the kernel
/// provides memory only for entries that are written.
const ALL_UNTOUCHED: u32 = 0;
const ALL_ZERO: u32 = 1;
const SPARSE: u32 = 2;
const FIRST_TABLE: u32 = 3;

/// Slot numbers past every real one.
const SLOT_UNTOUCHED: u16 = u16::MAX;
const SLOT_ZERO: u16 = u16::MAX - 1;

#[derive(Clone, Copy, PartialEq, Eq)]
struct PlacementLeaf {
    locality_block: u32,
    slot: u16,
}

const UNTOUCHED: PlacementLeaf = PlacementLeaf { locality_block: 0, slot: SLOT_UNTOUCHED };
const ZERO: PlacementLeaf = PlacementLeaf { locality_block: 0, slot: SLOT_ZERO };

impl PlacementLeaf {
    fn to_placement(self) -> BlockPlacement {
        match self {
            UNTOUCHED => BlockPlacement::Untouched,
            ZERO => BlockPlacement::Zero,
            Self { locality_block, slot } => {
                BlockPlacement::Stored { locality_block: LocalityBlockId(locality_block), slot }
            }
        }
    }
}

/// The placements of all memory blocks.
pub(crate) struct PlacementMap {
    directory: Vec<u32>,
    leaves: Vec<PlacementLeaf>,
    /// Runs in sparse chunks, by their first block: their end, and their leaf.
    sparse: BTreeMap<u32, (u32, PlacementLeaf)>,
    blocks: u32,
    /// Memory blocks in a chunk, as a power of two.
    shift: u32,
    /// The number of bytes that tables may still take.
    room: u64,
}

impl PlacementMap {
    /// All `blocks` memory blocks untouched, with capacity for about `stored` that are not. Tables
    /// take `room` bytes at most.
    pub(crate) fn new(blocks: u32, stored: usize, room: u64) -> Self {
        let chunk = (blocks as usize).div_ceil(CHUNKS_MAX).next_power_of_two().max(CHUNK_MIN);
        let chunks = (blocks as usize).div_ceil(chunk);
        let room_for =
            (room / size_of::<PlacementLeaf>() as u64).min((chunks * chunk) as u64) as usize;
        let leaves = Vec::with_capacity(stored.next_multiple_of(chunk).min(room_for));
        let directory = vec![ALL_UNTOUCHED; chunks];
        let shift = chunk.trailing_zeros();
        Self { directory, leaves, sparse: BTreeMap::new(), blocks, shift, room }
    }

    /// Memory blocks in a chunk.
    fn chunk_blocks(&self) -> usize {
        1 << self.shift
    }

    /// Raises the limit on the bytes of tables.
    pub(crate) fn add_room(&mut self, bytes: u64) {
        self.room = self.room.saturating_add(bytes);
    }

    /// The placement of a memory block; untouched if it is past the last.
    pub(crate) fn get(&self, block: Block) -> BlockPlacement {
        let index = block.index();
        match self.directory.get(index >> self.shift) {
            None | Some(&ALL_UNTOUCHED) => BlockPlacement::Untouched,
            Some(&ALL_ZERO) => self.zero_unless_past(block),
            Some(&SPARSE) => self
                .leaf_of_run(block.0)
                .map_or(BlockPlacement::Untouched, PlacementLeaf::to_placement),
            Some(&table) => {
                let leaf =
                    self.leaves.get(self.first_leaf(table) + (index & (self.chunk_blocks() - 1)));
                leaf.map_or(BlockPlacement::Untouched, |leaf| leaf.to_placement())
            }
        }
    }

    fn zero_unless_past(&self, block: Block) -> BlockPlacement {
        if block.0 < self.blocks { BlockPlacement::Zero } else { BlockPlacement::Untouched }
    }

    fn first_leaf(&self, table: u32) -> usize {
        ((table - FIRST_TABLE) as usize) << self.shift
    }

    /// The leaf of a block in a sparse chunk, if it is in a run.
    fn leaf_of_run(&self, block: u32) -> Option<PlacementLeaf> {
        let (_, &(end, leaf)) = self.sparse.range(..=block).next_back()?;
        (block < end).then_some(leaf)
    }

    /// Records a stored block. False, and nothing changes, if it is past the last block or recorded
    /// already.
    pub(crate) fn set_stored(&mut self, block: Block, id: LocalityBlockId, slot: u16) -> bool {
        let (index, leaf) = (block.index(), PlacementLeaf { locality_block: id.0, slot });
        if block.0 >= self.blocks {
            return false;
        }
        match self.claim_chunk(index >> self.shift) {
            ALL_ZERO => false,
            SPARSE => self.fill_sparse(block.0..block.0 + 1, leaf) == 1,
            table => {
                let at = self.first_leaf(table) + (index & (self.chunk_blocks() - 1));
                match self.leaves.get_mut(at) {
                    Some(old) if *old == UNTOUCHED => {
                        *old = leaf;
                        true
                    }
                    _ => false,
                }
            }
        }
    }

    /// Records `len` zero blocks from `first` on. False if one is past the last block, or recorded
    /// already.
    pub(crate) fn set_zero(&mut self, first: Block, len: u32) -> bool {
        let end = first.index() + len as usize;
        end <= self.blocks as usize && self.fill_zero(first, len) == len
    }

    /// Changes the location of a stored block.
    pub(crate) fn move_to(&mut self, block: Block, id: LocalityBlockId, slot: u16) {
        let (index, new) = (block.index(), PlacementLeaf { locality_block: id.0, slot });
        match self.directory.get(index >> self.shift) {
            None | Some(&(ALL_UNTOUCHED | ALL_ZERO)) => {}
            Some(&SPARSE) => {
                if let Some((_, leaf)) = self.sparse.get_mut(&block.0) {
                    *leaf = new;
                }
            }
            Some(&table) => {
                let at = self.first_leaf(table) + (index & (self.chunk_blocks() - 1));
                if let Some(leaf) = self.leaves.get_mut(at) {
                    *leaf = new;
                }
            }
        }
    }

    /// Records the untouched ones of `len` blocks from `first` on as zero. Returns their number.
    pub(crate) fn fill_zero(&mut self, first: Block, len: u32) -> u32 {
        let end = (first.index() + len as usize).min(self.blocks as usize);
        let (mut at, mut filled, chunk) = (first.index(), 0, self.chunk_blocks());
        while at < end {
            let next = (((at >> self.shift) + 1) << self.shift).min(end);
            filled += match self.directory.get_mut(at >> self.shift) {
                Some(entry) if next - at == chunk && *entry == ALL_UNTOUCHED => {
                    *entry = ALL_ZERO;
                    chunk as u32
                }
                _ => self.fill_chunk(at..next, ZERO),
            };
            at = next;
        }
        filled
    }

    /// Records the untouched ones of some blocks of one chunk. Returns their number.
    fn fill_chunk(&mut self, range: Range<usize>, new: PlacementLeaf) -> u32 {
        let chunk = range.start >> self.shift;
        match self.claim_chunk(chunk) {
            ALL_ZERO => 0,
            SPARSE => self.fill_sparse(range.start as u32..range.end as u32, new),
            table => {
                let base = self.first_leaf(table);
                let within = base + (range.start & (self.chunk_blocks() - 1))..;
                let leaves = self.leaves.get_mut(within).unwrap_or_default();
                let free = leaves.iter_mut().take(range.len()).filter(|leaf| **leaf == UNTOUCHED);
                free.map(|leaf| *leaf = new).count() as u32
            }
        }
    }

    fn fill_sparse(&mut self, range: Range<u32>, new: PlacementLeaf) -> u32 {
        let before = self.sparse.range(..range.start).next_back().map(|(_, &(end, _))| end);
        let mut at = range.start.max(before.unwrap_or(0));
        let mut gaps = Vec::new();
        for (&start, &(end, _)) in self.sparse.range(range.clone()) {
            gaps.push(at..start);
            at = at.max(end);
        }
        gaps.push(at..range.end);
        let mut filled = 0;
        for gap in gaps.into_iter().filter(|gap| !gap.is_empty()) {
            filled += gap.end - gap.start;
            self.sparse.insert(gap.start, (gap.end, new));
        }
        filled
    }

    /// The directory entry of a chunk that is about to be written: a table, if there is room for
    /// one.
    fn claim_chunk(&mut self, chunk: usize) -> u32 {
        let bytes = (self.chunk_blocks() * size_of::<PlacementLeaf>()) as u64;
        let tables = (self.leaves.len() >> self.shift) as u32;
        let leaves = self.leaves.len() + self.chunk_blocks();
        let Some(entry) = self.directory.get_mut(chunk) else { return ALL_ZERO };
        if *entry != ALL_UNTOUCHED {
            return *entry;
        }
        *entry = match self.room.checked_sub(bytes) {
            Some(room) => {
                self.room = room;
                self.leaves.resize(leaves, UNTOUCHED);
                FIRST_TABLE + tables
            }
            None => SPARSE,
        };
        *entry
    }

    /// All zero blocks.
    pub(crate) fn zero_runs(&self) -> BlockRuns {
        self.collect_runs(|leaf| leaf == ZERO)
    }

    /// All stored blocks.
    pub(crate) fn stored_runs(&self) -> BlockRuns {
        self.collect_runs(|leaf| leaf != ZERO && leaf != UNTOUCHED)
    }

    fn collect_runs(&self, is_wanted: impl Fn(PlacementLeaf) -> bool) -> BlockRuns {
        let mut runs = BlockRuns::default();
        for (chunk, &entry) in self.directory.iter().enumerate() {
            let start = chunk << self.shift;
            let chunk =
                start as u32..(start + self.chunk_blocks()).min(self.blocks as usize) as u32;
            match entry {
                ALL_UNTOUCHED => {}
                ALL_ZERO if is_wanted(ZERO) => runs.push_run(chunk),
                ALL_ZERO => {}
                SPARSE => {
                    let within = self.sparse.range(chunk).filter(|(_, (_, leaf))| is_wanted(*leaf));
                    within.for_each(|(&start, &(end, _))| runs.push_run(start..end));
                }
                table => {
                    let leaves = self.leaves.get(self.first_leaf(table)..).unwrap_or_default();
                    let wanted = chunk.zip(leaves).filter(|(_, leaf)| is_wanted(**leaf));
                    wanted.for_each(|(block, _)| runs.push_run(block..block + 1));
                }
            }
        }
        runs
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn stored(lb: u32, slot: u16) -> BlockPlacement {
        BlockPlacement::Stored { locality_block: LocalityBlockId(lb), slot }
    }

    #[test]
    fn nothing_is_recorded_twice() {
        let mut map = PlacementMap::new(1000, 0, u64::MAX);
        assert!(map.set_zero(Block(10), 700));
        assert!(!map.set_stored(Block(10), LocalityBlockId(0), 0));
        assert!(!map.set_stored(Block(300), LocalityBlockId(0), 0));
        assert!(!map.set_zero(Block(709), 2));
        assert!(map.set_stored(Block(711), LocalityBlockId(4), 5));
        assert!(!map.set_stored(Block(1000), LocalityBlockId(0), 0));
        assert!(!map.set_zero(Block(999), 2));
    }

    #[test]
    fn past_the_end_is_untouched() {
        let mut map = PlacementMap::new(300, 0, u64::MAX);
        assert!(map.set_zero(Block(0), 300));
        assert_eq!(map.get(Block(299)), BlockPlacement::Zero);
        assert_eq!(map.get(Block(300)), BlockPlacement::Untouched);
        assert_eq!(map.get(Block(u32::MAX)), BlockPlacement::Untouched);
    }

    #[test]
    fn untouched_blocks_are_zero() {
        let mut map = PlacementMap::new(1000, 0, u64::MAX);
        assert!(map.set_stored(Block(300), LocalityBlockId(1), 2) && map.set_zero(Block(301), 9));
        assert_eq!(map.fill_zero(Block(290), 600), 590);
        assert_eq!(map.fill_zero(Block(880), 999), 110);
        assert_eq!(map.get(Block(300)), stored(1, 2));
        let zeros = (0..1000).filter(|&block| map.get(Block(block)) == BlockPlacement::Zero);
        assert_eq!(zeros.count(), 709);
    }

    #[test]
    fn the_largest_guest_takes_memory_only_for_used_blocks() {
        let mut map = PlacementMap::new(u32::MAX - 64, 0, 1 << 20);
        assert_eq!((map.directory.len(), map.chunk_blocks()), (4 << 20, 1024));
        for chunk in 0..1000 {
            assert!(map.set_zero(Block(chunk * 4096), 3));
        }
        assert_eq!((map.leaves.len() * 8, map.sparse.len()), (1 << 20, 1000 - 128));
        assert!(map.set_stored(Block(999 * 4096 + 3), LocalityBlockId(1), 2));
        assert!(!map.set_stored(Block(999 * 4096 + 2), LocalityBlockId(1), 2));
        map.move_to(Block(999 * 4096 + 3), LocalityBlockId(1), 0);
        assert_eq!(map.get(Block(999 * 4096 + 3)), stored(1, 0));
        assert_eq!(map.fill_zero(Block(999 * 4096), 10), 6);
        assert_eq!((map.zero_runs().len(), map.stored_runs().len()), (3006, 1));
    }

    #[test]
    fn a_stored_block_moves() {
        let mut map = PlacementMap::new(10, 0, u64::MAX);
        assert!(map.set_stored(Block(3), LocalityBlockId(1), 2));
        map.move_to(Block(3), LocalityBlockId(1), 0);
        assert_eq!(map.get(Block(3)), stored(1, 0));
    }

    proptest! {
        #[test]
        fn it_is_a_map(
            runs in proptest::collection::vec((0u32..900, 1u32..600, any::<bool>()), 1..20),
            tables in 0u64..8,
        ) {
            let mut map = PlacementMap::new(1500, 10, tables * 2048);
            let mut model = vec![BlockPlacement::Untouched; 1500];
            for (first, len, zero) in runs {
                let range = first as usize..(first + len) as usize;
                if model[range.clone()].iter().any(|it| *it != BlockPlacement::Untouched) {
                    continue;
                }
                if zero {
                    prop_assert!(map.set_zero(Block(first), len));
                    model[range].fill(BlockPlacement::Zero);
                } else {
                    prop_assert!(map.set_stored(Block(first), LocalityBlockId(len), 3));
                    model[first as usize] = stored(len, 3);
                }
            }
            let blocks = |wanted: fn(&BlockPlacement) -> bool| -> Vec<Block> {
                let all = model.iter().enumerate().filter(|(_, it)| wanted(it));
                all.map(|(block, _)| Block(block as u32)).collect()
            };
            let zeros = blocks(|it| *it == BlockPlacement::Zero);
            prop_assert_eq!(map.zero_runs().blocks().collect::<Vec<_>>(), zeros);
            let stored = blocks(|it| matches!(it, BlockPlacement::Stored { .. }));
            prop_assert_eq!(map.stored_runs().blocks().collect::<Vec<_>>(), stored);
            for (block, expected) in model.into_iter().enumerate() {
                prop_assert_eq!(map.get(Block(block as u32)), expected);
            }
        }
    }
}
