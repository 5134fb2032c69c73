//! Settled pages: those whose contents no longer depend on the image.
//!
//! A page is settled once its contents were installed, or once the guest gave it back (balloon,
//! free-page reporting) and it must read as zeros. The set only grows. A successor needs to know it
//! too: an image page must never be installed over a settled one. So the set remembers which of its
//! 64-bit words have changed since they were last written to the file (see
//! [`crate::PresenceFile`]).

use std::ops::Range;

use firn_types::{Block, BlockSize, Page, RegionMap};

/// Pages of one memory block, as bits: bit 0 is its first page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PageMask(pub u16);

impl PageMask {
    /// No page.
    pub const NONE: Self = Self(0);

    /// Whether no page is in it.
    pub fn is_empty(self) -> bool {
        self.0 == 0
    }

    /// How many pages are in it.
    pub fn count(self) -> u32 {
        self.0.count_ones()
    }

    /// The pages of this mask that are in the other too.
    pub fn and(self, other: Self) -> Self {
        Self(self.0 & other.0)
    }

    /// The pages of this mask that are not in the other.
    pub fn without(self, other: Self) -> Self {
        Self(self.0 & !other.0)
    }

    /// Runs of neighbouring pages, as page offsets in the block.
    pub fn runs(self) -> impl Iterator<Item = Range<u32>> {
        let mut rest = u32::from(self.0);
        let mut at = 0;
        std::iter::from_fn(move || {
            if rest == 0 {
                return None;
            }
            let start = at + rest.trailing_zeros();
            rest >>= rest.trailing_zeros();
            let len = rest.trailing_ones();
            rest >>= len;
            at = start + len;
            Some(start..at)
        })
    }
}

/// The settled pages, one bit each.
#[derive(Clone, Debug)]
pub struct SettledPages {
    block_size: BlockSize,
    words: Vec<u64>,
    changed: Vec<u32>,
    is_changed: Vec<bool>,
}

impl SettledPages {
    /// Nothing is settled except what is not RAM: pages between regions and past the last one.
    pub fn new(ram: &RegionMap, block_size: BlockSize) -> Self {
        let pages = block_size.blocks_in(ram.total_pages()) as usize * block_size.page_count();
        let words = vec![u64::MAX; pages.div_ceil(64)];
        let is_changed = vec![false; words.len()];
        let mut settled = Self { block_size, words, changed: Vec::new(), is_changed };
        for region in ram.regions() {
            Page::iter_range(region.page_range()).for_each(|page| settled.clear_page(page));
        }
        settled
    }

    fn clear_page(&mut self, page: Page) {
        self.words[page.index() / 64] &= !(1 << (page.index() % 64));
    }

    /// Whether a page is settled. Pages that do not exist count as settled.
    pub fn contains(&self, page: Page) -> bool {
        self.words.get(page.index() / 64).is_none_or(|word| word >> (page.index() % 64) & 1 == 1)
    }

    /// Settles a page. Pages that do not exist are ignored.
    pub fn insert(&mut self, page: Page) {
        let at = page.index() / 64;
        let Some(word) = self.words.get_mut(at) else { return };
        let bit = 1 << (page.index() % 64);
        if *word & bit == 0 {
            *word |= bit;
            self.record_change(at);
        }
    }

    /// Makes a settled page missing again.
    pub fn remove(&mut self, page: Page) {
        let at = page.index() / 64;
        if self.contains(page) && at < self.words.len() {
            self.clear_page(page);
            self.record_change(at);
        }
    }

    fn record_change(&mut self, at: usize) {
        if !std::mem::replace(&mut self.is_changed[at], true) {
            self.changed.push(at as u32);
        }
    }

    /// The pages of a block that are not settled.
    pub fn missing_in(&self, block: Block) -> PageMask {
        let (first, pages) =
            (self.block_size.first_page(block).index(), self.block_size.page_count());
        let word = self.words.get(first / 64).copied().unwrap_or(u64::MAX);
        // A block never spans two words: both are powers of two, and blocks are aligned.
        let all = (1u32 << pages) - 1;
        PageMask(!(word >> (first % 64)) as u16 & all as u16)
    }

    /// Settles pages of a block.
    pub fn insert_in(&mut self, block: Block, pages: PageMask) {
        let first = self.block_size.first_page(block).index();
        let Some(word) = self.words.get_mut(first / 64) else { return };
        let bits = u64::from(pages.0) << (first % 64);
        if *word & bits != bits {
            *word |= bits;
            self.record_change(first / 64);
        }
    }

    /// All words, 64 pages each, lowest page in the lowest bit.
    pub fn words(&self) -> &[u64] {
        &self.words
    }

    /// Settles the pages that are settled in `words`; more or fewer words than there are is no
    /// error.
    pub fn merge_words(&mut self, words: &[u64]) {
        for (mine, theirs) in self.words.iter_mut().zip(words) {
            *mine |= theirs;
        }
    }

    /// Whether something changed since [`Self::take_changed`] was last called.
    pub fn has_changed(&self) -> bool {
        !self.changed.is_empty()
    }

    /// Appends the words that changed since the last call to `out`, as (index, value), sorted by
    /// index.
    pub fn take_changed(&mut self, out: &mut Vec<(u32, u64)>) {
        out.extend(self.changed.iter().map(|&at| (at, self.words[at as usize])));
        self.changed.iter().for_each(|&at| self.is_changed[at as usize] = false);
        self.changed.clear();
        out.sort_unstable();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ram(pages: u64) -> RegionMap {
        RegionMap::lay_out([("a", pages * 4096), ("b", 5 * 4096)]).unwrap()
    }

    #[test]
    fn pages_outside_of_ram_are_settled_from_the_start() {
        let settled = SettledPages::new(&ram(3), BlockSize::default());
        let missing: Vec<u32> = (0..30).filter(|&page| !settled.contains(Page(page))).collect();
        assert_eq!(missing, [0, 1, 2, 16, 17, 18, 19, 20]);
        assert_eq!(settled.missing_in(Block(1)), PageMask(0b01));
    }

    #[test]
    fn changes_are_reported_once() {
        let mut settled = SettledPages::new(&ram(200), BlockSize::default());
        settled.insert(Page(130));
        settled.insert_in(Block(0), PageMask(0b10));
        settled.insert(Page(1));
        let mut changed = Vec::new();
        settled.take_changed(&mut changed);
        assert_eq!(changed, [(0, 2), (2, 4)]);
        changed.clear();
        settled.take_changed(&mut changed);
        assert!(changed.is_empty());
    }

    #[test]
    fn a_settled_page_can_be_unsettled() {
        let mut settled = SettledPages::new(&ram(200), BlockSize::default());
        settled.insert_in(Block(3), PageMask(0b11));
        settled.remove(Page(7));
        settled.remove(Page(100_000));
        assert_eq!(settled.missing_in(Block(3)), PageMask(0b10));
    }

    #[test]
    fn a_mask_falls_into_runs() {
        let runs: Vec<_> = PageMask(0b1000_0000_0110_0101).runs().collect();
        assert_eq!(runs, [0..1, 2..3, 5..7, 15..16]);
        assert_eq!(PageMask(u16::MAX).runs().next(), Some(0..16));
        assert_eq!(PageMask::NONE.runs().count(), 0);
    }
}
