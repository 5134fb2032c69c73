//! Sets of memory blocks as runs: their memory depends on their contents, not on the possible size
//! of RAM.

use std::ops::Range;

use firn_types::Block;

/// A set of memory blocks: runs in ascending order that do not touch.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct BlockRuns(Vec<Range<u32>>);

impl BlockRuns {
    /// Adds a run that begins no earlier than any before it.
    pub(crate) fn push_run(&mut self, run: Range<u32>) {
        match self.0.last_mut() {
            _ if run.is_empty() => {}
            Some(last) if run.start <= last.end => last.end = last.end.max(run.end),
            _ => self.0.push(run),
        }
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The number of memory blocks in it.
    pub(crate) fn len(&self) -> u32 {
        self.0.iter().map(|run| run.end - run.start).sum()
    }

    pub(crate) fn iter_runs(&self) -> impl Iterator<Item = Range<u32>> + '_ {
        self.0.iter().cloned()
    }

    pub(crate) fn blocks(&self) -> impl Iterator<Item = Block> + '_ {
        self.iter_runs().flatten().map(Block)
    }

    /// The index of the run that has a block.
    fn run_index(&self, block: Block) -> Option<usize> {
        let after = self.0.partition_point(|run| run.start <= block.0);
        let at = after.checked_sub(1)?;
        (block.0 < self.0.get(at)?.end).then_some(at)
    }

    pub(crate) fn contains(&self, block: Block) -> bool {
        self.run_index(block).is_some()
    }

    /// The blocks that are in this set and not in the other.
    pub(crate) fn without(&self, other: &Self) -> Self {
        let (mut left, mut others) = (Self::default(), other.0.iter().peekable());
        for run in self.iter_runs() {
            let mut start = run.start;
            while let Some(other) = others.peek().filter(|other| other.start < run.end) {
                left.push_run(start..other.start.max(start));
                start = start.max(other.end);
                if other.end > run.end {
                    break;
                }
                others.next();
            }
            left.push_run(start..run.end.max(start));
        }
        left
    }

    /// The blocks that are in either set.
    pub(crate) fn union(&self, other: &Self) -> Self {
        let mut all: Vec<_> = self.iter_runs().chain(other.iter_runs()).collect();
        all.sort_unstable_by_key(|run| run.start);
        all.into_iter().collect()
    }
}

impl FromIterator<Range<u32>> for BlockRuns {
    fn from_iter<T: IntoIterator<Item = Range<u32>>>(runs: T) -> Self {
        let mut set = Self::default();
        runs.into_iter().for_each(|run| set.push_run(run));
        set
    }
}

/// The blocks of a set that have not been taken yet.
pub(crate) struct RemainingBlocks<'a> {
    all: &'a BlockRuns,
    /// The number of blocks in the runs before each.
    before: Vec<u32>,
    /// A bit for each block, in their order.
    taken: Vec<u64>,
}

impl<'a> RemainingBlocks<'a> {
    pub(crate) fn new(all: &'a BlockRuns) -> Self {
        let before = all.iter_runs().scan(0, |sum, run| {
            let before = *sum;
            *sum += run.end - run.start;
            Some(before)
        });
        let before = before.collect();
        Self { all, before, taken: vec![0; all.len().div_ceil(64) as usize] }
    }

    /// Takes a block. False if it is not in the set, or was taken before.
    pub(crate) fn remove_block(&mut self, block: Block) -> bool {
        let Some(at) = self.all.run_index(block) else { return false };
        let (Some(run), Some(before)) = (self.all.0.get(at), self.before.get(at)) else {
            return false;
        };
        let rank = before + (block.0 - run.start);
        let Some(word) = self.taken.get_mut(rank as usize / 64) else { return false };
        let bit = 1 << (rank % 64);
        let is_free = *word & bit == 0;
        *word |= bit;
        is_free
    }

    /// The blocks that were not taken.
    pub(crate) fn remaining_blocks(&self) -> BlockRuns {
        let is_left = |rank: usize| {
            self.taken.get(rank / 64).is_some_and(|word| word & (1 << (rank % 64)) == 0)
        };
        let blocks = self.all.blocks().enumerate().filter(|&(rank, _)| is_left(rank));
        blocks.map(|(_, block)| block.0..block.0 + 1).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeSet;

    fn runs(blocks: &BTreeSet<u32>) -> BlockRuns {
        blocks.iter().map(|&block| block..block + 1).collect()
    }

    proptest! {
        #[test]
        fn they_are_sets(
            one in proptest::collection::btree_set(0u32..200, 0..100),
            other in proptest::collection::btree_set(0u32..200, 0..100),
        ) {
            let (a, b) = (runs(&one), runs(&other));
            let listed = |set: &BlockRuns| set.blocks().map(|it| it.0).collect::<BTreeSet<u32>>();
            prop_assert_eq!(listed(&a), one.clone());
            prop_assert_eq!(a.len() as usize, one.len());
            prop_assert_eq!(a.without(&b), runs(&(&one - &other)));
            prop_assert_eq!(a.union(&b), runs(&(&one | &other)));
            prop_assert!((0..200).all(|it| a.contains(Block(it)) == one.contains(&it)));
            let mut untaken = RemainingBlocks::new(&a);
            for &block in &other {
                prop_assert_eq!(untaken.remove_block(Block(block)), one.contains(&block));
                prop_assert!(!untaken.remove_block(Block(block)));
            }
            prop_assert_eq!(untaken.remaining_blocks(), a.without(&b));
        }
    }

    #[test]
    fn long_runs_cost_nothing() {
        let all: BlockRuns = std::iter::once(0..u32::MAX).collect();
        let some: BlockRuns = [5..6, 9..12].into_iter().collect();
        assert_eq!(all.without(&some).iter_runs().collect::<Vec<_>>(), [0..5, 6..9, 12..u32::MAX]);
        assert!(some.without(&all).is_empty());
    }
}
