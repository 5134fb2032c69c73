//! The order of memory blocks in an image: by access, physical or random. Pure.

use std::collections::{HashMap, HashSet};

use firn_types::{Block, BlockSize};

use crate::locality::FilledBy;
use crate::reorder::ListedWorkingSet;
use crate::runs::{BlockRuns, RemainingBlocks};
use crate::sections::AccessGroup;

/// Orders memory blocks by number.
pub(crate) fn order_physically(stored: &BlockRuns) -> Vec<AccessGroup> {
    vec![AccessGroup { filled_by: FilledBy::Unknown, blocks: stored.blocks().collect() }]
}

/// Shuffles memory blocks: the same seed and blocks give the same order.
pub(crate) fn order_randomly(stored: &BlockRuns, seed: u64) -> Vec<AccessGroup> {
    let mut blocks: Vec<Block> = stored.blocks().collect();
    shuffle_blocks(&mut blocks, seed);
    vec![AccessGroup { filled_by: FilledBy::Unknown, blocks }]
}

/// Orders memory blocks as the groups list them; blocks that no group lists follow by number, as if
/// swept.
pub(crate) fn order_by_access(stored: &BlockRuns, groups: &[AccessGroup]) -> Vec<AccessGroup> {
    let mut left = RemainingBlocks::new(stored);
    let mut out: Vec<_> = groups
        .iter()
        .map(|group| {
            let blocks =
                group.blocks.iter().copied().filter(|&block| left.remove_block(block)).collect();
            AccessGroup { filled_by: group.filled_by, blocks }
        })
        .collect();
    out.push(AccessGroup {
        filled_by: FilledBy::Sweep,
        blocks: left.remaining_blocks().blocks().collect(),
    });
    out.retain(|group| !group.blocks.is_empty());
    out
}

/// Makes a listed working set worse. The blocks that it keeps stay in their order.
pub(crate) fn degrade_working_set(
    change: ListedWorkingSet,
    working_set: Vec<Block>,
    stored: &BlockRuns,
    seed: u64,
) -> Vec<Block> {
    let some = |mut blocks: Vec<Block>, count: usize| {
        shuffle_blocks(&mut blocks, seed);
        blocks.truncate(count);
        blocks
    };
    let listed = working_set.len();
    match change {
        ListedWorkingSet::Kept => working_set,
        ListedWorkingSet::Dropped(percent) => {
            let count = listed * usize::from(percent.min(100)) / 100;
            let dropped: HashSet<Block> = some(working_set.clone(), count).into_iter().collect();
            working_set.into_iter().filter(|block| !dropped.contains(block)).collect()
        }
        ListedWorkingSet::Wrong => {
            let mut others = RemainingBlocks::new(stored);
            for &block in &working_set {
                others.remove_block(block);
            }
            some(others.remaining_blocks().blocks().collect(), listed)
        }
    }
}

/// Converts groups of memory blocks of one size to another size. If several old blocks fall into
/// one new block, it is listed once, at the first of them. If an old block falls into several new
/// ones, each is listed.
pub(crate) fn resize_groups(
    groups: &[AccessGroup],
    from: BlockSize,
    to: BlockSize,
) -> Vec<AccessGroup> {
    let mut seen = HashMap::new();
    let mut first_time = |block: &Block| seen.insert(*block, ()).is_none();
    let resized = |group: &AccessGroup| AccessGroup {
        filled_by: group.filled_by,
        blocks: resize_blocks(&group.blocks, from, to).filter(&mut first_time).collect(),
    };
    groups.iter().map(resized).collect()
}

/// Converts blocks of one size to another size, one after another. A new block is listed once for
/// each old block that falls into it.
pub(crate) fn resize_blocks(
    blocks: &[Block],
    from: BlockSize,
    to: BlockSize,
) -> impl Iterator<Item = Block> {
    blocks.iter().flat_map(move |&block| blocks_of(block, from, to)).map(Block)
}

/// The blocks of another size that share pages with a block.
pub(crate) fn blocks_of(block: Block, from: BlockSize, to: BlockSize) -> std::ops::Range<u32> {
    let pages = from.pages_of(block);
    to.block_of(pages.start).0..to.blocks_in(pages.end.0)
}

/// The shuffle of Fisher and Yates, with SplitMix64 for random numbers.
fn shuffle_blocks(blocks: &mut [Block], seed: u64) {
    let mut state = seed;
    for end in (1..blocks.len()).rev() {
        let below = end as u64 + 1;
        // The high half of the product: uniform to within 2^-32 for any number of blocks there can
        // be.
        let other = (u128::from(split_mix(&mut state)) * u128::from(below)) >> 64;
        blocks.swap(end, other as usize);
    }
}

fn split_mix(state: &mut u64) -> u64 {
    *state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let mut mixed = *state;
    mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    mixed ^ (mixed >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn set(blocks: &[u32]) -> BlockRuns {
        blocks.iter().map(|&block| block..block + 1).collect()
    }

    fn group(filled_by: FilledBy, blocks: &[u32]) -> AccessGroup {
        AccessGroup { filled_by, blocks: blocks.iter().copied().map(Block).collect() }
    }

    #[test]
    fn blocks_in_no_group_are_last() {
        let groups = [group(FilledBy::Device, &[9, 3, 9, 77]), group(FilledBy::Unknown, &[500])];
        let arranged = order_by_access(&set(&[1, 2, 3, 9]), &groups);
        let expected = [group(FilledBy::Device, &[9, 3]), group(FilledBy::Sweep, &[1, 2])];
        assert_eq!(arranged, expected);
    }

    #[test]
    fn a_working_set_is_made_worse_by_as_much_as_was_asked_for() {
        let stored = set(&(0..900).collect::<Vec<_>>());
        let working_set: Vec<Block> = (0..200).rev().map(Block).collect();
        let made = |change, seed| degrade_working_set(change, working_set.clone(), &stored, seed);
        assert_eq!(made(ListedWorkingSet::Kept, 1), working_set);
        let most = made(ListedWorkingSet::Dropped(10), 1);
        assert_eq!(most.len(), 180);
        assert!(most.is_sorted_by(|a, b| a > b), "what is left stays in its order");
        assert_ne!(most, made(ListedWorkingSet::Dropped(10), 2));
        assert_eq!(made(ListedWorkingSet::Dropped(100), 1), []);
        let wrong = made(ListedWorkingSet::Wrong, 1);
        assert_eq!(wrong.len(), 200);
        assert!(wrong.iter().all(|block| stored.contains(*block) && block.0 >= 200));
    }

    #[test]
    fn a_seed_is_an_order() {
        let all = set(&(0..1000).collect::<Vec<_>>());
        assert_eq!(order_randomly(&all, 1), order_randomly(&all, 1));
        assert_ne!(order_randomly(&all, 1), order_randomly(&all, 2));
        assert_ne!(order_randomly(&all, 1), order_physically(&all));
    }

    #[test]
    fn blocks_fall_together_and_apart() {
        let size = |pages| BlockSize::new(pages).unwrap();
        let groups = [group(FilledBy::Sweep, &[5, 4, 0])];
        assert_eq!(resize_groups(&groups, size(2), size(4)), [group(FilledBy::Sweep, &[2, 0])]);
        assert_eq!(
            resize_groups(&groups, size(2), size(1)),
            [group(FilledBy::Sweep, &[10, 11, 8, 9, 0, 1])]
        );
    }

    proptest! {
        #[test]
        fn shuffling_loses_nothing(blocks in proptest::collection::btree_set(0u32..1000, 0..200), seed: u64) {
            let blocks: Vec<_> = blocks.into_iter().collect();
            let mut shuffled: Vec<u32> = order_randomly(&set(&blocks), seed)[0].blocks.iter().map(|it| it.0).collect();
            shuffled.sort_unstable();
            prop_assert_eq!(shuffled, blocks);
        }
    }
}
