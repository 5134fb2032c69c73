//! Memory blocks: the unit in which guest memory is compressed, checked and restored.

use std::fmt;
use std::ops::Range;

use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::address::{PAGE_SIZE, Page};

/// A memory block: [`BlockSize::page_count`] neighbouring pages, counted from RAM page 0.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Block(pub u32);

impl Block {
    /// The block as an index into a table with one entry per block.
    pub fn index(self) -> usize {
        self.0 as usize
    }
}

impl fmt::Debug for Block {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "memory block {}", self.0)
    }
}

impl fmt::Display for Block {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(self, f)
    }
}

/// The number of pages in a memory block: 1, 2, 4, 8 or 16.
///
/// Two is the default: it halves the metadata of single pages and stays small enough for guests
/// with poor locality in physical memory (Halite, section 4.1).
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(try_from = "u8", into = "u8")]
pub struct BlockSize(u8);

/// A memory block size that is not 1, 2, 4, 8 or 16 pages.
#[derive(Debug, Error, PartialEq, Eq)]
#[error("a memory block has 1, 2, 4, 8 or 16 pages, not {0}")]
pub struct BlockSizeError(pub u8);

impl BlockSize {
    /// A block size of `pages` pages.
    pub fn new(pages: u8) -> Result<Self, BlockSizeError> {
        match pages {
            1 | 2 | 4 | 8 | 16 => Ok(Self(pages)),
            _ => Err(BlockSizeError(pages)),
        }
    }

    /// The number of pages in a block.
    pub fn page_count(self) -> usize {
        usize::from(self.0)
    }

    /// The number of bytes in a block.
    pub fn byte_count(self) -> usize {
        self.page_count() * PAGE_SIZE
    }

    /// The block that holds a page.
    pub fn block_of(self, page: Page) -> Block {
        Block(page.0 / u32::from(self.0))
    }

    /// The first page of a block.
    pub fn first_page(self, block: Block) -> Page {
        Page(block.0 * u32::from(self.0))
    }

    /// The pages of a block.
    pub fn pages_of(self, block: Block) -> Range<Page> {
        let first = self.first_page(block);
        first..Page(first.0 + u32::from(self.0))
    }

    /// The number of blocks that cover `pages` pages.
    pub fn blocks_in(self, pages: u32) -> u32 {
        pages.div_ceil(u32::from(self.0))
    }
}

impl Default for BlockSize {
    fn default() -> Self {
        Self(2)
    }
}

impl TryFrom<u8> for BlockSize {
    type Error = BlockSizeError;

    fn try_from(pages: u8) -> Result<Self, BlockSizeError> {
        Self::new(pages)
    }
}

impl From<BlockSize> for u8 {
    fn from(size: BlockSize) -> u8 {
        size.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_is_in_the_block_that_lists_it() {
        for pages in [1, 2, 4, 8, 16] {
            let size = BlockSize::new(pages).unwrap();
            for page in (0..100).map(Page) {
                let block = size.block_of(page);
                assert!(size.pages_of(block).contains(&page));
            }
        }
    }

    #[test]
    fn odd_sizes_are_refused() {
        assert_eq!(BlockSize::new(3), Err(BlockSizeError(3)));
        assert_eq!(BlockSize::new(0), Err(BlockSizeError(0)));
    }

    #[test]
    fn blocks_cover_a_ragged_end() {
        assert_eq!(BlockSize::default().blocks_in(5), 3);
    }
}
