//! Bandwidth limit: how much a save may write to its image, or a restore read, while the guest runs, as
//! the user has chosen.
//!
//! Only background work waits for it. What the guest's own accesses save or load is transferred at
//! once, and counts: background work waits the longer.
//!
//! ```text
//!   permitted = rate * time since the start          what is not used within 100 ms expires
//! ```
//!
//! Numbers and times are the input, waits are the output: no clock here.

use std::num::NonZeroU64;
use std::time::Duration;

/// The limit of one save or restore.
#[derive(Clone, Copy, Debug)]
pub struct BandwidthLimit {
    bytes_per_s: Option<NonZeroU64>,
    /// The time from which the permitted bytes are counted, and the bytes that were transferred by then.
    since: Duration,
    before: u64,
}

impl BandwidthLimit {
    /// The longest wait: work that is cancelled meanwhile ends after it.
    pub const WAIT_MAX: Duration = Duration::from_millis(50);
    /// The time after which bytes expire that were permitted and not transferred.
    const UNUSED_MAX: Duration = Duration::from_millis(100);

    /// A limit from now on; none with `None`.
    pub fn new(bytes_per_s: Option<NonZeroU64>, now: Duration, transferred: u64) -> Self {
        Self { bytes_per_s, since: now, before: transferred }
    }

    /// The time for which background work has to wait now, then call again. Zero if it may continue.
    pub fn next_wait(&mut self, transferred: u64, now: Duration) -> Duration {
        let Some(rate) = self.bytes_per_s else { return Duration::ZERO };
        let bytes = transferred.saturating_sub(self.before);
        let needed = Duration::from_secs_f64(bytes as f64 / rate.get() as f64);
        let passed = now.saturating_sub(self.since);
        if needed > passed {
            return (needed - passed).min(Self::WAIT_MAX);
        }
        if passed - needed > Self::UNUSED_MAX {
            (self.since, self.before) = (now - Self::UNUSED_MAX, transferred);
        }
        Duration::ZERO
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const START: Duration = Duration::from_secs(7);

    fn limit(bytes_per_s: u64) -> BandwidthLimit {
        BandwidthLimit::new(NonZeroU64::new(bytes_per_s), START, 1000)
    }

    /// Writes `bytes` in pieces, each of which takes `piece_us` and is stored as a share of it.
    /// Returns the time that it took.
    fn write_all(bytes: u64, piece: u64, piece_us: u64, rate: u64) -> Duration {
        let mut limit = limit(rate);
        let (mut now, mut written) = (START, 0);
        while written < bytes {
            match limit.next_wait(1000 + written, now) {
                Duration::ZERO => {
                    written += piece;
                    now += Duration::from_micros(piece_us);
                }
                wait => now += wait,
            }
        }
        now - START
    }

    #[test]
    fn without_a_limit_nothing_waits() {
        let mut limit = BandwidthLimit::new(None, START, 0);
        assert_eq!(limit.next_wait(u64::MAX, START), Duration::ZERO);
    }

    #[test]
    fn what_was_not_used_expires() {
        let mut limit = limit(1000);
        let later = START + Duration::from_secs(100);
        assert_eq!(limit.next_wait(1000, later), Duration::ZERO);
        // 100 ms are left: 100 bytes.
        assert_eq!(limit.next_wait(1100, later), Duration::ZERO);
        assert_eq!(limit.next_wait(1120, later), Duration::from_millis(20));
        assert_eq!(limit.next_wait(9000, later), BandwidthLimit::WAIT_MAX);
    }

    proptest! {
        #[test]
        fn the_rate_is_kept_and_used(piece in 1_000_u64..1_000_000, piece_us in 1_u64..2000, rate in 1_000_000_u64..1_000_000_000) {
            let bytes = 200 * piece;
            let took = write_all(bytes, piece, piece_us, rate).as_secs_f64();
            let least = (bytes - piece) as f64 / rate as f64;
            prop_assert!(took >= least - 0.101, "{took} s, {least} s at that rate");
            let alone = 200.0 * piece_us as f64 / 1e6;
            prop_assert!(took <= 1.01 * (least + alone) + 0.05, "{took} s, {least} s and {alone} s");
        }
    }
}
