//! Memory of whole, aligned pages.

use zerocopy::{FromBytes as _, IntoBytes as _};

use crate::stamp::{PageWords, WORDS};

/// Pages of this process, aligned to 4096 bytes, zero, and not backed by memory until the first
/// access.
pub struct PageArena {
    words: Vec<u64>,
    first_word: usize,
    pages: usize,
}

/// Pages in a huge page of 2 MiB.
const HUGE: usize = 512;

impl PageArena {
    /// An arena of `pages` pages.
    pub fn new(pages: usize) -> Self {
        Self::with_alignment(pages, 1)
    }

    /// An arena of `pages` pages, the first at a multiple of 2 MiB: the kernel may back them with
    /// huge pages, and pages that are neighbours here are then neighbours in guest-physical memory.
    pub fn with_huge_pages(pages: usize) -> Self {
        Self::with_alignment(pages, HUGE)
    }

    fn with_alignment(pages: usize, align_pages: usize) -> Self {
        let unit = align_pages * WORDS;
        let words = vec![0_u64; pages * WORDS + unit];
        let misaligned = words.as_ptr().addr() / 8 % unit;
        Self { first_word: (unit - misaligned) % unit, words, pages }
    }

    /// An arena of `mib` MiB.
    pub fn of_mib(mib: usize) -> Self {
        Self::new(mib * 256)
    }

    /// The number of pages.
    pub fn page_count(&self) -> usize {
        self.pages
    }

    /// A page, for reading. `index` is taken modulo the number of pages.
    pub fn page(&self, index: usize) -> &PageWords {
        &self.all_pages()[index % self.pages]
    }

    /// A page, for writing. `index` is taken modulo the number of pages.
    pub fn page_mut(&mut self, index: usize) -> &mut PageWords {
        let pages = self.pages;
        &mut self.all_pages_mut()[index % pages]
    }

    /// All pages.
    pub fn all_pages(&self) -> &[PageWords] {
        let words = &self.words[self.first_word..][..self.pages * WORDS];
        // These are whole pages, aligned as words are, so this cannot fail.
        <[PageWords]>::ref_from_bytes(words.as_bytes()).unwrap_or_default()
    }

    /// All pages, for writing.
    pub fn all_pages_mut(&mut self) -> &mut [PageWords] {
        let words = &mut self.words[self.first_word..][..self.pages * WORDS];
        <[PageWords]>::mut_from_bytes(words.as_mut_bytes()).unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_are_aligned() {
        let arena = PageArena::new(3);
        assert_eq!(arena.page(0).as_ptr().addr() % 4096, 0);
        assert_eq!(arena.all_pages().len(), 3);
    }

    #[test]
    fn huge_arenas_begin_at_a_huge_page() {
        let mut arena = PageArena::with_huge_pages(3);
        assert_eq!(arena.page(0).as_ptr().addr() % (2 << 20), 0);
        arena.all_pages_mut()[2][511] = 1;
        assert_eq!(arena.page(5)[511], 1, "numbers wrap around");
    }
}
