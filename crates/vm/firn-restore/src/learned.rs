//! Learned blocks: memory blocks that earlier restores of an image had to read on demand, because
//! the estimator of its working set missed them. No I/O.
//!
//! A restore in which a page is already there can't see whether it is used, and a restore that
//! checks makes the guest pay. So no restore checks. A memory block that the guest had to wait for
//! is expected for some restores, then left out of one. If the guest waits for it again, it is
//! expected for twice as long; if not, it is forgotten.
//!
//! ```text
//!   read on demand --> expected for 2-5 restores --> left out of one --> read on demand: expected for 2n restores, max. 64
//!                        |                                |
//!                        | read on demand before          '--> not read on demand: forgotten
//!                        | it was prefetched: starts anew
//! ```
//!
//! So in the long run a block that is always used is missed in one restore of 65, and one that is
//! no longer used costs a few more reads. The number of blocks is limited: those with the longest
//! terms stay.

use std::collections::HashSet;
use std::time::Duration;

use firn_types::Block;
use serde::{Deserialize, Serialize};

/// The version of the format.
const VERSION: u32 = 1;

/// The minimum number of restores for which a new block is expected.
const FIRST_TERM_MIN: u8 = 2;

/// Up to this many more restores, less one: blocks that were learned together are not all left out
/// together.
const FIRST_TERM_SPREAD: u8 = 4;

/// Maximum number of restores for which a block is expected.
const TERM_MAX: u8 = 64;

/// Page faults are recorded for this long after the guest began to run.
pub const LEARNING_WINDOW: Duration = Duration::from_secs(10);

/// Maximum number of blocks that are remembered.
pub const LEARNED_MAX: usize = 16_384;

/// The state of one block, written `[block, term, left]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(into = "(u32, u8, u8)", from = "(u32, u8, u8)")]
struct LearnedBlock {
    block: Block,
    /// The number of consecutive restores for which it is expected.
    term: u8,
    /// The number of them that are left; with none it is left out of the next.
    left: u8,
}

impl From<LearnedBlock> for (u32, u8, u8) {
    fn from(LearnedBlock { block, term, left }: LearnedBlock) -> Self {
        (block.0, term, left)
    }
}

impl From<(u32, u8, u8)> for LearnedBlock {
    fn from((block, term, left): (u32, u8, u8)) -> Self {
        Self { block: Block(block), term, left }
    }
}

/// The learned blocks of one image.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LearnedBlocks {
    version: u32,
    /// The image's identity: an image that is written to the same file later is another one.
    image: String,
    blocks: Vec<LearnedBlock>,
}

impl LearnedBlocks {
    /// No blocks yet.
    pub fn new(image: &str) -> Self {
        Self { version: VERSION, image: image.to_owned(), blocks: Vec::new() }
    }

    /// Whether it belongs to this image, and to this version of the format.
    pub fn is_about(&self, image: &str) -> bool {
        self.version == VERSION && self.image == image
    }

    /// The blocks that the next restore is expected to need, in the order in which they were first
    /// read on demand.
    pub fn expected_blocks(&self) -> Vec<Block> {
        self.blocks.iter().filter(|it| it.left > 0).map(|it| it.block).collect()
    }

    /// All blocks that are remembered, in the order in which they were first read on demand.
    pub fn all_blocks(&self) -> Vec<Block> {
        self.blocks.iter().map(|it| it.block).collect()
    }

    /// The number of blocks that are remembered.
    pub fn len(&self) -> usize {
        self.blocks.len()
    }

    /// Whether no blocks are remembered.
    pub fn is_empty(&self) -> bool {
        self.blocks.is_empty()
    }

    /// Updates the blocks after a restore that used [`Self::expected_blocks`]: `asked` are the
    /// blocks that its guest waited for, beside the image's working set, in order.
    pub fn learn_from(&mut self, asked: &[Block]) {
        let mut new: HashSet<Block> = asked.iter().copied().collect();
        self.blocks.retain_mut(|lesson| lesson.update_term(new.remove(&lesson.block)));
        let first = asked.iter().filter(|block| new.remove(block));
        self.blocks.extend(first.map(|&block| LearnedBlock::new(block)));
        self.drop_shortest_terms();
    }

    fn drop_shortest_terms(&mut self) {
        if self.blocks.len() > LEARNED_MAX {
            let mut by_term = self.blocks.clone();
            by_term.sort_by_key(|lesson| std::cmp::Reverse(lesson.term));
            let kept: HashSet<Block> = by_term[..LEARNED_MAX].iter().map(|it| it.block).collect();
            self.blocks.retain(|lesson| kept.contains(&lesson.block));
        }
    }
}

impl LearnedBlock {
    fn new(block: Block) -> Self {
        let term =
            FIRST_TERM_MIN + (block.0.wrapping_mul(0x9e37_79b1) >> 16) as u8 % FIRST_TERM_SPREAD;
        Self { block, term, left: term }
    }

    /// Updates the block after one more restore. Returns whether it stays.
    fn update_term(&mut self, was_asked_for: bool) -> bool {
        match (was_asked_for, self.left) {
            (true, 0) => {
                self.term = self.term.saturating_mul(2).min(TERM_MAX);
                self.left = self.term;
            }
            (true, _) => self.left = self.term,
            (false, 0) => return false,
            (false, _) => self.left -= 1,
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// The blocks that the guest waits for if it uses these and expected blocks are there in time.
    fn asked(learned: &LearnedBlocks, used: &[u32]) -> Vec<Block> {
        let expected = learned.expected_blocks();
        used.iter().copied().map(Block).filter(|block| !expected.contains(block)).collect()
    }

    #[test]
    fn always_used_blocks_are_rarely_left_out() {
        let mut learned = LearnedBlocks::new("a");
        let used: Vec<u32> = (100..200).collect();
        let mut missed = 0;
        for restore in 0..1000 {
            let asked = asked(&learned, &used);
            missed += if restore < 300 { 0 } else { asked.len() };
            learned.learn_from(&asked);
        }
        assert!(missed <= 100 * 700 / 60, "{missed}");
        assert_eq!(learned.len(), 100);
    }

    #[test]
    fn blocks_learned_together_are_not_left_out_together() {
        let mut learned = LearnedBlocks::new("a");
        let used: Vec<u32> = (0..1000).collect();
        learned.learn_from(&asked(&learned, &used));
        let most = (0..8).map(|_| {
            let asked = asked(&learned, &used);
            learned.learn_from(&asked);
            asked.len()
        });
        assert!(most.max().unwrap() < 500);
    }

    #[test]
    fn late_blocks_start_with_a_new_count() {
        let mut learned = LearnedBlocks::new("a");
        for _ in 0..20 {
            learned.learn_from(&[Block(7)]);
            assert_eq!(learned.expected_blocks(), [Block(7)]);
        }
    }

    #[test]
    fn those_that_proved_themselves_stay() {
        let mut learned = LearnedBlocks::new("a");
        let old: Vec<Block> = (0..100).map(Block).collect();
        // Until every one of them has been left out once, and read on demand again.
        (0..12).for_each(|_| {
            let asked = asked(&learned, &(0..100).collect::<Vec<_>>());
            learned.learn_from(&asked);
        });
        let many: Vec<Block> = (1000..1000 + LEARNED_MAX as u32).map(Block).collect();
        learned.learn_from(&many);
        assert_eq!(learned.len(), LEARNED_MAX);
        let known: HashSet<Block> = learned.blocks.iter().map(|it| it.block).collect();
        assert!(old.iter().all(|block| known.contains(block)));
    }

    #[test]
    fn it_is_written_in_few_words() {
        let mut learned = LearnedBlocks::new("0f");
        learned.learn_from(&[Block(3), Block(9)]);
        let text = serde_json::to_string(&learned).unwrap();
        assert!(text.starts_with(r#"{"version":1,"image":"0f","blocks":[[3,"#), "{text}");
        assert_eq!(serde_json::from_str::<LearnedBlocks>(&text).unwrap(), learned);
        assert!(learned.is_about("0f") && !learned.is_about("0e"));
    }

    proptest! {
        #[test]
        fn unused_blocks_are_forgotten(
            past in prop::collection::vec(prop::collection::vec(0u32..50, 0..20), 0..40),
        ) {
            let mut learned = LearnedBlocks::new("a");
            for used in &past {
                let asked = asked(&learned, used);
                learned.learn_from(&asked);
            }
            (0..=u32::from(TERM_MAX)).for_each(|_| learned.learn_from(&[]));
            prop_assert!(learned.is_empty());
        }

        #[test]
        fn no_block_is_listed_twice(
            past in prop::collection::vec(prop::collection::vec(0u32..20, 0..30), 0..20),
        ) {
            let mut learned = LearnedBlocks::new("a");
            for asked in past {
                let asked: Vec<Block> = asked.into_iter().map(Block).collect();
                learned.learn_from(&asked);
                let mut known: Vec<u32> = learned.blocks.iter().map(|it| it.block.0).collect();
                known.sort_unstable();
                prop_assert!(known.is_sorted_by(|a, b| a < b));
            }
        }
    }
}
