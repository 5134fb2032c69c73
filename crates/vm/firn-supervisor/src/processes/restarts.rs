//! The delay before a process that dies repeatedly is restarted.
//!
//! The first few restarts follow at once, later ones after growing delays: the cause may pass, and
//! a process that can't live must not use much of the host's processor time.

use std::time::{Duration, Instant};

/// The number of restarts without a delay.
const QUICK_MAX: u32 = 5;

/// The first delay, and the longest.
const PAUSE_MIN: Duration = Duration::from_secs(1);
const PAUSE_MAX: Duration = Duration::from_secs(60);

/// A process that lived for this time counts as healthy.
const HEALTHY_AFTER: Duration = Duration::from_secs(120);

/// Counts restarts, and computes the delay before the next one.
#[derive(Debug, Default)]
pub(crate) struct RestartBackoff {
    last: Option<Instant>,
    count: u32,
}

impl RestartBackoff {
    /// The delay before the next restart.
    pub(crate) fn next_delay(&mut self, now: Instant) -> Duration {
        let is_new = |last: Instant| now.saturating_duration_since(last) >= HEALTHY_AFTER;
        if self.last.is_none_or(is_new) {
            self.count = 0;
        }
        self.count = self.count.saturating_add(1);
        let pause = match self.count.checked_sub(QUICK_MAX + 1) {
            Some(slow) => (PAUSE_MIN * (1 << slow.min(6))).min(PAUSE_MAX),
            None => Duration::ZERO,
        };
        self.last = Some(now + pause);
        pause
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_restarts_are_quick_and_there_is_no_last_one() {
        let mut restarts = RestartBackoff::default();
        let start = Instant::now();
        let pauses: Vec<u64> = (0..14).map(|_| restarts.next_delay(start).as_secs()).collect();
        assert_eq!(pauses, [0, 0, 0, 0, 0, 1, 2, 4, 8, 16, 32, 60, 60, 60]);
        assert_eq!(restarts.next_delay(start + PAUSE_MAX + HEALTHY_AFTER), Duration::ZERO);
    }
}
