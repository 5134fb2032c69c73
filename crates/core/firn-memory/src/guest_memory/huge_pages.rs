//! RAM in huge pages of hugetlbfs: one entry of a page table maps 2 MiB.
//!
//! ```text
//!   RAM pages     | 0 1 2 ............................ 511 | 512 ....
//!   page tables   [ one entry                             ] [ one entry
//!   a fault       reports page 0, whichever was touched
//!   an answer     must be for pages 0..512: else EINVAL
//!   SEEK_DATA     reports the whole file as data: holes are not known
//! ```
//!
//! A guest that may write one page of a huge page may write all of them. So a caller that resumes a
//! thread first handles all pages of [`GuestMemory::entry_of`]. No request is widened here: widening
//! would make pages writable that the caller has not handled, and the kernel refuses each request
//! for a part of a huge page.

use std::ops::Range;

use firn_types::Page;

use super::GuestMemory;
use super::backing::RegionBacking;

/// The only size of huge pages that Firn handles. A page of 1 GiB would have to be copied while a
/// vCPU waits.
pub const HUGE_PAGE_BYTES: u64 = 2 << 20;

impl GuestMemory {
    /// Whether any RAM is in huge pages of hugetlbfs.
    pub fn has_huge_pages(&self) -> bool {
        self.backings.iter().any(RegionBacking::is_huge)
    }

    /// Whether all RAM is in huge pages, and all of it shared or all of it private.
    pub fn has_only_like_huge_pages(&self) -> bool {
        let shared = self.backings.iter().filter(|backing| backing.is_shared()).count();
        let is_alike = shared == 0 || shared == self.backings.len();
        is_alike && self.backings.iter().all(RegionBacking::is_huge)
    }

    /// The huge page that has this page; `None` for a page of ordinary RAM.
    pub fn huge_page_of(&self, page: Page) -> Option<Range<Page>> {
        let backing = self.backing_of(page).filter(|backing| backing.is_huge())?;
        Some(backing.entry_pages(page))
    }

    /// The pages that one entry of a page table maps together with this one: itself, or its huge
    /// page.
    pub fn entry_of(&self, page: Page) -> Range<Page> {
        self.huge_page_of(page).unwrap_or(page..Page(page.0 + 1))
    }

    /// A range with all of the huge pages that it has a part of.
    pub fn with_whole_huge_pages(&self, range: Range<Page>) -> Range<Page> {
        if range.is_empty() {
            return range;
        }
        let last = Page(range.end.0 - 1);
        let start = self.huge_page_of(range.start).map_or(range.start, |huge| huge.start);
        let end = self.huge_page_of(last).map_or(range.end, |huge| huge.end);
        start..end
    }
}
