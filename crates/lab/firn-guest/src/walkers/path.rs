//! The order in which a walk visits pages.

use crate::stamp::mix;

/// An endless path through a thread's pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WalkPath {
    /// All pages, in ascending order, again and again.
    Forwards,
    /// All pages, in descending order, again and again.
    Backwards,
    /// Of every `stride` pages the first `used`, in ascending order, again and again.
    Stride {
        /// Pages from one group to the next.
        stride: usize,
        /// Pages visited of each group.
        used: usize,
    },
    /// Any of the first `among` pages at each step.
    Random {
        /// The number of pages that take part.
        among: usize,
        /// Chooses the path.
        seed: u64,
    },
    /// All pages in an order drawn from the seed, the same in every pass.
    Shuffled {
        /// Chooses the order.
        seed: u64,
    },
}

impl WalkPath {
    /// The number of different pages of `pages` that are visited.
    pub fn distinct_pages(self, pages: usize) -> usize {
        match self {
            Self::Forwards | Self::Backwards | Self::Shuffled { .. } => pages,
            Self::Stride { stride, used } => pages / stride * used + (pages % stride).min(used),
            Self::Random { among, .. } => among.clamp(1, pages),
        }
    }

    /// The page of a step, below `pages`.
    pub fn page_index(self, step: u64, pages: usize) -> usize {
        let turn = (step % self.distinct_pages(pages).max(1) as u64) as usize;
        match self {
            Self::Forwards => turn,
            Self::Backwards => pages - 1 - turn,
            Self::Stride { stride, used } => turn / used * stride + turn % used,
            Self::Random { among, seed } => {
                (mix(seed ^ step) % among.clamp(1, pages) as u64) as usize
            }
            Self::Shuffled { seed } => permute(turn as u64, pages as u64, seed) as usize,
        }
    }
}

/// Element `turn` of a permutation of `0..pages`: a Feistel network over the next even number of
/// bits, applied until the result is in range. Needs no table, so it adds nothing to the memory
/// under test.
fn permute(turn: u64, pages: u64, seed: u64) -> u64 {
    let half = pages.next_power_of_two().trailing_zeros().div_ceil(2).max(1);
    let mask = (1 << half) - 1;
    let mut value = turn;
    loop {
        let (mut left, mut right) = (value >> half, value & mask);
        for round in 0..4 {
            (left, right) = (right, left ^ mix(seed ^ right ^ round << 32) & mask);
        }
        value = left << half | right;
        if value < pages {
            return value;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::HashSet;

    fn path() -> impl Strategy<Value = WalkPath> {
        prop_oneof![
            Just(WalkPath::Forwards),
            Just(WalkPath::Backwards),
            (1_usize..20).prop_flat_map(|stride| (Just(stride), 1..=stride)
                .prop_map(|(stride, used)| WalkPath::Stride { stride, used })),
            any::<u64>().prop_map(|seed| WalkPath::Shuffled { seed }),
        ]
    }

    proptest! {
        #[test]
        fn a_pass_visits_each_of_its_pages_once(path in path(), pages in 1_usize..300) {
            let distinct = path.distinct_pages(pages);
            let pass: HashSet<usize> =
                (0..distinct as u64).map(|step| path.page_index(step, pages)).collect();
            prop_assert_eq!(pass.len(), distinct);
            prop_assert!(pass.iter().all(|&index| index < pages));
        }
    }

    #[test]
    fn strides_visit_the_first_pages_of_each() {
        let path = WalkPath::Stride { stride: 16, used: 4 };
        let pass: Vec<usize> = (0..9).map(|step| path.page_index(step, 32)).collect();
        assert_eq!(pass, [0, 1, 2, 3, 16, 17, 18, 19, 0]);
    }
}
