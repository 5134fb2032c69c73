//! Sweep throttle: how fast the background sweep may copy.
//!
//! A guest that touches memory quickly makes the checkpoint progress by itself, and a sweep beside
//! it only delays it (Halite, section 6). So the sweep runs when there was no fault for a moment.
//! It never starves: after [`SweepThrottle::SWEEP_WAIT_MAX`] it copies a small batch whatever the
//! guest does, so a checkpoint always ends.
//!
//! ```text
//!   faults   | ||| |  |||||||||||||||||||||||||||||| |
//!   sweep            #              #                  ##################
//!                    ^ patience over: one batch        ^ quiet: full speed
//! ```

use std::time::Duration;

/// The next step of the sweep.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum SweepStep {
    /// Copy up to this many blocks, then call again.
    Copy(u32),
    /// Wait this long, then call again.
    Wait(Duration),
}

/// The throttle of one sweep. Times are counted from any fixed instant.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SweepThrottle {
    throttled: bool,
    last_batch: Duration,
}

impl SweepThrottle {
    /// The sweep runs when the last fault was at least this long ago.
    pub(crate) const QUIET_TIME: Duration = Duration::from_millis(2);
    /// The longest time for which the sweep copies nothing.
    pub(crate) const SWEEP_WAIT_MAX: Duration = Duration::from_millis(20);
    /// Blocks in a batch that is copied in spite of faults.
    const SMALL_BATCH: u32 = 64;
    /// Blocks between two checks for faults.
    const BATCH: u32 = 32;

    /// A throttle that yields to faults, or one that never does.
    pub(crate) fn new(throttled: bool, now: Duration) -> Self {
        Self { throttled, last_batch: now }
    }

    /// The step to take now, given the time of the last fault.
    pub(crate) fn next_step(&mut self, now: Duration, last_fault: Option<Duration>) -> SweepStep {
        let since_fault = last_fault.map_or(Duration::MAX, |at| now.saturating_sub(at));
        if !self.throttled || since_fault >= Self::QUIET_TIME {
            self.last_batch = now;
            return SweepStep::Copy(Self::BATCH);
        }
        let waited = now.saturating_sub(self.last_batch);
        if waited >= Self::SWEEP_WAIT_MAX {
            self.last_batch = now;
            return SweepStep::Copy(Self::SMALL_BATCH);
        }
        SweepStep::Wait((Self::QUIET_TIME - since_fault).min(Self::SWEEP_WAIT_MAX - waited))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const MS: Duration = Duration::from_millis(1);

    #[test]
    fn a_quiet_guest_is_swept_at_full_speed() {
        let mut pace = SweepThrottle::new(true, Duration::ZERO);
        assert_eq!(pace.next_step(MS, None), SweepStep::Copy(SweepThrottle::BATCH));
    }

    #[test]
    fn a_busy_guest_is_left_alone_for_a_while() {
        let mut pace = SweepThrottle::new(true, Duration::ZERO);
        assert!(matches!(pace.next_step(5 * MS, Some(5 * MS)), SweepStep::Wait(_)));
        assert_eq!(
            pace.next_step(25 * MS, Some(25 * MS)),
            SweepStep::Copy(SweepThrottle::SMALL_BATCH)
        );
    }

    #[test]
    fn without_throttle_faults_do_not_matter() {
        let mut pace = SweepThrottle::new(false, Duration::ZERO);
        assert_eq!(pace.next_step(MS, Some(MS)), SweepStep::Copy(SweepThrottle::BATCH));
    }

    proptest! {
        #[test]
        fn the_sweep_never_waits_longer_than_its_limit(faults in prop::collection::vec(0u64..3000, 1..200)) {
            let mut pace = SweepThrottle::new(true, Duration::ZERO);
            let (mut now, mut idle_since) = (Duration::ZERO, Duration::ZERO);
            for gap_us in faults {
                now += Duration::from_micros(gap_us);
                match pace.next_step(now, Some(now)) {
                    SweepStep::Copy(_) => idle_since = now,
                    SweepStep::Wait(wait) => now += wait,
                }
                prop_assert!(now - idle_since <= SweepThrottle::SWEEP_WAIT_MAX + Duration::from_millis(3));
            }
        }
    }
}
