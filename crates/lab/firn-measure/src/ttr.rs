//! Minimum mutator utilization and time-to-responsiveness, exactly.
//!
//! The waiting time inside a window is a piecewise linear function of where the window begins; its
//! corners are where a stall begins or ends at either edge of the window. The last crossing of the
//! required level is therefore found by checking the corners from the end, with no sampling.

use serde::{Deserialize, Serialize};

use crate::stalls::VcpuWaitingTime;

/// A point of a TTR curve.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct CurvePoint {
    /// The required utilization, from 0 to 1.
    pub utilization: f64,
    /// The earliest time from which on it is reached, in seconds since the command.
    pub ttr_s: f64,
}

/// The lowest utilization of any window of `window_us` that begins at `from_us` or later.
pub fn minimum_utilization(stalls: &VcpuWaitingTime, from_us: u64, window_us: u64) -> f64 {
    let later = corner_starts(stalls, window_us).into_iter().filter(|&at| at > from_us);
    later.chain([from_us]).map(|at| stalls.window_utilization(at, window_us)).fold(1.0, f64::min)
}

/// TTR(w, u): the earliest time, in seconds since the command, from which on every window of
/// `window_us` has a utilization of at least `utilization` (section 2.3).
pub fn time_to_responsiveness(stalls: &VcpuWaitingTime, window_us: u64, utilization: f64) -> f64 {
    let allowed = (1.0 - utilization) * window_us as f64 * f64::from(stalls.vcpu_count());
    let waited = |at: u64| (stalls.waited_before(at + window_us) - stalls.waited_before(at)) as f64;
    let mut later: Option<(u64, f64)> = None;
    for at in corner_starts(stalls, window_us).into_iter().rev() {
        let here = waited(at);
        if is_above_allowed(here, allowed) {
            return later.map_or(at as f64, |later| crossing_time((at, here), later, allowed))
                / 1e6;
        }
        later = Some((at, here));
    }
    0.0
}

/// TTR over utilizations of 0, 1, 2 ... 100 %.
pub fn responsiveness_curve(stalls: &VcpuWaitingTime, window_us: u64) -> Vec<CurvePoint> {
    (0..=100)
        .map(|percent| f64::from(percent) / 100.0)
        .map(|utilization| CurvePoint {
            utilization,
            ttr_s: time_to_responsiveness(stalls, window_us, utilization),
        })
        .collect()
}

/// The utilization of the window of `window_us` that begins at an instant, over these instants in
/// microseconds: the corners of a curve that is linear between them.
pub fn utilization_curve(stalls: &VcpuWaitingTime, window_us: u64) -> Vec<(u64, f64)> {
    let corners = corner_starts(stalls, window_us).into_iter();
    corners.map(|at| (at, stalls.window_utilization(at, window_us))).collect()
}

/// More waiting than allowed, beyond what rounding of `allowed` explains.
fn is_above_allowed(waited: f64, allowed: f64) -> bool {
    waited > allowed + 1e-6
}

/// Where the line between a corner above the allowed waiting time and a later one below it meets
/// the allowed level.
fn crossing_time(bad: (u64, f64), good: (u64, f64), allowed: f64) -> f64 {
    let share = (bad.1 - allowed) / (bad.1 - good.1);
    bad.0 as f64 + share * (good.0 - bad.0) as f64
}

/// Window starts at which the waiting time changes its slope, sorted; with 0.
fn corner_starts(stalls: &VcpuWaitingTime, window_us: u64) -> Vec<u64> {
    let mut corners: Vec<u64> = stalls
        .change_instants()
        .flat_map(|at| [Some(at), at.checked_sub(window_us)])
        .flatten()
        .collect();
    corners.push(0);
    corners.sort_unstable();
    corners.dedup();
    corners
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::stalls::StallInterval;
    use proptest::prelude::*;

    fn one(stalls: &[(u64, u64)]) -> VcpuWaitingTime {
        let stalls: Vec<_> = stalls
            .iter()
            .map(|&(start_us, end_us)| StallInterval { vcpu: 0, start_us, end_us })
            .collect();
        VcpuWaitingTime::new(1, &stalls)
    }

    #[test]
    fn a_vm_that_never_waits_is_responsive_at_once() {
        assert_eq!(time_to_responsiveness(&one(&[]), 1_000_000, 1.0), 0.0);
    }

    #[test]
    fn an_eager_restore_has_one_ttr_for_full_utilization() {
        let eager = one(&[(0, 32_000_000)]);
        assert_eq!(time_to_responsiveness(&eager, 1_000_000, 1.0), 32.0);
        assert_eq!(time_to_responsiveness(&eager, 1_000_000, 0.8), 31.8);
    }

    #[test]
    fn no_utilization_is_reached_at_once() {
        assert_eq!(time_to_responsiveness(&one(&[(0, 5_000_000)]), 1_000_000, 0.0), 0.0);
    }

    #[test]
    fn a_late_stall_delays_a_strict_level_only() {
        let stalls = one(&[(0, 1_000_000), (9_000_000, 9_050_000)]);
        assert!(time_to_responsiveness(&stalls, 1_000_000, 0.9) < 1.0);
        assert_eq!(time_to_responsiveness(&stalls, 1_000_000, 1.0), 9.05);
    }

    /// Section 2.3 taken literally, by trying every microsecond.
    fn slow_ttr(stalls: &VcpuWaitingTime, window_us: u64, utilization: f64) -> f64 {
        let bad = |at: &u64| stalls.window_utilization(*at, window_us) < utilization - 1e-9;
        let last_bad = (0..=stalls.end_us() + 1).rev().find(bad);
        last_bad.map_or(0.0, |at| at as f64 / 1e6)
    }

    fn any_stalls() -> impl Strategy<Value = VcpuWaitingTime> {
        let stall = (0u16..3, 0u64..300, 0u64..40);
        prop::collection::vec(stall, 0..25).prop_map(|stalls| {
            let stalls: Vec<_> = stalls
                .into_iter()
                .map(|(vcpu, start_us, length)| StallInterval {
                    vcpu,
                    start_us,
                    end_us: start_us + length,
                })
                .collect();
            VcpuWaitingTime::new(3, &stalls)
        })
    }

    proptest! {
        #[test]
        fn ttr_equals_the_definition(stalls in any_stalls(), window in 1u64..80, percent in 0u32..=100) {
            let utilization = f64::from(percent) / 100.0;
            let (fast, slow) = (time_to_responsiveness(&stalls, window, utilization), slow_ttr(&stalls, window, utilization));
            prop_assert!((fast - slow).abs() <= 1.01e-6, "fast {} slow {}", fast, slow);
        }

        #[test]
        fn the_curve_has_every_corner(stalls in any_stalls(), window in 1u64..80) {
            let curve = utilization_curve(&stalls, window);
            prop_assert!(curve.is_sorted_by_key(|corner| corner.0));
            for pair in curve.windows(2) {
                let (middle, share) = ((pair[0].0 + pair[1].0) / 2, (pair[1].0 - pair[0].0) as f64);
                let share = (middle - pair[0].0) as f64 / share;
                let expected = pair[0].1 + share * (pair[1].1 - pair[0].1);
                prop_assert!((stalls.window_utilization(middle, window) - expected).abs() < 1e-9);
            }
        }

        #[test]
        fn mmu_from_ttr_on_is_high_enough(stalls in any_stalls(), window in 1u64..80, percent in 0u32..=100) {
            let utilization = f64::from(percent) / 100.0;
            let ttr_us = (time_to_responsiveness(&stalls, window, utilization) * 1e6).ceil() as u64;
            prop_assert!(minimum_utilization(&stalls, ttr_us, window) >= utilization - 1e-9);
        }

        #[test]
        fn mmu_equals_the_definition(stalls in any_stalls(), window in 1u64..80, from in 0u64..400) {
            let all = (from..=from.max(stalls.end_us()) + 1).map(|at| stalls.window_utilization(at, window));
            let slow = all.fold(1.0, f64::min);
            prop_assert!((minimum_utilization(&stalls, from, window) - slow).abs() < 1e-9);
        }
    }
}
