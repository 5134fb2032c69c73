//! In which order units are read ahead, and which of them with one request.
//!
//! The guest will want them in first-access order, roughly; storage gives more when neighbours are read together. So
//! the list is cut into windows, and each window is read by place, with small gaps read through: what lies in one will
//! be wanted later anyway.
//!
//! ```text
//!   first accessed     7 3 9 4 11 | 40 12 38 ..
//!   by place           3 4 7 9 11 | 12 38 40
//!   requests           3-4  7---11 | 12  38---40      8, 10 and 39 come along
//! ```

use std::ops::Range;

/// Units in a window: 8 MiB of locality blocks, which even a disk reads in a tenth of a second.
const WINDOW: usize = 128;

/// The longest gap that is read through, in units.
const GAP: u32 = 1;

/// Requests of at most `longest` units each that read these units, and some beside, none twice. `units` are below
/// `end`.
pub(crate) fn sequence(units: &[u32], end: u32, longest: u32) -> Vec<Range<u32>> {
    let mut covered = vec![false; end as usize];
    let mut requests = Vec::new();
    for window in units.chunks(WINDOW) {
        let mut window: Vec<u32> = window.to_vec();
        window.retain(|&unit| !covered[unit as usize]);
        window.sort_unstable();
        for request in joined(&window, &covered, longest) {
            request.clone().for_each(|unit| covered[unit as usize] = true);
            requests.push(request);
        }
    }
    requests
}

/// Ascending units as requests, over gaps that nobody has covered.
fn joined(units: &[u32], covered: &[bool], longest: u32) -> Vec<Range<u32>> {
    let mut requests: Vec<Range<u32>> = Vec::new();
    for &unit in units {
        match requests.last_mut() {
            Some(last) if may_join(last, unit, covered, longest) => last.end = unit + 1,
            _ => requests.push(unit..unit + 1),
        }
    }
    requests
}

fn may_join(request: &Range<u32>, unit: u32, covered: &[bool], longest: u32) -> bool {
    let gap = request.end..unit;
    gap.len() as u32 <= GAP
        && unit + 1 - request.start <= longest
        && gap.into_iter().all(|between| !covered[between as usize])
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn neighbours_are_read_together_and_small_gaps_through() {
        assert_eq!(sequence(&[7, 3, 9, 4, 20], 30, 16), [3..5, 7..10, 20..21]);
    }

    #[test]
    fn no_request_is_too_long() {
        let all: Vec<u32> = (0..40).collect();
        assert_eq!(sequence(&all, 40, 16), [0..16, 16..32, 32..40]);
    }

    #[test]
    fn what_is_wanted_much_earlier_is_read_earlier() {
        let late_first: Vec<u32> = (1000..1000 + WINDOW as u32).chain([0]).collect();
        assert_eq!(sequence(&late_first, 2000, 1000).last(), Some(&(0..1)));
    }

    proptest! {
        #[test]
        fn every_unit_is_read_once(
            units in proptest::collection::vec(0u32..600, 0..400),
            longest in 1u32..20,
        ) {
            let requests = sequence(&units, 600, longest);
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
