//! Written pages: those written since they were last write-protected, which the pause has to
//! protect again.
//!
//! The whole of RAM is write-protected while the guest runs, however long that takes. Pages that
//! the guest writes in that time are recorded here and made writable. A few rounds protect those
//! pages again, still with the guest running; each round is shorter than the one before, so fewer
//! pages are written during it. A few hundred pages are left when the vCPUs stop, whatever the size
//! of RAM: the pause does not grow with it.

use std::ops::Range;

use firn_types::Page;

/// Pages between two written runs that are protected along with them: one call over a small gap
/// costs less than two calls, and protecting a protected page changes nothing.
const GAP_PAGES: u32 = 32;

/// A set of written pages.
#[derive(Debug, Default)]
pub(crate) struct WrittenSet {
    pages: Vec<Page>,
}

impl WrittenSet {
    /// Notes that a run of pages is writable from now on.
    pub(crate) fn add_pages(&mut self, pages: Range<Page>) {
        self.pages.extend(Page::iter_range(pages));
    }

    /// The number of recorded pages; a page recorded twice counts twice.
    pub(crate) fn len(&self) -> usize {
        self.pages.len()
    }

    /// Empties the set into runs of pages, in order, that cover all of it.
    pub(crate) fn drain(&mut self) -> Vec<Range<Page>> {
        self.pages.sort_unstable();
        let runs = runs_of(&self.pages);
        self.pages.clear();
        runs
    }
}

fn runs_of(sorted: &[Page]) -> Vec<Range<Page>> {
    let mut runs: Vec<Range<Page>> = Vec::new();
    for &page in sorted {
        let end = Page(page.0 + 1);
        match runs.last_mut() {
            Some(run) if page.0 <= run.end.0 + GAP_PAGES => run.end = run.end.max(end),
            _ => runs.push(page..end),
        }
    }
    runs
}

/// Decides when to stop re-protecting and pause.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ProtectRounds {
    done: u32,
    fewest: usize,
}

/// Rounds after which the pause begins whatever the guest does.
const ROUNDS_MAX: u32 = 12;
/// The number of written pages up to which another round would not make the pause shorter.
const SETTLED_PAGES: usize = 64;

impl ProtectRounds {
    /// No round run yet.
    pub(crate) fn new() -> Self {
        Self { done: 0, fewest: usize::MAX }
    }

    /// Whether another round would help, given the number of pages written since the last one.
    pub(crate) fn needs_another(&mut self, written: usize) -> bool {
        let helps = written > SETTLED_PAGES && self.done < ROUNDS_MAX;
        let stuck = self.done >= 3 && written >= self.fewest;
        self.fewest = self.fewest.min(written);
        self.done += 1;
        helps && !stuck
    }

    /// The number of calls of [`Self::needs_another`] until now.
    pub(crate) fn rounds_done(&self) -> u32 {
        self.done
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn an_idle_guest_needs_no_round() {
        assert!(!ProtectRounds::new().needs_another(0));
    }

    #[test]
    fn rounds_end_when_the_guest_writes_as_fast_as_they_protect() {
        let mut rounds = ProtectRounds::new();
        let ran = (0..100).take_while(|_| rounds.needs_another(5000)).count();
        assert!(ran < 5, "{ran} rounds");
    }

    #[test]
    fn rounds_continue_while_the_set_shrinks() {
        let mut rounds = ProtectRounds::new();
        let sizes = [50_000, 5_000, 900, 300, 90, 10];
        let ran = sizes.iter().take_while(|&&size| rounds.needs_another(size)).count();
        assert_eq!(ran, 5);
    }

    proptest! {
        #[test]
        fn runs_cover_every_recorded_page_in_order(pages in prop::collection::vec(0u32..5000, 0..300)) {
            let mut set = WrittenSet::default();
            pages.iter().for_each(|&page| set.add_pages(Page(page)..Page(page + 2)));
            let runs = set.drain();
            for page in pages {
                prop_assert!(runs.iter().any(|run| run.contains(&Page(page)) && run.contains(&Page(page + 1))));
            }
            prop_assert!(runs.windows(2).all(|pair| pair[0].end.0 + GAP_PAGES < pair[1].start.0));
            prop_assert_eq!(set.len(), 0);
        }
    }
}
