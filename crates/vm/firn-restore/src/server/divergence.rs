//! Divergence detection: whether the guest uses the pages that it was expected to use.
//!
//! Prefetches compete with demand reads. While the guest needs what the image predicts, that is
//! worth its cost. A guest that diverges (another request, another program) should have the storage
//! for itself.
//!
//! ```text
//!   reads the guest waits for    p p o p p p o p | o o o p o o o o | o o ...      p predicted, o others
//!                                 window: continue   window: few p -> prefetching ends
//! ```
//!
//! Predicted units that are in memory already cause no read. The more of them there are, the larger
//! is the share of other units in the remaining reads, however good the prediction was. So
//! predicted reads are compared with the number that chance would give, if the guest chose among
//! all units that are not in memory yet:
//!
//! ```text
//!   not in memory yet    p p p p o o o o   one read of twenty is predicted: the guest diverges
//!                        p o o o o o o o   few reads are predicted in either case: no decision for long
//! ```

/// The number of predicted reads by chance after which the detector decides.
const WINDOW: f64 = 16.0;

/// A guest that uses what was expected makes at least this share of them.
const EXPECTED_SHARE_MIN: f64 = 0.125;

/// Decides from the demand reads whether the guest diverges.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct DivergenceDetector {
    expected: f64,
    by_chance: f64,
}

impl DivergenceDetector {
    /// Counts a demand read; `share` is the predicted share of what is not in memory yet. Returns
    /// whether the guest has diverged.
    pub(super) fn record_read(&mut self, is_expected: bool, share: f64) -> bool {
        self.by_chance += share;
        self.expected += f64::from(u8::from(is_expected));
        if self.by_chance < WINDOW {
            return false;
        }
        let diverged = self.expected < EXPECTED_SHARE_MIN * self.by_chance;
        *self = Self::default();
        diverged
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn diverges(share: f64, reads: impl IntoIterator<Item = bool>) -> bool {
        let mut divergence = DivergenceDetector::default();
        reads.into_iter().any(|is_expected| divergence.record_read(is_expected, share))
    }

    #[test]
    fn a_guest_that_uses_its_working_set_does_not_diverge() {
        assert!(!diverges(0.5, (0..1000).map(|read| read % 2 == 0)));
        assert!(!diverges(0.5, (0..1000).map(|read| read % 8 == 0)));
    }

    #[test]
    fn a_guest_that_goes_elsewhere_does() {
        assert!(!diverges(0.5, (0..31).map(|_| false)));
        assert!(diverges(0.5, (0..32).map(|_| false)));
        assert!(diverges(0.5, (0..64).map(|read| read < 24)));
    }

    #[test]
    fn reads_of_others_mean_little_when_little_is_predicted() {
        assert!(!diverges(0.02, (0..790).map(|_| false)));
        assert!(diverges(0.02, (0..810).map(|_| false)));
    }
}
