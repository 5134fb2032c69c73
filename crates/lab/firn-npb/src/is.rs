//! IS, "integer sort": ranks keys in ten iterations, between which two keys change (section 2.3.5).
//!
//! ```text
//!   each process      keys -> buckets by value -> total count of keys per bucket -> whole buckets for each process
//!                     keys to the owner of their bucket, counted there: the rank of a key is the count of smaller keys
//! ```

use crate::peers::{Communicator, PeersError};
use crate::random::NpbRandom;
use crate::{ProblemClass, part_of_rank};

const SEED: u64 = 314_159_265;
const ITERATIONS: u32 = 10;
/// The count of buckets, as a power of two.
const BUCKET_BITS: u32 = 10;

/// The result of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IsResult {
    /// The count of test keys with the specified rank, of 50.
    pub right_ranks: u32,
    /// Whether all 50 ranks were right, and all keys are in order at the end.
    pub is_right: bool,
}

/// Keys whose rank is known: their positions, their rank before any iteration, and its change per
/// iteration.
struct TestKeys {
    positions: [u64; 5],
    ranks: [i64; 5],
    /// The count of keys whose rank rises; that of the others falls.
    up: usize,
    /// The amount by which the change is less than the iteration's number: rising, falling.
    less: [i64; 2],
}

impl ProblemClass {
    /// The counts of keys and of values, as powers of two.
    fn size_bits(self) -> (u32, u32) {
        match self {
            Self::S => (16, 11),
            Self::W => (20, 16),
            Self::A => (23, 19),
        }
    }

    fn test_keys(self) -> TestKeys {
        match self {
            Self::S => TestKeys {
                positions: [48_427, 17_148, 23_627, 62_548, 4_431],
                ranks: [0, 18, 346, 64_917, 65_463],
                up: 3,
                less: [0, 0],
            },
            Self::W => TestKeys {
                positions: [357_773, 934_767, 875_723, 898_999, 404_505],
                ranks: [1_249, 11_698, 1_039_987, 1_043_896, 1_048_018],
                up: 2,
                less: [2, 0],
            },
            Self::A => TestKeys {
                positions: [2_112_377, 662_041, 5_336_171, 3_642_833, 4_250_760],
                ranks: [104, 17_523, 123_928, 8_288_932, 8_388_264],
                up: 3,
                less: [1, 1],
            },
        }
    }
}

impl TestKeys {
    fn expected_rank(&self, test: usize, iteration: u32) -> i64 {
        let iteration = i64::from(iteration);
        match test < self.up {
            true => self.ranks[test] + iteration - self.less[0],
            false => self.ranks[test] - (iteration - self.less[1]),
        }
    }
}

/// One process's keys.
struct ProcessKeys {
    class: ProblemClass,
    /// The number of its first key.
    first: u64,
    keys: Vec<u32>,
}

/// The keys that a process has after the exchange, and their rank among all.
struct SortedKeys {
    /// The minimum value that belongs to this process.
    low: u32,
    /// The count of all keys that are less than that.
    before: u64,
    /// The count of keys here for each value, from `low` on.
    counts: Vec<u64>,
}

/// Runs this process's part of all iterations.
///
/// # Errors
/// If the connection to another process is lost.
pub fn run(
    class: ProblemClass,
    talk: &mut impl Communicator,
) -> std::result::Result<IsResult, PeersError> {
    let mut keys = ProcessKeys::new(class, talk.rank(), talk.size());
    let tests = class.test_keys();
    let mut right = [0_u64];
    let mut sorted = None;
    for iteration in 1..=ITERATIONS {
        keys.change_keys(iteration);
        let values = keys.key_values(&tests.positions, talk)?;
        let now = keys.exchange_keys(talk)?;
        for (test, value) in values.into_iter().enumerate() {
            let is_right = now.rank_of_value(value).map(|rank| rank as i64)
                == Some(tests.expected_rank(test, iteration));
            right[0] += u64::from(is_right);
        }
        sorted = Some(now);
    }
    talk.sum_numbers(&mut right)?;
    let [right_ranks] = right;
    let is_sorted = sorted.map(|sorted| sorted.is_whole(class, talk)).transpose()?;
    let is_right = right_ranks == 5 * u64::from(ITERATIONS) && is_sorted == Some(true);
    Ok(IsResult { right_ranks: right_ranks as u32, is_right })
}

impl ProcessKeys {
    fn new(class: ProblemClass, rank: usize, size: usize) -> Self {
        let (keys, values) = class.size_bits();
        let part = part_of_rank(1 << keys, rank, size);
        let mut random = NpbRandom::after_skipping(SEED, 4 * part.start);
        let quarter = f64::from(1_u32 << (values - 2));
        let mut key = || (0..4).map(|_| random.next()).sum::<f64>();
        let keys = part.clone().map(|_| (quarter * key()) as u32).collect();
        Self { class, first: part.start, keys }
    }

    /// Sets the two keys that change in each iteration.
    fn change_keys(&mut self, iteration: u32) {
        let top = 1 << self.class.size_bits().1;
        for (index, value) in [(iteration, iteration), (iteration + ITERATIONS, top - iteration)] {
            if let Some(key) = self.local_key(u64::from(index)) {
                *key = value;
            }
        }
    }

    fn local_key(&mut self, index: u64) -> Option<&mut u32> {
        self.keys.get_mut(usize::try_from(index.checked_sub(self.first)?).ok()?)
    }

    /// The values of keys, from the processes that have them.
    fn key_values(
        &mut self,
        indexes: &[u64; 5],
        talk: &mut impl Communicator,
    ) -> std::result::Result<[u32; 5], PeersError> {
        let mut values =
            indexes.map(|index| self.local_key(index).map_or(0, |key| u64::from(*key)));
        talk.sum_numbers(&mut values)?;
        Ok(values.map(|value| value as u32))
    }

    fn bucket_bits(&self) -> u32 {
        self.class.size_bits().1 - BUCKET_BITS
    }

    /// Sends each key to the owner of its bucket, and counts the received keys.
    fn exchange_keys(
        &self,
        talk: &mut impl Communicator,
    ) -> std::result::Result<SortedKeys, PeersError> {
        let shift = self.bucket_bits();
        let mut totals = vec![0_u64; 1 << BUCKET_BITS];
        self.keys.iter().for_each(|key| totals[(key >> shift) as usize] += 1);
        talk.sum_numbers(&mut totals)?;
        let owners = bucket_owners(&totals, talk.size());
        let mut parcels = vec![Vec::new(); talk.size()];
        self.keys.iter().for_each(|&key| parcels[owners[(key >> shift) as usize]].push(key));
        let mine = |bucket: &usize| owners[*bucket] == talk.rank();
        let buckets: Vec<usize> = (0..totals.len()).filter(mine).collect();
        let before = totals.iter().take(buckets.first().copied().unwrap_or(totals.len())).sum();
        let low = (buckets.first().copied().unwrap_or(0) as u32) << shift;
        let mut counts = vec![0; buckets.len() << shift];
        for key in talk.exchange_parcels(parcels)?.into_iter().flatten() {
            if let Some(count) = counts.get_mut(key.wrapping_sub(low) as usize) {
                *count += 1;
            }
        }
        Ok(SortedKeys { low, before, counts })
    }
}

/// The owner of each bucket: adjacent buckets have the same owner, and each owner about the same
/// count of keys.
fn bucket_owners(totals: &[u64], size: usize) -> Vec<usize> {
    let all: u64 = totals.iter().sum();
    let mut before = 0;
    let owner = |total: &u64| {
        let owner = (before * size as u64 / all.max(1)) as usize;
        before += total;
        owner.min(size - 1)
    };
    totals.iter().map(owner).collect()
}

impl SortedKeys {
    /// The count of all keys that are less than this value, if it belongs to this process.
    fn rank_of_value(&self, value: u32) -> Option<u64> {
        let at = usize::try_from(value.checked_sub(self.low)?).ok()?;
        self.counts.get(at)?;
        Some(self.before + self.counts[..at].iter().sum::<u64>())
    }

    /// Whether these are all keys, each once. As they are counted by value, they are then in order.
    fn is_whole(
        &self,
        class: ProblemClass,
        talk: &mut impl Communicator,
    ) -> std::result::Result<bool, PeersError> {
        let mut all = [self.counts.iter().sum::<u64>()];
        talk.sum_numbers(&mut all)?;
        Ok(all == [1 << class.size_bits().0])
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::peers::{SingleProcess, tests::among};

    #[test]
    fn alone_or_not_the_ranks_are_the_specified_ones() {
        for class in [ProblemClass::S, ProblemClass::W] {
            let alone = run(class, &mut SingleProcess).unwrap();
            assert!(alone.is_right, "{class:?} {alone:?}");
            for one in among(3, |mut peers| run(class, &mut peers).unwrap()) {
                assert!(one.is_right, "{class:?} {one:?}");
            }
        }
    }
}
