//! A mapping of guest RAM in Firn, for copying pages that are known to be backed.
//!
//! Reading a hole through a mapping would fill it, so only pages that were backed when the window
//! was opened are read through it.

use std::io;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};

use firn_types::{PAGE_SIZE, Page};
use memmap2::{MmapOptions, MmapRaw};

use super::backing::Backing;
use crate::sys::copy::copy;

/// Mappings of all regions, and which pages may be read through them.
#[derive(Debug)]
pub(super) struct Window {
    /// One per backing, in their order; `None` for private memory.
    mappings: Vec<Option<MmapRaw>>,
    /// One bit per RAM page.
    backed: Vec<AtomicU64>,
}

impl Window {
    pub(super) fn open(backings: &[Backing], runs: &[Range<Page>], pages: u32) -> io::Result<Self> {
        let mappings = backings.iter().map(map).collect::<io::Result<_>>()?;
        let window = Self { mappings, backed: (0..pages.div_ceil(64)).map(|_| 0.into()).collect() };
        for page in runs.iter().cloned().flat_map(Page::each) {
            window.word(page).fetch_or(bit(page), Ordering::Relaxed);
        }
        Ok(window)
    }

    /// Copies pages of the region with this index, if all of them may be read.
    pub(super) fn copy(
        &self,
        index: usize,
        backing: &Backing,
        pages: &Range<Page>,
        out: &mut [u8],
    ) -> bool {
        let Some(mapping) = &self.mappings[index] else { return false };
        let is_backed = |page| self.word(page).load(Ordering::Relaxed) & bit(page) != 0;
        if !Page::each(pages.clone()).all(is_backed) {
            return false;
        }
        let offset = Page::count(&(backing.pages().start..pages.start)) * PAGE_SIZE;
        copy(mapping, offset, out);
        true
    }

    /// Stops reading these pages.
    pub(super) fn forget(&self, pages: Range<Page>) {
        for page in Page::each(pages) {
            self.word(page).fetch_and(!bit(page), Ordering::Relaxed);
        }
    }

    fn word(&self, page: Page) -> &AtomicU64 {
        &self.backed[page.index() / 64]
    }
}

fn map(backing: &Backing) -> io::Result<Option<MmapRaw>> {
    let Some((file, start)) = backing.ram_file() else { return Ok(None) };
    let len = Page::count(&backing.pages()) * PAGE_SIZE;
    MmapOptions::new().offset(start).len(len).map_raw_read_only(file).map(Some)
}

fn bit(page: Page) -> u64 {
    1 << (page.index() % 64)
}
