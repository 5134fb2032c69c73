//! A set of RAM pages, one bit each, that several threads add to.

use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};

use firn_types::Page;

/// A set of pages.
#[derive(Debug)]
pub struct AtomicPageSet(Vec<AtomicU64>);

impl AtomicPageSet {
    /// An empty set of pages below `total`.
    pub fn new(total: u32) -> Self {
        Self((0..total.div_ceil(64)).map(|_| AtomicU64::new(0)).collect())
    }

    /// Adds pages.
    pub fn add_pages(&self, pages: Range<Page>) {
        for page in Page::iter_range(pages) {
            self.word_of(page).fetch_or(bit_of(page), Ordering::AcqRel);
        }
    }

    /// Removes pages.
    pub fn remove_pages(&self, pages: Range<Page>) {
        for page in Page::iter_range(pages) {
            self.word_of(page).fetch_and(!bit_of(page), Ordering::AcqRel);
        }
    }

    /// The pages of a range that are in the set, in runs, in order.
    pub fn runs_in(&self, range: Range<Page>) -> Vec<Range<Page>> {
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

    /// The pages of a range that are in the set and in none of these runs, which are in order and in
    /// the range.
    pub fn runs_outside(&self, range: Range<Page>, runs: &[Range<Page>]) -> Vec<Range<Page>> {
        let starts = std::iter::once(range.start).chain(runs.iter().map(|run| run.end));
        let ends = runs.iter().map(|run| run.start).chain(std::iter::once(range.end));
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
        let outside = |range, runs: &[Range<Page>]| bits.runs_outside(page(range), runs);
        assert_eq!(outside(0..100, &[page(0..12), page(15..50)]), [12..15, 98..100].map(page));
        assert_eq!(outside(0..100, &[]), [10..20, 98..100].map(page));
        assert_eq!(outside(0..99, &[page(10..20)]), [page(98..99)]);
        assert_eq!(outside(0..100, &[page(0..100)]), []);
    }
}
