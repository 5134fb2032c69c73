//! Where each memory block is: one look-up, two loads, whatever the size of the guest.
//!
//! ```text
//!   directory, one entry per 256 memory blocks        leaves, 256 to a table
//!   | untouched | zero | table 0 | untouched | ...    | lb 3 slot 7 | zero | untouched | lb 3 slot 8 | ...
//! ```
//!
//! A chunk that is zero or untouched throughout costs four bytes. What is allocated therefore grows with what an index
//! holds, not with the RAM size a damaged or hostile one claims.

use firn_types::Block;

use crate::locality::LocalityBlockId;

/// What an image has of a memory block.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Placement {
    /// It was all zeros.
    Zero,
    /// It was never backed by the hypervisor: zeros too, if ever read.
    Untouched,
    /// It is stored.
    Stored {
        /// In this locality block.
        locality_block: LocalityBlockId,
        /// As this one of its entries.
        slot: u16,
    },
}

const CHUNK: usize = 256;

/// A directory entry for a chunk without a table of its own.
const ALL_UNTOUCHED: u32 = u32::MAX;
const ALL_ZERO: u32 = u32::MAX - 1;

/// Slot numbers past every real one.
const SLOT_UNTOUCHED: u16 = u16::MAX;
const SLOT_ZERO: u16 = u16::MAX - 1;

#[derive(Clone, Copy, PartialEq, Eq)]
struct Leaf {
    locality_block: u32,
    slot: u16,
}

const UNTOUCHED: Leaf = Leaf { locality_block: 0, slot: SLOT_UNTOUCHED };
const ZERO: Leaf = Leaf { locality_block: 0, slot: SLOT_ZERO };

/// The placements of all memory blocks.
pub(crate) struct Placements {
    directory: Vec<u32>,
    leaves: Vec<Leaf>,
    blocks: u32,
}

impl Placements {
    /// All `blocks` memory blocks untouched, with room for about `stored` that are not.
    pub(crate) fn new(blocks: u32, stored: usize) -> Self {
        let chunks = (blocks as usize).div_ceil(CHUNK);
        let expected = stored.next_multiple_of(CHUNK).min(chunks * CHUNK);
        let leaves = Vec::with_capacity(expected);
        Self { directory: vec![ALL_UNTOUCHED; chunks], leaves, blocks }
    }

    /// Where a memory block is; untouched if it is past the last.
    pub(crate) fn get(&self, block: Block) -> Placement {
        let index = block.index();
        let leaf = match self.directory.get(index / CHUNK) {
            None | Some(&ALL_UNTOUCHED) => return Placement::Untouched,
            Some(&ALL_ZERO) => return self.zero_unless_past(block),
            Some(&table) => self.leaves.get(table as usize * CHUNK + index % CHUNK),
        };
        match leaf {
            None | Some(&UNTOUCHED) => Placement::Untouched,
            Some(&ZERO) => Placement::Zero,
            Some(&Leaf { locality_block, slot }) => {
                Placement::Stored { locality_block: LocalityBlockId(locality_block), slot }
            }
        }
    }

    fn zero_unless_past(&self, block: Block) -> Placement {
        if block.0 < self.blocks { Placement::Zero } else { Placement::Untouched }
    }

    /// Records a stored block. False, and nothing changes, if it is past the last block or recorded already.
    pub(crate) fn set_stored(&mut self, block: Block, id: LocalityBlockId, slot: u16) -> bool {
        self.set(block, Leaf { locality_block: id.0, slot })
    }

    /// Records `len` zero blocks from `first` on. False if one is past the last block, or recorded already.
    pub(crate) fn set_zero(&mut self, first: Block, len: u32) -> bool {
        let (start, end) = (first.index(), first.index() + len as usize);
        if end > self.blocks as usize {
            return false;
        }
        let inner = start.next_multiple_of(CHUNK)..(end - end % CHUNK);
        if inner.is_empty() {
            return (start..end).all(|block| self.set(Block(block as u32), ZERO));
        }
        (start..inner.start).all(|block| self.set(Block(block as u32), ZERO))
            && self.set_chunks_zero(inner.start / CHUNK..inner.end / CHUNK)
            && (inner.end..end).all(|block| self.set(Block(block as u32), ZERO))
    }

    fn set_chunks_zero(&mut self, chunks: std::ops::Range<usize>) -> bool {
        let Some(chunks) = self.directory.get_mut(chunks) else { return false };
        let free = chunks.iter().all(|&entry| entry == ALL_UNTOUCHED);
        chunks.fill(ALL_ZERO);
        free
    }

    fn set(&mut self, block: Block, leaf: Leaf) -> bool {
        if block.0 >= self.blocks {
            return false;
        }
        let Some(table) = self.table_of(block.index() / CHUNK) else { return false };
        let Some(old) = self.leaves.get_mut(table * CHUNK + block.index() % CHUNK) else {
            return false;
        };
        let free = *old == UNTOUCHED;
        if free {
            *old = leaf;
        }
        free
    }

    /// Tells a stored block another slot.
    pub(crate) fn move_to(&mut self, block: Block, id: LocalityBlockId, slot: u16) {
        if let Some(table) = self.table_of(block.index() / CHUNK)
            && let Some(leaf) = self.leaves.get_mut(table * CHUNK + block.index() % CHUNK)
        {
            *leaf = Leaf { locality_block: id.0, slot };
        }
    }

    /// Records as zero what is untouched of `len` blocks from `first` on. Gives how many blocks that were.
    pub(crate) fn fill_zero(&mut self, first: Block, len: u32) -> u32 {
        let end = (first.index() + len as usize).min(self.blocks as usize);
        let (mut at, mut filled) = (first.index(), 0);
        while at < end {
            let next = (at - at % CHUNK + CHUNK).min(end);
            filled += self.fill_part_zero(at, next);
            at = next;
        }
        filled
    }

    /// The same within one chunk.
    fn fill_part_zero(&mut self, start: usize, end: usize) -> u32 {
        let is_whole = end - start == CHUNK;
        match self.directory.get_mut(start / CHUNK) {
            Some(entry) if is_whole && *entry == ALL_UNTOUCHED => {
                *entry = ALL_ZERO;
                CHUNK as u32
            }
            Some(_) => (start..end).filter(|&it| self.set(Block(it as u32), ZERO)).count() as u32,
            None => 0,
        }
    }

    /// The table of a chunk, made if it has none. `None` if the chunk is zero throughout.
    fn table_of(&mut self, chunk: usize) -> Option<usize> {
        let entry = self.directory.get_mut(chunk)?;
        if *entry == ALL_UNTOUCHED {
            *entry = (self.leaves.len() / CHUNK) as u32;
            self.leaves.resize(self.leaves.len() + CHUNK, UNTOUCHED);
        }
        (*entry != ALL_ZERO).then_some(*entry as usize)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn stored(lb: u32, slot: u16) -> Placement {
        Placement::Stored { locality_block: LocalityBlockId(lb), slot }
    }

    #[test]
    fn nothing_is_recorded_twice() {
        let mut map = Placements::new(1000, 0);
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
        let mut map = Placements::new(300, 0);
        assert!(map.set_zero(Block(0), 300));
        assert_eq!(map.get(Block(299)), Placement::Zero);
        assert_eq!(map.get(Block(300)), Placement::Untouched);
        assert_eq!(map.get(Block(u32::MAX)), Placement::Untouched);
    }

    #[test]
    fn zeros_fill_what_is_untouched() {
        let mut map = Placements::new(1000, 0);
        assert!(map.set_stored(Block(300), LocalityBlockId(1), 2) && map.set_zero(Block(301), 9));
        assert_eq!(map.fill_zero(Block(290), 600), 590);
        assert_eq!(map.fill_zero(Block(880), 999), 110);
        assert_eq!(map.get(Block(300)), stored(1, 2));
        let zeros = (0..1000).filter(|&block| map.get(Block(block)) == Placement::Zero);
        assert_eq!(zeros.count(), 709);
    }

    #[test]
    fn a_stored_block_moves() {
        let mut map = Placements::new(10, 0);
        assert!(map.set_stored(Block(3), LocalityBlockId(1), 2));
        map.move_to(Block(3), LocalityBlockId(1), 0);
        assert_eq!(map.get(Block(3)), stored(1, 0));
    }

    proptest! {
        #[test]
        fn it_is_a_map(runs in proptest::collection::vec((0u32..900, 1u32..600, any::<bool>()), 1..20)) {
            let mut map = Placements::new(1500, 10);
            let mut model = vec![Placement::Untouched; 1500];
            for (first, len, zero) in runs {
                let range = first as usize..(first + len) as usize;
                if model[range.clone()].iter().any(|it| *it != Placement::Untouched) {
                    continue;
                }
                if zero {
                    prop_assert!(map.set_zero(Block(first), len));
                    model[range].fill(Placement::Zero);
                } else {
                    prop_assert!(map.set_stored(Block(first), LocalityBlockId(len), 3));
                    model[first as usize] = stored(len, 3);
                }
            }
            for (block, expected) in model.into_iter().enumerate() {
                prop_assert_eq!(map.get(Block(block as u32)), expected);
            }
        }
    }
}
