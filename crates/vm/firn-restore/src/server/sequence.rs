//! Request order: the order in which units are prefetched, and which of them are read with one
//! request.
//!
//! The guest will want them roughly in first-access order; storage delivers more when neighbours
//! are read together. So the list is cut into windows, and each window is read in stored order,
//! with small gaps read through: units in a gap will be wanted later anyway. Where a read costs
//! mostly its access, the window is the whole list, and gaps are read where that costs less than
//! another access ([`CoalescingRules::high_latency`]).
//!
//! ```text
//!   first accessed     7 3 9 4 11 | 40 12 38 ..
//!   stored order       3 4 7 9 11 | 12 38 40
//!   requests           3-4  7---11 | 12  38---40      8, 10 and 39 are read along
//! ```

use std::ops::Range;

/// How much a request may deviate from the order in which units are wanted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct CoalescingRules {
    /// The longest request, in units.
    pub(crate) longest: u32,
    /// Units in a window.
    pub(crate) window: usize,
    /// The longest gap that is read through, in units.
    pub(crate) gap: u32,
}

impl CoalescingRules {
    /// For storage of unknown or low latency. A window is 8 MiB of locality blocks, which even a
    /// disk reads in a tenth of a second.
    pub(crate) fn low_latency(longest: u32) -> Self {
        Self { longest: longest.max(1), window: 128, gap: 1 }
    }

    /// For storage where an access costs as much as reading `worth` units: all in stored order, and
    /// a gap is read where that costs less than another access.
    pub(crate) fn high_latency(longest: u32, worth: u32) -> Self {
        let gap = worth.clamp(1, longest.saturating_sub(2).max(1));
        Self { longest: longest.max(1), window: usize::MAX, gap }
    }
}

/// Requests that cover these units, and some others, none twice. `units` are below `end`.
pub(crate) fn order_requests(units: &[u32], end: u32, reach: CoalescingRules) -> Vec<Range<u32>> {
    let mut covered = vec![false; end as usize];
    let mut requests = Vec::new();
    for window in units.chunks(reach.window.max(1)) {
        let mut window: Vec<u32> = window.to_vec();
        window.retain(|&unit| !covered[unit as usize]);
        window.sort_unstable();
        for request in coalesce_units(&window, &covered, reach) {
            request.clone().for_each(|unit| covered[unit as usize] = true);
            requests.push(request);
        }
    }
    requests
}

/// Ascending units as requests; gaps are included if no other request covers them.
fn coalesce_units(units: &[u32], covered: &[bool], reach: CoalescingRules) -> Vec<Range<u32>> {
    let mut requests: Vec<Range<u32>> = Vec::new();
    for &unit in units {
        match requests.last_mut() {
            Some(last) if can_extend_to(last, unit, covered, reach) => last.end = unit + 1,
            _ => requests.push(unit..unit + 1),
        }
    }
    requests
}

fn can_extend_to(
    request: &Range<u32>,
    unit: u32,
    covered: &[bool],
    reach: CoalescingRules,
) -> bool {
    let gap = request.end..unit;
    gap.len() as u32 <= reach.gap
        && unit + 1 - request.start <= reach.longest
        && gap.into_iter().all(|between| !covered[between as usize])
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn neighbours_are_read_together_and_small_gaps_through() {
        assert_eq!(
            order_requests(&[7, 3, 9, 4, 20], 30, CoalescingRules::low_latency(16)),
            [3..5, 7..10, 20..21]
        );
    }

    #[test]
    fn no_request_is_too_long() {
        let all: Vec<u32> = (0..40).collect();
        assert_eq!(
            order_requests(&all, 40, CoalescingRules::low_latency(16)),
            [0..16, 16..32, 32..40]
        );
    }

    #[test]
    fn a_unit_that_is_needed_much_earlier_is_read_earlier() {
        let near = CoalescingRules::low_latency(1000);
        let late_first: Vec<u32> = (1000..1000 + near.window as u32).chain([0]).collect();
        assert_eq!(order_requests(&late_first, 2000, near).last(), Some(&(0..1)));
        assert_eq!(
            order_requests(&late_first, 2000, CoalescingRules::high_latency(1000, 5)).first(),
            Some(&(0..1))
        );
    }

    #[test]
    fn high_latency_storage_is_read_through_gaps() {
        let far = CoalescingRules::high_latency(16, 9);
        assert_eq!(order_requests(&[30, 0, 8, 40], 60, far), [0..9, 30..41]);
    }

    proptest! {
        #[test]
        fn every_unit_is_read_once(
            units in proptest::collection::vec(0u32..600, 0..400),
            longest in 1u32..20,
            worth in 0u32..40,
        ) {
            let reach = if worth == 0 { CoalescingRules::low_latency(longest) } else { CoalescingRules::high_latency(longest, worth) };
            let requests = order_requests(&units, 600, reach);
            let mut times = vec![0; 600];
            for request in &requests {
                prop_assert!(!request.is_empty() && request.len() as u32 <= longest);
                request.clone().for_each(|unit| times[unit as usize] += 1);
            }
            prop_assert!(units.iter().all(|&unit| times[unit as usize] == 1));
            prop_assert!(times.iter().all(|&times| times <= 1));
        }
    }
}
