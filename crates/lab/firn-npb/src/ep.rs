//! EP, "embarrassingly parallel": pairs of Gaussian deviates, counted by square annuli (section
//! 2.3.1).
//!
//! A batch of numbers is generated into memory before it is used, as in the reference
//! implementation (NPB 1 and later): EP writes the same MiB in each process again and again.

use crate::peers::{Communicator, PeersError};
use crate::random::NpbRandom;
use crate::{ProblemClass, part_of_rank};

const SEED: u64 = 271_828_183;
/// Pairs that are generated at once; each process has whole batches.
const BATCH_PAIRS: usize = 1 << 16;
/// The maximum relative difference between a sum and the specified one.
const TOLERANCE: f64 = 1e-8;

/// The result of a run.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct EpResult {
    /// The sums of both deviates.
    pub sums: [f64; 2],
    /// The count of pairs by annulus.
    pub counts: [u64; 10],
    /// Whether the sums are the specified ones.
    pub is_right: bool,
}

impl ProblemClass {
    fn pair_count(self) -> u64 {
        match self {
            Self::S => 1 << 24,
            Self::W => 1 << 25,
            Self::A => 1 << 28,
        }
    }

    fn specified_sums(self) -> [f64; 2] {
        match self {
            Self::S => [-3.247_834_652_034_74e3, -6.958_407_078_382_297e3],
            Self::W => [-2.863_319_731_645_753e3, -6.320_053_679_109_499e3],
            Self::A => [-4.295_875_165_629_892e3, -1.580_732_573_678_431e4],
        }
    }
}

/// Runs this process's part, and combines all parts.
///
/// # Errors
/// If the connection to another process is lost.
pub fn run(
    class: ProblemClass,
    talk: &mut impl Communicator,
) -> std::result::Result<EpResult, PeersError> {
    let (mut sums, mut counts) = ([0.0; 2], [0; 10]);
    let mut numbers = vec![0.0; 2 * BATCH_PAIRS];
    for batch in part_of_rank(class.pair_count() / BATCH_PAIRS as u64, talk.rank(), talk.size()) {
        let mut random = NpbRandom::after_skipping(SEED, batch * numbers.len() as u64);
        numbers.fill_with(|| random.next());
        tally_pairs(&numbers, &mut sums, &mut counts);
    }
    talk.sum_both(&mut sums, &mut counts)?;
    let is_near =
        |(sum, specified): (&f64, f64)| ((sum - specified) / specified).abs() <= TOLERANCE;
    let is_right = sums.iter().zip(class.specified_sums()).all(is_near);
    Ok(EpResult { sums, counts, is_right })
}

fn tally_pairs(numbers: &[f64], sums: &mut [f64; 2], counts: &mut [u64; 10]) {
    for pair in numbers.chunks_exact(2) {
        let (x, y) = (2.0 * pair[0] - 1.0, 2.0 * pair[1] - 1.0);
        let square = x * x + y * y;
        if square > 1.0 {
            continue;
        }
        let factor = (-2.0 * square.ln() / square).sqrt();
        let deviates = [x * factor, y * factor];
        let annulus = deviates[0].abs().max(deviates[1].abs()) as usize;
        counts[annulus.min(9)] += 1;
        sums.iter_mut().zip(deviates).for_each(|(sum, deviate)| *sum += deviate);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::peers::{SingleProcess, tests::among};

    #[test]
    fn alone_or_not_the_sums_are_the_specified_ones() {
        let alone = run(ProblemClass::S, &mut SingleProcess).unwrap();
        assert!(alone.is_right, "{alone:?}");
        assert_eq!(alone.counts.iter().sum::<u64>(), 13_176_389);
        let together = among(3, |mut peers| run(ProblemClass::S, &mut peers).unwrap());
        for one in together {
            assert!(one.is_right && one.counts == alone.counts, "{one:?}");
        }
    }
}
