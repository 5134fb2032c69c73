//! A mapping of guest RAM in Firn, for copying pages that are known to be backed.
//!
//! Reading a hole through a mapping would fill it, so only pages that were backed when the window
//! was opened are read through it.

use std::io;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};

use firn_types::{PAGE_SIZE, Page};
use memmap2::{MmapOptions, MmapRaw};

use super::backing::RegionBacking;
use crate::sys::copy::copy_from_mapping;

/// Mappings of all regions, and which pages may be read through them.
#[derive(Debug)]
pub(super) struct RamWindow {
    /// One per backing, in their order; `None` for private memory and for huge pages.
    mappings: Vec<Option<MmapRaw>>,
    /// One bit per RAM page.
    backed: Vec<AtomicU64>,
}

impl RamWindow {
    pub(super) fn open(
        backings: &[RegionBacking],
        runs: &[Range<Page>],
        pages: u32,
    ) -> io::Result<Self> {
        let mappings = backings.iter().map(map_region).collect::<io::Result<_>>()?;
        let window = Self { mappings, backed: (0..pages.div_ceil(64)).map(|_| 0.into()).collect() };
        for page in runs.iter().cloned().flat_map(Page::iter_range) {
            window.bitmap_word(page).fetch_or(page_bit(page), Ordering::Relaxed);
        }
        Ok(window)
    }

    /// Copies pages of the region with this index, if all of them may be read.
    pub(super) fn copy_pages(
        &self,
        index: usize,
        backing: &RegionBacking,
        pages: &Range<Page>,
        out: &mut [u8],
    ) -> bool {
        let Some(mapping) = &self.mappings[index] else { return false };
        let is_backed = |page| self.bitmap_word(page).load(Ordering::Relaxed) & page_bit(page) != 0;
        if !Page::iter_range(pages.clone()).all(is_backed) {
            return false;
        }
        let offset = Page::count_in(&(backing.pages().start..pages.start)) * PAGE_SIZE;
        copy_from_mapping(mapping, offset, out);
        true
    }

    /// Stops reading these pages.
    pub(super) fn forget_pages(&self, pages: Range<Page>) {
        for page in Page::iter_range(pages) {
            self.bitmap_word(page).fetch_and(!page_bit(page), Ordering::Relaxed);
        }
    }

    fn bitmap_word(&self, page: Page) -> &AtomicU64 {
        &self.backed[page.index() / 64]
    }
}

/// Huge pages are read by `pread(2)`: which of them the file has is not known, and reading a hole
/// through a mapping would fill it.
fn map_region(backing: &RegionBacking) -> io::Result<Option<MmapRaw>> {
    let Some((file, start)) = backing.ram_file().filter(|_| !backing.is_huge()) else {
        return Ok(None);
    };
    let len = Page::count_in(&backing.pages()) * PAGE_SIZE;
    MmapOptions::new().offset(start).len(len).map_raw_read_only(file).map(Some)
}

fn page_bit(page: Page) -> u64 {
    1 << (page.index() % 64)
}
