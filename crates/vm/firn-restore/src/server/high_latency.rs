//! Requests for high-latency storage: in stored order, and perhaps for everything.
//!
//! An access costs as much as reading many units. So the wanted units are read in the order in
//! which they are stored, and a gap is read where that costs less than a second access. No working
//! set is complete: each unit that it missed costs the guest an access. How the working set was
//! found shows how many these are ([`expected_misses`]). If reading all units takes no longer than
//! the wanted units and those accesses, all units are read, from front to back:
//!
//! ```text
//!   wanted     ===  ==     = ====   =  ==     and then the guest's own accesses   .  .   .  .  .   .  .
//!   all        ===========================
//! ```

use std::ops::Range;
use std::time::Duration;

use super::cost::StorageCost;
use super::sequence::{CoalescingRules, order_requests};

/// Units that the guest requests beside a complete working set while it becomes responsive, one
/// after the other.
const MISSES_MIN: f64 = 40.0;
/// Units that the guest requests, at most, beside a working set of unknown completeness.
const MISSES_MAX: f64 = 400.0;
/// Up to this share of the working set found late, misses are at their minimum: of complete ones it
/// was a thousandth at most.
const LATE_SHARE_COMPLETE: f64 = 0.003;
/// From this share on, misses are at their maximum: of others it was 0.014 or more, and an eighth
/// of one that grows evenly.
const LATE_SHARE_INCOMPLETE: f64 = 0.012;

/// Requests for high-latency storage.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct PrefetchRequests {
    pub(crate) runs: Vec<Range<u32>>,
    /// Whether they cover all units, from front to back.
    pub(crate) covers_all_units: bool,
}

impl PrefetchRequests {
    /// Requests for the `wanted` units of `0..end`, or for all of `all` if that takes no longer,
    /// with `longest` units in one request at most.
    ///
    /// Units that are in memory already may be in neither list. The guest is expected to request
    /// `missed` units beside the wanted ones (see [`expected_misses`]).
    pub(crate) fn new(
        wanted: &[u32],
        all: &[u32],
        missed: u32,
        (end, longest): (u32, u32),
        cost: &StorageCost,
    ) -> Self {
        let reach = CoalescingRules::high_latency(longest, cost.units_per_access());
        let runs = order_requests(wanted, end, reach);
        let everything = order_requests(all, end, reach);
        let missed = cost.access_latency() * missed;
        let is_more = !wanted.is_empty() && all.len() > wanted.len();
        let alone = separate_time(&runs, cost).min(sequential_time(&runs, cost));
        match is_more && sequential_time(&everything, cost) <= alone + missed {
            true => Self { runs: everything, covers_all_units: true },
            false => Self { runs, covers_all_units: false },
        }
    }
}

/// Whether a working set of which this share was found late is complete, or nearly so.
pub(crate) fn is_working_set_complete(found_late: Option<f64>) -> bool {
    found_late.is_some_and(|late| late <= LATE_SHARE_COMPLETE)
}

/// How many units are expected to be missing from a working set of which this share was found late,
/// that is, in the last eighth of the time in which the guest was traced.
pub(crate) fn expected_misses(found_late: Option<f64>) -> u32 {
    let lack = found_late.map_or(1.0, |late| {
        ((late - LATE_SHARE_COMPLETE) / (LATE_SHARE_INCOMPLETE - LATE_SHARE_COMPLETE))
            .clamp(0.0, 1.0)
    });
    (MISSES_MIN + lack * (MISSES_MAX - MISSES_MIN)) as u32
}

/// Whether this count of expected misses is the minimum, which [`expected_misses`] gives a working
/// set that is complete.
pub(super) fn is_misses_min(missed: u32) -> bool {
    f64::from(missed) <= MISSES_MIN
}

/// The time of these requests from front to back: for each gap, the kernel reads through it, or an
/// access is added.
fn sequential_time(runs: &[Range<u32>], cost: &StorageCost) -> Duration {
    let gaps = runs.windows(2).map(|pair| pair[1].start - pair[0].end);
    let gaps: Duration = gaps.map(|gap| cost.transfer_time(gap).min(cost.access_latency())).sum();
    cost.request_time_min(runs.iter().map(|run| run.len() as u32).sum()) + gaps
}

/// The time of these requests one by one, if each costs an access, even one that begins where the
/// one before it ended.
fn separate_time(runs: &[Range<u32>], cost: &StorageCost) -> Duration {
    runs.iter().map(|run| cost.request_time_min(run.len() as u32)).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    const END: u32 = 10_000;

    /// A disk with an access latency of 12 ms; a unit of 64 KiB is assumed to cost 1.1 ms.
    fn disk() -> StorageCost {
        StorageCost::from_known_latency(65_536, Duration::from_millis(12))
    }

    fn requests(wanted: &[u32], all: u32) -> PrefetchRequests {
        missing(wanted, all, 400)
    }

    fn missing(wanted: &[u32], all: u32, missed: u32) -> PrefetchRequests {
        PrefetchRequests::new(wanted, &(0..all).collect::<Vec<_>>(), missed, (END, 15), &disk())
    }

    #[test]
    fn a_working_set_that_was_found_early_misses_little() {
        assert_eq!(
            [0.0, 0.003, 0.012, 0.125].map(|late| expected_misses(Some(late))),
            [40, 40, 400, 400]
        );
        assert_eq!(expected_misses(None), 400);
    }

    #[test]
    fn a_complete_working_set_is_read_alone() {
        let third: Vec<u32> = (0..1_800).collect();
        assert!(!missing(&third, 5_200, expected_misses(Some(0.001))).covers_all_units);
        assert!(missing(&third, 5_200, expected_misses(Some(0.4))).covers_all_units);
    }

    #[test]
    fn a_bad_latency_estimate_does_not_split_adjacent_units() {
        let (third, all): (Vec<u32>, Vec<u32>) = ((0..1_800).collect(), (0..5_200).collect());
        let hurried = StorageCost::from_known_latency(65_536, Duration::from_millis(40));
        assert!(
            !PrefetchRequests::new(&third, &all, expected_misses(Some(0.001)), (END, 15), &hurried)
                .covers_all_units
        );
    }

    #[test]
    fn a_little_of_much_is_read_alone() {
        let PrefetchRequests { runs, covers_all_units } = requests(&[700, 3, 5], 9_000);
        assert_eq!((runs, covers_all_units), (vec![3..6, 700..701], false));
    }

    #[test]
    fn an_image_that_is_soon_there_is_read_whole() {
        let PrefetchRequests { runs, covers_all_units } = requests(&[700, 3, 5], 1_000);
        assert!(covers_all_units && runs.len() == 1_000_usize.div_ceil(15));
        assert!(runs.windows(2).all(|pair| pair[0].end == pair[1].start));
    }

    #[test]
    fn scattered_units_are_read_with_the_whole_file() {
        let scattered: Vec<u32> = (0..9_000).step_by(23).collect();
        assert!(requests(&scattered, 9_000).covers_all_units);
    }

    #[test]
    fn a_range_with_many_gaps_is_not_read_whole() {
        let all: Vec<u32> = (0..9_990).step_by(15).collect();
        let wanted: Vec<u32> = all.iter().copied().step_by(12).collect();
        assert!(!PrefetchRequests::new(&wanted, &all, 200, (END, 15), &disk()).covers_all_units);
    }

    #[test]
    fn where_nothing_is_wanted_any_more_nothing_is_read() {
        let PrefetchRequests { runs, covers_all_units } = requests(&[], 1_000);
        assert!(runs.is_empty() && !covers_all_units);
    }

    #[test]
    fn where_all_is_wanted_nothing_else_is_read() {
        assert!(!requests(&(0..100).collect::<Vec<_>>(), 100).covers_all_units);
    }
}
