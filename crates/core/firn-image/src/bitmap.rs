//! A set of memory blocks that changes: a bitmap, allocated only where blocks were added.

use firn_types::Block;

/// Memory blocks in a part.
const PART: usize = 1024;

/// The bits of a part.
type PartWords = [u64; PART / 64];

/// A set of memory blocks. Parts of it that were always empty take no memory.
#[derive(Clone)]
pub(crate) struct Bitmap {
    parts: Vec<Option<Box<PartWords>>>,
    blocks: u32,
}

impl Bitmap {
    pub(crate) fn new(blocks: u32) -> Self {
        Self { parts: vec![None; (blocks as usize).div_ceil(PART)], blocks }
    }

    /// Adds a block. A block past the last one is ignored.
    pub(crate) fn insert(&mut self, block: Block) {
        if block.0 >= self.blocks {
            return;
        }
        let (word, bit) = bit_position(block);
        if let Some(part) = self.parts.get_mut(block.index() / PART) {
            part.get_or_insert_default()[word] |= bit;
        }
    }

    /// Removes a block, and returns whether the set had it.
    pub(crate) fn remove_block(&mut self, block: Block) -> bool {
        let (word, bit) = bit_position(block);
        let Some(Some(part)) = self.parts.get_mut(block.index() / PART) else { return false };
        let was_there = part[word] & bit != 0;
        part[word] &= !bit;
        was_there
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = Block> + '_ {
        let used =
            self.parts.iter().enumerate().filter_map(|(at, part)| Some((at, part.as_ref()?)));
        used.flat_map(|(at, part)| {
            let first = (at * PART) as u32;
            let blocks = (0..PART as u32).map(move |at| Block(first + at));
            blocks.filter(|&block| {
                let (word, bit) = bit_position(block);
                part[word] & bit != 0
            })
        })
    }

    pub(crate) fn len(&self) -> u32 {
        let words = self.parts.iter().flatten().flat_map(|part| part.iter());
        words.map(|word| word.count_ones()).sum()
    }
}

/// The word and the bit of a block in its part.
fn bit_position(block: Block) -> (usize, u64) {
    (block.index() % PART / 64, 1 << (block.0 % 64))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn it_is_a_set(blocks in proptest::collection::btree_set(0u32..5000, 0..300), taken in 0u32..5000) {
            let mut set = Bitmap::new(4000);
            blocks.iter().for_each(|&block| set.insert(Block(block)));
            let mut expected: Vec<u32> = blocks.into_iter().filter(|&it| it < 4000).collect();
            prop_assert_eq!(set.remove_block(Block(taken)), expected.contains(&taken));
            expected.retain(|&it| it != taken);
            prop_assert_eq!(set.len() as usize, expected.len());
            prop_assert_eq!(set.iter().map(|it| it.0).collect::<Vec<_>>(), expected);
        }
    }

    #[test]
    fn the_largest_bitmap_takes_memory_only_for_its_bits() {
        let mut set = Bitmap::new(u32::MAX);
        set.insert(Block(u32::MAX - 1));
        set.insert(Block(u32::MAX));
        assert_eq!(set.iter().collect::<Vec<_>>(), [Block(u32::MAX - 1)]);
    }
}
