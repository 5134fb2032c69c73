//! Page set: a bitmap in which only chunks with pages exist.
//!
//! ```text
//!   chunk      0         1         2         3
//!           [ none ] [ 64 words] [ none ] [ 64 words]
//!
//!   one chunk is 4096 pages, 16 MiB of RAM, in 512 bytes
//! ```

use std::ops::Range;

use firn_types::Page;

const WORDS: usize = 64;
const CHUNK_PAGES: usize = WORDS * 64;

type PageChunk = Box<[u64; WORDS]>;

/// A set of pages. Union, difference and iteration cost in proportion to its contents, not to the
/// size of RAM.
#[derive(Clone, Debug, Default)]
pub struct PageSet {
    chunks: Vec<Option<PageChunk>>,
}

fn bit_position(page: Page) -> (usize, usize, u64) {
    let index = page.index();
    (index / CHUNK_PAGES, index % CHUNK_PAGES / 64, 1 << (index % 64))
}

impl PageSet {
    /// The empty set.
    pub fn new() -> Self {
        Self::default()
    }

    /// Whether a page is in it.
    pub fn contains(&self, page: Page) -> bool {
        let (chunk, word, bit) = bit_position(page);
        self.chunk_at(chunk).is_some_and(|words| words[word] & bit != 0)
    }

    /// Adds a page.
    pub fn insert(&mut self, page: Page) {
        let (chunk, word, bit) = bit_position(page);
        self.chunk_mut(chunk)[word] |= bit;
    }

    /// Removes a page.
    pub fn remove(&mut self, page: Page) {
        let (chunk, word, bit) = bit_position(page);
        if let Some(Some(words)) = self.chunks.get_mut(chunk) {
            words[word] &= !bit;
        }
    }

    /// Adds a half-open run of pages, as a scan of the page map reports them.
    pub fn insert_run(&mut self, run: Range<Page>) {
        let (mut at, end) = (run.start.index(), run.end.index());
        while at < end {
            let (chunk, word, _) = bit_position(Page(at as u32));
            let bits = (64 - at % 64).min(end - at);
            let mask = (u64::MAX >> (64 - bits)) << (at % 64);
            self.chunk_mut(chunk)[word] |= mask;
            at += bits;
        }
    }

    /// Adds all pages of another set.
    pub fn extend_from(&mut self, other: &Self) {
        for (index, words) in other.filled_chunks() {
            let mine = self.chunk_mut(index);
            mine.iter_mut().zip(words.iter()).for_each(|(mine, theirs)| *mine |= theirs);
        }
    }

    /// Removes all pages of another set.
    pub fn subtract(&mut self, other: &Self) {
        for (index, words) in other.filled_chunks() {
            if let Some(Some(mine)) = self.chunks.get_mut(index) {
                mine.iter_mut().zip(words.iter()).for_each(|(mine, theirs)| *mine &= !theirs);
            }
        }
    }

    /// Removes all pages that another set lacks.
    pub fn intersect(&mut self, other: &Self) {
        for (index, slot) in self.chunks.iter_mut().enumerate() {
            match (slot.as_mut(), other.chunk_at(index)) {
                (Some(mine), Some(words)) => {
                    mine.iter_mut().zip(words.iter()).for_each(|(mine, theirs)| *mine &= theirs);
                }
                _ => *slot = None,
            }
        }
    }

    /// The number of pages.
    pub fn len(&self) -> usize {
        self.filled_chunks()
            .flat_map(|(_, words)| words)
            .map(|word| word.count_ones() as usize)
            .sum()
    }

    /// Whether the set has no pages.
    pub fn is_empty(&self) -> bool {
        self.filled_chunks().all(|(_, words)| words.iter().all(|&word| word == 0))
    }

    /// Its pages, in order.
    pub fn iter(&self) -> impl Iterator<Item = Page> {
        self.filled_chunks().flat_map(|(chunk, words)| {
            words.iter().enumerate().flat_map(move |(word, &bits)| {
                let first = (chunk * CHUNK_PAGES + word * 64) as u32;
                (0..64).filter(move |bit| bits >> bit & 1 == 1).map(move |bit| Page(first + bit))
            })
        })
    }

    /// Its pages as runs that neither touch nor overlap, in order, for calls that take ranges.
    pub fn page_runs(&self) -> Vec<Range<Page>> {
        let mut runs: Vec<Range<Page>> = Vec::new();
        for page in self.iter() {
            match runs.last_mut() {
                Some(run) if run.end == page => run.end = Page(page.0 + 1),
                _ => runs.push(page..Page(page.0 + 1)),
            }
        }
        runs
    }

    fn filled_chunks(&self) -> impl Iterator<Item = (usize, &[u64; WORDS])> {
        let chunks = self.chunks.iter().enumerate();
        chunks.filter_map(|(index, words)| words.as_deref().map(|words| (index, words)))
    }

    fn chunk_at(&self, index: usize) -> Option<&[u64; WORDS]> {
        self.chunks.get(index)?.as_deref()
    }

    fn chunk_mut(&mut self, index: usize) -> &mut [u64; WORDS] {
        if self.chunks.len() <= index {
            self.chunks.resize(index + 1, None);
        }
        self.chunks[index].get_or_insert_with(|| Box::new([0; WORDS]))
    }
}

impl PartialEq for PageSet {
    fn eq(&self, other: &Self) -> bool {
        self.iter().eq(other.iter())
    }
}

impl Eq for PageSet {}

impl FromIterator<Page> for PageSet {
    fn from_iter<I: IntoIterator<Item = Page>>(pages: I) -> Self {
        let mut set = Self::new();
        pages.into_iter().for_each(|page| set.insert(page));
        set
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    fn some_pages() -> impl Strategy<Value = BTreeSet<u32>> {
        prop::collection::btree_set(0..9000_u32, 0..200)
    }

    fn set(pages: &BTreeSet<u32>) -> PageSet {
        pages.iter().copied().map(Page).collect()
    }

    fn check(set: &PageSet, pages: impl Iterator<Item = u32>) {
        let pages: Vec<u32> = pages.collect();
        assert_eq!(set.iter().map(|page| page.0).collect::<Vec<_>>(), pages);
        assert_eq!(set.len(), pages.len());
        assert_eq!(set.is_empty(), pages.is_empty());
    }

    proptest! {
        #[test]
        fn a_page_set_behaves_as_a_set_of_numbers(a in some_pages(), b in some_pages()) {
            let mut union = set(&a);
            union.extend_from(&set(&b));
            check(&union, a.union(&b).copied());
            let mut rest = set(&a);
            rest.subtract(&set(&b));
            check(&rest, a.difference(&b).copied());
            let mut both = set(&a);
            both.intersect(&set(&b));
            check(&both, a.intersection(&b).copied());
            let mut removed = set(&a);
            b.iter().for_each(|&page| removed.remove(Page(page)));
            prop_assert_eq!(removed, rest);
        }

        #[test]
        fn runs_and_pages_say_the_same(start in 0..9000_u32, pages in 0..5000_u32, a in some_pages()) {
            let mut run = PageSet::new();
            run.insert_run(Page(start)..Page(start + pages));
            check(&run, start..start + pages);
            let mut again = PageSet::new();
            set(&a).page_runs().into_iter().for_each(|run| again.insert_run(run));
            prop_assert_eq!(again, set(&a));
        }
    }
}
