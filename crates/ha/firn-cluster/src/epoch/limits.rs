//! Epoch limits: the bounds that the user sets, and the interval that is chosen within them.

use std::time::Duration;

use thiserror::Error;

/// The user's limits for the epochs of one VM.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct EpochLimits {
    /// The shortest interval between cuts.
    pub interval_min: Duration,
    /// The longest interval between cuts while the backup keeps up.
    pub interval_max: Duration,
    /// The intended number of pages per epoch, which determine the length of the pause.
    pub pages_per_epoch: u64,
    /// The maximum delay of a frame, as far as the interval can influence it.
    pub output_delay_max: Duration,
    /// How long an error may remain unnoticed (T_e) and still never be in a restored state.
    pub error_latency_max: Duration,
    /// The maximum number of pages buffered for transfer. An epoch with more pages is sent from
    /// within its pause.
    pub buffer_pages: u64,
    /// How long to wait for an acknowledgement before an epoch is sent again.
    pub resend_after: Duration,
}

/// Why limits contradict each other.
#[derive(Debug, Error, PartialEq, Eq)]
pub enum LimitsError {
    /// No interval is possible.
    #[error(
        "the interval must lie between {min:?} and {max:?}: give a minimum above zero and no maximum below it"
    )]
    Interval {
        /// The minimum.
        min: Duration,
        /// The maximum.
        max: Duration,
    },
    /// An error could be in a restored state.
    #[error(
        "an interval of {min:?} is shorter than the {latency:?} an error may go unnoticed; raise the minimum"
    )]
    ErrorLatency {
        /// The minimum interval.
        min: Duration,
        /// The wanted error latency.
        latency: Duration,
    },
    /// The buffer is too small for one epoch.
    #[error("a buffer of {buffer} pages can't hold one epoch of {epoch} pages")]
    Buffer {
        /// The size of the buffer.
        buffer: u64,
        /// The intended pages of one epoch.
        epoch: u64,
    },
}

impl EpochLimits {
    /// Checks that the limits don't contradict each other.
    pub fn check_limits(&self) -> Result<(), LimitsError> {
        let Self { interval_min: min, interval_max: max, error_latency_max: latency, .. } = *self;
        if min.is_zero() || max < min {
            return Err(LimitsError::Interval { min, max });
        }
        if min < latency {
            return Err(LimitsError::ErrorLatency { min, latency });
        }
        if self.buffer_pages < self.pages_per_epoch || self.pages_per_epoch == 0 {
            let (buffer, epoch) = (self.buffer_pages, self.pages_per_epoch);
            return Err(LimitsError::Buffer { buffer, epoch });
        }
        Ok(())
    }

    /// The interval after one that wrote `pages`. The last commit took `transfer` from its cut to
    /// the acknowledgement.
    ///
    /// A frame waits for the end of its epoch, then for the whole next one (the non-volatile copy
    /// is one behind), then for a transfer: so the maximum delay is two intervals and a transfer.
    pub(crate) fn next_interval(
        &self,
        interval: Duration,
        pages: u64,
        transfer: Duration,
    ) -> Duration {
        let by_pages = interval.as_nanos() * u128::from(self.pages_per_epoch);
        let wanted = duration_from_nanos(by_pages / u128::from(pages.max(1)));
        let wanted = wanted.clamp(interval / 2, interval + interval / 4);
        let by_delay = self.output_delay_max.saturating_sub(transfer) / 2;
        wanted.min(by_delay).clamp(self.interval_min, self.interval_max)
    }
}

fn duration_from_nanos(nanos: u128) -> Duration {
    Duration::from_nanos(u64::try_from(nanos).unwrap_or(u64::MAX))
}

impl Default for EpochLimits {
    fn default() -> Self {
        Self {
            interval_min: Duration::from_millis(50),
            interval_max: Duration::from_millis(500),
            pages_per_epoch: 4096,
            output_delay_max: Duration::from_millis(500),
            error_latency_max: Duration::from_millis(50),
            buffer_pages: 16384,
            resend_after: Duration::from_millis(500),
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const MS: Duration = Duration::from_millis(1);

    #[test]
    fn limits_that_cannot_be_kept_are_refused() {
        let good = EpochLimits::default();
        assert_eq!(good.check_limits(), Ok(()));
        let refused = |limits: EpochLimits| limits.check_limits().is_err();
        assert!(refused(EpochLimits { interval_min: Duration::ZERO, ..good }));
        assert!(refused(EpochLimits { interval_max: MS, ..good }));
        assert!(refused(EpochLimits { error_latency_max: 51 * MS, ..good }));
        assert!(refused(EpochLimits { buffer_pages: 10, ..good }));
    }

    #[test]
    fn many_pages_shorten_the_interval_and_few_lengthen_it() {
        let limits = EpochLimits { output_delay_max: 5000 * MS, ..EpochLimits::default() };
        assert!(limits.next_interval(100 * MS, 8192, MS) < 100 * MS);
        assert!(limits.next_interval(100 * MS, 100, MS) > 100 * MS);
        assert_eq!(limits.next_interval(50 * MS, 1 << 30, MS), 50 * MS);
        assert_eq!(limits.next_interval(500 * MS, 0, MS), 500 * MS);
    }

    #[test]
    fn a_slow_transfer_shortens_the_interval() {
        let limits = EpochLimits::default();
        assert_eq!(limits.next_interval(300 * MS, 1, 300 * MS), 100 * MS);
        assert_eq!(limits.next_interval(300 * MS, 1, 3000 * MS), 50 * MS);
    }

    proptest! {
        #[test]
        fn it_stays_within_the_limits(interval_ms in 50..=500_u32, pages: u64, transfer_ms in 0..9999_u32) {
            let limits = EpochLimits::default();
            let next = limits.next_interval(interval_ms * MS, pages, transfer_ms * MS);
            prop_assert!(limits.interval_min <= next && next <= limits.interval_max);
        }
    }
}
