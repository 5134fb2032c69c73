//! How to read storage that is far: by place, and perhaps everything.
//!
//! Getting there costs as much as reading many units. So what is wanted is read in the order in which it is stored, through
//! the gaps that cost less than passing them. And no working set is complete: each unit that it missed costs the guest a
//! way. If reading all there is takes no longer than what is wanted and those ways, all is read, from front to back:
//!
//! ```text
//!   wanted     ===  ==     = ====   =  ==     and then the guest's own ways   .  .   .  .  .   .  .
//!   all        ===========================
//! ```

use std::ops::Range;
use std::time::Duration;

use super::cost::Cost;
use super::sequence::{Reach, sequence};

/// Units that the guest asks for beside a good working set while it becomes responsive, one after the other: at least so
/// many, and in experiments up to 200.
const MISSED_LEAST: f64 = 40.0;
/// And so many beside one that names next to nothing.
const MISSED_MOST: f64 = 400.0;
/// The least are missed by one that names so much of everything.
const NAMES_MUCH: f64 = 0.35;

/// Requests for storage that is far.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Requests {
    pub(crate) runs: Vec<Range<u32>>,
    /// Whether they go through all there is, from front to back.
    pub(crate) in_order: bool,
}

impl Requests {
    /// For these units of `0..end`, or for all of `all` if that is as good, with `longest` units in one request at most.
    ///
    /// Some of either may be there already; `share` is what the working set named of everything.
    pub(crate) fn new(
        wanted: &[u32],
        all: &[u32],
        share: f64,
        (end, longest): (u32, u32),
        cost: &Cost,
    ) -> Self {
        let reach = Reach::far(longest, cost.worth());
        let runs = sequence(wanted, end, reach);
        let everything = sequence(all, end, reach);
        let missed = cost.way() * missed(share);
        let is_more = !wanted.is_empty() && all.len() > wanted.len();
        match is_more && through(&everything, cost) <= time(&runs, cost) + missed {
            true => Self { runs: everything, in_order: true },
            false => Self { runs, in_order: false },
        }
    }
}

/// How many units a working set that names such a share of everything is expected to miss.
fn missed(share: f64) -> u32 {
    let lack = (1.0 - share / NAMES_MUCH).max(0.0);
    (MISSED_LEAST + lack * (MISSED_MOST - MISSED_LEAST)) as u32
}

/// What these take from front to back: the kernel reads through a gap, or a way is gone.
fn through(runs: &[Range<u32>], cost: &Cost) -> Duration {
    let gaps = runs.windows(2).map(|pair| pair[1].start - pair[0].end);
    let gaps: Duration = gaps.map(|gap| cost.reading(gap).min(cost.way())).sum();
    cost.least(runs.iter().map(|run| run.len() as u32).sum()) + gaps
}

/// What these take one by one.
fn time(runs: &[Range<u32>], cost: &Cost) -> Duration {
    runs.iter().map(|run| cost.least(run.len() as u32)).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    const END: u32 = 10_000;

    /// A disk to which it takes 12 ms; a unit of 64 KiB is taken to cost 1.1 ms.
    fn disk() -> Cost {
        Cost::told(65_536, Duration::from_millis(12))
    }

    fn requests(wanted: &[u32], all: u32) -> Requests {
        let share = wanted.len() as f64 / f64::from(all);
        Requests::new(wanted, &(0..all).collect::<Vec<_>>(), share, (END, 15), &disk())
    }

    #[test]
    fn a_large_working_set_is_trusted_with_more() {
        assert_eq!([0.0, 0.35, 1.0].map(missed), [400, 40, 40]);
        let third: Vec<u32> = (0..1_800).collect();
        assert!(!requests(&third, 5_200).in_order);
        assert!(requests(&third[..180], 5_200).in_order);
    }

    #[test]
    fn a_little_of_much_is_read_alone() {
        let Requests { runs, in_order } = requests(&[700, 3, 5], 9_000);
        assert_eq!((runs, in_order), (vec![3..6, 700..701], false));
    }

    #[test]
    fn an_image_that_is_soon_there_is_read_whole() {
        let Requests { runs, in_order } = requests(&[700, 3, 5], 1_000);
        assert!(in_order && runs.len() == 1_000_usize.div_ceil(15));
        assert!(runs.windows(2).all(|pair| pair[0].end == pair[1].start));
    }

    #[test]
    fn what_is_scattered_everywhere_comes_with_all_the_rest() {
        let scattered: Vec<u32> = (0..9_000).step_by(23).collect();
        assert!(requests(&scattered, 9_000).in_order);
    }

    #[test]
    fn what_is_full_of_gaps_is_not_read_whole() {
        let all: Vec<u32> = (0..9_990).step_by(15).collect();
        let wanted: Vec<u32> = all.iter().copied().step_by(12).collect();
        assert!(!Requests::new(&wanted, &all, 0.1, (END, 15), &disk()).in_order);
    }

    #[test]
    fn where_nothing_is_wanted_any_more_nothing_is_read() {
        let Requests { runs, in_order } = requests(&[], 1_000);
        assert!(runs.is_empty() && !in_order);
    }

    #[test]
    fn where_all_is_wanted_nothing_else_is_read() {
        assert!(!requests(&(0..100).collect::<Vec<_>>(), 100).in_order);
    }
}
