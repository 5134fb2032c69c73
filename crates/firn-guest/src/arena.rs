//! Memory of whole, aligned pages.

use zerocopy::{FromBytes as _, IntoBytes as _};

use crate::stamp::{PageWords, WORDS};

/// Pages of this process, aligned to 4096 bytes, zero and not yet backed by memory until they are touched.
pub struct Arena {
    words: Vec<u64>,
    first_word: usize,
    pages: usize,
}

/// Pages in a huge page of 2 MiB.
const HUGE: usize = 512;

impl Arena {
    /// `pages` pages.
    pub fn new(pages: usize) -> Self {
        Self::aligned(pages, 1)
    }

    /// `pages` pages, the first at a multiple of 2 MiB: the kernel may back them with huge pages, and pages that are
    /// neighbours here are then neighbours in guest-physical memory.
    pub fn huge(pages: usize) -> Self {
        Self::aligned(pages, HUGE)
    }

    fn aligned(pages: usize, align_pages: usize) -> Self {
        let unit = align_pages * WORDS;
        let words = vec![0_u64; pages * WORDS + unit];
        let misaligned = words.as_ptr().addr() / 8 % unit;
        Self { first_word: (unit - misaligned) % unit, words, pages }
    }

    /// An arena of `mib` MiB.
    pub fn of_mib(mib: usize) -> Self {
        Self::new(mib * 256)
    }

    /// How many pages.
    pub fn pages(&self) -> usize {
        self.pages
    }

    /// A page to read. `index` is taken modulo the number of pages.
    pub fn page(&self, index: usize) -> &PageWords {
        &self.all()[index % self.pages]
    }

    /// A page to write. `index` is taken modulo the number of pages.
    pub fn page_mut(&mut self, index: usize) -> &mut PageWords {
        let pages = self.pages;
        &mut self.all_mut()[index % pages]
    }

    /// All pages.
    pub fn all(&self) -> &[PageWords] {
        let words = &self.words[self.first_word..][..self.pages * WORDS];
        // Whole pages, aligned as words are: nothing is left for this to fail on.
        <[PageWords]>::ref_from_bytes(words.as_bytes()).unwrap_or_default()
    }

    /// All pages, to write.
    pub fn all_mut(&mut self) -> &mut [PageWords] {
        let words = &mut self.words[self.first_word..][..self.pages * WORDS];
        <[PageWords]>::mut_from_bytes(words.as_mut_bytes()).unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_are_aligned() {
        let arena = Arena::new(3);
        assert_eq!(arena.page(0).as_ptr().addr() % 4096, 0);
        assert_eq!(arena.all().len(), 3);
    }

    #[test]
    fn huge_arenas_begin_at_a_huge_page() {
        let mut arena = Arena::huge(3);
        assert_eq!(arena.page(0).as_ptr().addr() % (2 << 20), 0);
        arena.all_mut()[2][511] = 1;
        assert_eq!(arena.page(5)[511], 1, "numbers wrap around");
    }
}
