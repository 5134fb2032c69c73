//! A set of RAM pages, one bit each, that several threads add to.

use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};

use firn_types::Page;

/// A set of pages.
#[derive(Debug)]
pub(crate) struct AtomicPageSet(Vec<AtomicU64>);

impl AtomicPageSet {
    /// An empty set of pages below `total`.
    pub(crate) fn new(total: u32) -> Self {
        Self((0..total.div_ceil(64)).map(|_| AtomicU64::new(0)).collect())
    }

    /// Adds pages.
    pub(crate) fn add_pages(&self, pages: Range<Page>) {
        for page in Page::iter_range(pages) {
            self.word_of(page).fetch_or(bit_of(page), Ordering::AcqRel);
        }
    }

    /// Removes pages.
    pub(crate) fn remove_pages(&self, pages: Range<Page>) {
        for page in Page::iter_range(pages) {
            self.word_of(page).fetch_and(!bit_of(page), Ordering::AcqRel);
        }
    }

    /// The pages of a range that are in the set, in runs, in order.
    pub(crate) fn runs_in(&self, range: Range<Page>) -> Vec<Range<Page>> {
        let mut runs: Vec<Range<Page>> = Vec::new();
        let is_in = |page| self.word_of(page).load(Ordering::Acquire) & bit_of(page) != 0;
        for page in Page::iter_range(range).filter(|&page| is_in(page)) {
            let end = Page(page.0 + 1);
            match runs.last_mut() {
                Some(run) if run.end == page => run.end = end,
                _ => runs.push(page..end),
            }
        }
        runs
    }

    /// The pages of the set that are in none of these runs, which are in order.
    pub(crate) fn runs_outside(&self, runs: &[Range<Page>]) -> Vec<Range<Page>> {
        let total = Page((self.0.len() * 64) as u32);
        let starts = std::iter::once(Page(0)).chain(runs.iter().map(|run| run.end));
        let ends = runs.iter().map(|run| run.start).chain(std::iter::once(total));
        starts.zip(ends).flat_map(|(start, end)| self.runs_in(start..end)).collect()
    }

    fn word_of(&self, page: Page) -> &AtomicU64 {
        &self.0[page.index() / 64]
    }
}

fn bit_of(page: Page) -> u64 {
    1 << (page.index() % 64)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn page(range: Range<u32>) -> Range<Page> {
        Page(range.start)..Page(range.end)
    }

    #[test]
    fn pages_are_found_in_runs() {
        let bits = AtomicPageSet::new(300);
        bits.add_pages(page(3..5));
        bits.add_pages(page(60..70));
        bits.remove_pages(page(62..63));
        assert_eq!(bits.runs_in(page(0..300)), [3..5, 60..62, 63..70].map(page));
        assert_eq!(bits.runs_in(page(4..61)), [4..5, 60..61].map(page));
        assert_eq!(bits.runs_in(page(5..60)), []);
    }

    #[test]
    fn pages_outside_of_runs_are_those_that_became_holes() {
        let bits = AtomicPageSet::new(100);
        bits.add_pages(page(10..20));
        bits.add_pages(page(98..100));
        assert_eq!(bits.runs_outside(&[page(0..12), page(15..50)]), [12..15, 98..100].map(page));
        assert_eq!(bits.runs_outside(&[]), [10..20, 98..100].map(page));
        assert_eq!(bits.runs_outside(&[page(0..100)]), []);
    }
}
