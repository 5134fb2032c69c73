//! Copy rounds: decides when to stop copying and cut. No I/O.
//!
//! ```text
//!   Copy, Copy, ...   to the image; the guest writes while blocks are compressed
//!   Keep, Keep, ...   to memory, which takes a millisecond or two: little is written in that time
//!   Cut               pages written during the last of them are copied while the guest is paused
//! ```

/// Memory blocks that may be copied to memory instead of the image: some 4 MiB, in about a
/// millisecond.
const SMALL_ROUND_BLOCKS: usize = 512;
/// Rounds after which nothing is copied to the image before the cut, whatever the guest does.
/// Copies of a memory block in one image are limited ([`firn_image::Draft::again`]).
const ROUNDS_MAX: u32 = 3;
/// The number of blocks that are copied at the cut without another round.
const SETTLED_BLOCKS: usize = 32;
/// Maximum number of rounds of copying to memory.
const KEPT_ROUNDS_MAX: u32 = 6;

/// The next step of a save.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RoundStep {
    /// Copy the written blocks to the image, while the guest runs.
    Copy,
    /// The same, to memory.
    Keep,
    /// Stop the guest and copy what is left.
    Cut,
}

/// The rounds of one save.
#[derive(Debug)]
pub(crate) struct CopyRounds {
    /// Whether a round does not pause the guest: then more rounds cost nothing.
    is_smooth: bool,
    done: u32,
    kept: u32,
    last: usize,
}

impl CopyRounds {
    /// No rounds yet.
    pub(crate) fn new(is_smooth: bool) -> Self {
        Self { is_smooth, done: 0, kept: 0, last: usize::MAX }
    }

    /// The step to take if this many memory blocks were written since they were copied.
    pub(crate) fn next_step(&mut self, written: usize) -> RoundStep {
        // While a round copies, the guest writes. If it writes as fast as Firn copies, the number
        // never decreases.
        let gets_less = written < self.last - self.last / 4;
        self.last = written;
        let copies =
            self.kept == 0 && self.done < ROUNDS_MAX && gets_less && written > SMALL_ROUND_BLOCKS;
        // The first kept round comes after one that compressed: its number does not predict those
        // of the next rounds.
        let is_worth_it = written > SETTLED_BLOCKS && (self.kept == 0 || gets_less);
        let keeps =
            self.is_smooth && self.kept < KEPT_ROUNDS_MAX && written <= 2 * SMALL_ROUND_BLOCKS;
        match (copies, keeps && is_worth_it) {
            (true, _) => {
                self.done += 1;
                RoundStep::Copy
            }
            (false, true) => {
                self.kept += 1;
                RoundStep::Keep
            }
            (false, false) => RoundStep::Cut,
        }
    }

    /// The number of rounds until now.
    pub(crate) fn rounds_done(&self) -> u32 {
        self.done + self.kept
    }
}

#[cfg(test)]
mod tests {
    use super::RoundStep::{Copy, Cut, Keep};
    use super::*;

    fn steps(is_smooth: bool, written: &[usize]) -> Vec<RoundStep> {
        let mut rounds = CopyRounds::new(is_smooth);
        written.iter().map(|&written| rounds.next_step(written)).collect()
    }

    #[test]
    fn little_is_copied_at_once() {
        assert_eq!(steps(false, &[SMALL_ROUND_BLOCKS]), [Cut]);
        assert_eq!(steps(true, &[SETTLED_BLOCKS]), [Cut]);
        assert_eq!(steps(true, &[0]), [Cut]);
    }

    #[test]
    fn rounds_continue_while_each_has_fewer_pages() {
        assert_eq!(steps(false, &[100_000, 9_000, 700, 90]), [Copy, Copy, Copy, Cut]);
        assert_eq!(steps(false, &[100_000, 9_000, 100]), [Copy, Copy, Cut]);
    }

    #[test]
    fn rounds_end_where_the_guest_writes_as_fast_as_is_copied() {
        assert_eq!(steps(false, &[100_000, 95_000]), [Copy, Cut]);
        assert_eq!(steps(false, &[100_000, 50_000, 45_000]), [Copy, Copy, Cut]);
        assert_eq!(steps(false, &[100_000, 50_000, 25_000, 12_000]), [Copy, Copy, Copy, Cut]);
        assert_eq!(steps(true, &[100_000, 95_000]), [Copy, Cut]);
    }

    #[test]
    fn a_small_remainder_is_kept_in_memory() {
        assert_eq!(
            steps(true, &[9_000, 700, 750, 200, 60, 20]),
            [Copy, Copy, Keep, Keep, Keep, Cut]
        );
        assert_eq!(steps(true, &[400, 390]), [Keep, Cut], "it doesn't get less");
        assert_eq!(
            steps(true, &[400, 200, 600]),
            [Keep, Keep, Cut],
            "nothing goes to the image any more"
        );
        let halves = [1000, 500, 250, 125, 90, 65, 45, 33];
        assert_eq!(steps(true, &halves), [Copy, Keep, Keep, Keep, Keep, Keep, Keep, Cut]);
    }
}
