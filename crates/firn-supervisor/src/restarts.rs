//! How soon a process that keeps dying is started again.
//!
//! The first few times at once, then after pauses that grow: what kills it may pass, and a process that can't live must not
//! take the machine's time.

use std::time::{Duration, Instant};

/// Restarts that are made at once.
const QUICK_MAX: u32 = 5;

/// The first pause, and the longest.
const PAUSE_MIN: Duration = Duration::from_secs(1);
const PAUSE_MAX: Duration = Duration::from_secs(60);

/// A process that lived so long was in order.
const LIVED: Duration = Duration::from_secs(120);

/// Counts restarts.
#[derive(Debug, Default)]
pub(crate) struct Restarts {
    last: Option<Instant>,
    count: u32,
}

impl Restarts {
    /// How long to wait before the restart that is due now.
    pub(crate) fn pause(&mut self, now: Instant) -> Duration {
        let is_new = |last: Instant| now.saturating_duration_since(last) >= LIVED;
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
        let mut restarts = Restarts::default();
        let start = Instant::now();
        let pauses: Vec<u64> = (0..14).map(|_| restarts.pause(start).as_secs()).collect();
        assert_eq!(pauses, [0, 0, 0, 0, 0, 1, 2, 4, 8, 16, 32, 60, 60, 60]);
        assert_eq!(restarts.pause(start + PAUSE_MAX + LIVED), Duration::ZERO);
    }
}
