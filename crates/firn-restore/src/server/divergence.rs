//! Whether the guest goes where it was expected to go.
//!
//! What is read ahead competes with what the guest waits for. While the guest needs what the image predicts that pays;
//! a guest that has gone elsewhere (another request, another program) should have the storage for itself.
//!
//! ```text
//!   reads the guest waits for    p p o p p p o p | o o o p o o o o | o o ...      p predicted, o others
//!                                 window: go on      window: few p -> nothing more is read ahead
//! ```
//!
//! Predicted units that are in memory already cause no read, so that a good prediction shows few reads of either kind:
//! windows are counted in reads, not in time.

/// Reads after which it is decided.
const WINDOW: u32 = 32;

/// Of these, predicted ones at least.
const EXPECTED_MIN: u32 = 4;

/// Watches reads that the guest waits for.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Divergence {
    expected: u32,
    reads: u32,
}

impl Divergence {
    /// The guest waits for a read. Whether it has diverged.
    pub(super) fn read(&mut self, is_expected: bool) -> bool {
        self.reads += 1;
        self.expected += u32::from(is_expected);
        if self.reads < WINDOW {
            return false;
        }
        let diverged = self.expected < EXPECTED_MIN;
        *self = Self::default();
        diverged
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn diverges(reads: impl IntoIterator<Item = bool>) -> bool {
        let mut divergence = Divergence::default();
        reads.into_iter().any(|is_expected| divergence.read(is_expected))
    }

    #[test]
    fn a_guest_that_does_what_was_expected_does_not_diverge() {
        assert!(!diverges((0..1000).map(|read| read % 8 == 0)));
    }

    #[test]
    fn a_guest_that_goes_elsewhere_does() {
        assert!(!diverges((0..31).map(|_| false)));
        assert!(diverges((0..32).map(|_| false)));
        assert!(diverges((0..64).map(|read| read < 30)));
    }
}
