//! A limit on the rate of steps.

use std::thread::sleep;
use std::time::{Duration, Instant};

/// Allows `per_second` steps per second, or any number at once.
///
/// A guest that was paused (it was checkpointed, or waited for pages) does not make up for lost
/// time in a burst: after a stall of more than a second the rate counts from now.
pub struct RateLimiter {
    interval: Option<Duration>,
    next: Instant,
}

impl RateLimiter {
    /// A limit of `per_second` steps per second; 0 means no limit.
    pub fn new(per_second: f64) -> Self {
        let interval = (per_second > 0.0).then(|| Duration::from_secs_f64(1.0 / per_second));
        Self { interval, next: Instant::now() }
    }

    /// Waits until `steps` more steps are allowed.
    pub fn wait_for(&mut self, steps: u32) {
        let Some(interval) = self.interval else { return };
        let now = Instant::now();
        if now.saturating_duration_since(self.next) > Duration::from_secs(1) {
            self.next = now;
        }
        self.next += interval * steps;
        sleep(self.next.saturating_duration_since(now));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keeps_its_rate() {
        let start = Instant::now();
        let mut pace = RateLimiter::new(1000.0);
        (0..50).for_each(|_| pace.wait_for(1));
        assert!(start.elapsed() >= Duration::from_millis(45));
    }

    #[test]
    fn flat_out_never_waits() {
        let start = Instant::now();
        let mut pace = RateLimiter::new(0.0);
        (0..1000).for_each(|_| pace.wait_for(1));
        assert!(start.elapsed() < Duration::from_millis(100));
    }
}
