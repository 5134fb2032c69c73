//! When to stop copying and cut. Pure.

/// Memory blocks that are copied at the cut without much ado: some 4 MiB, in about a millisecond.
const FEW_BLOCKS: usize = 512;
/// Rounds after which the cut comes whatever the guest does. Copies of a memory block in one image are limited
/// ([`firn_image::Draft::again`]).
const ROUNDS_MAX: u32 = 3;

/// What comes next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Step {
    /// Copy what was written, while the guest runs.
    Copy,
    /// Stop the guest and copy what is left.
    Cut,
}

/// The rounds of one save.
#[derive(Debug, Default)]
pub(crate) struct Rounds {
    done: u32,
    copied_last: usize,
}

impl Rounds {
    /// What to do about so many memory blocks that were written since they were copied.
    pub(crate) fn next(&mut self, written: usize) -> Step {
        // While a round copies, the guest writes. What it writes no more slowly than it is copied never gets less.
        let gets_less = self.done == 0 || written < self.copied_last - self.copied_last / 4;
        if written <= FEW_BLOCKS || self.done >= ROUNDS_MAX || !gets_less {
            return Step::Cut;
        }
        self.done += 1;
        self.copied_last = written;
        Step::Copy
    }

    /// Rounds so far.
    pub(crate) fn done(&self) -> u32 {
        self.done
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rounds(written: &[usize]) -> usize {
        let mut rounds = Rounds::default();
        written.iter().take_while(|&&written| rounds.next(written) == Step::Copy).count()
    }

    #[test]
    fn little_is_copied_at_once() {
        assert_eq!(rounds(&[FEW_BLOCKS]), 0);
        assert_eq!(rounds(&[0]), 0);
    }

    #[test]
    fn rounds_go_on_while_each_has_less() {
        assert_eq!(rounds(&[100_000, 9_000, 700, 90]), 3);
        assert_eq!(rounds(&[100_000, 9_000, 100, 90]), 2);
    }

    #[test]
    fn rounds_end_where_the_guest_writes_as_fast_as_is_copied() {
        assert_eq!(rounds(&[100_000, 95_000, 95_000]), 1);
        assert_eq!(rounds(&[100_000, 50_000, 45_000, 44_000]), 2);
        assert_eq!(rounds(&[100_000, 50_000, 25_000, 12_000, 6_000]), 3);
    }
}
