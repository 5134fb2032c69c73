//! The map of RAM regions: their positions in the dense RAM page space, and in the guest's physical
//! address space.

use std::ops::Range;

use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::address::{GuestPhys, PAGE_SIZE, Page};

/// Pages to which the start of each RAM region is aligned: the largest memory block, so that none
/// spans two regions.
pub const REGION_ALIGN: u32 = 16;

/// One backend of guest RAM.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RamRegion {
    /// The hypervisor's name for it, such as `ram`.
    pub id: String,
    /// Its size in pages.
    pub pages: u32,
    /// Its first page in the RAM page space.
    pub first: Page,
}

impl RamRegion {
    /// Its pages in the RAM page space.
    pub fn page_range(&self) -> Range<Page> {
        self.first..Page(self.first.0 + self.pages)
    }

    /// Its size in bytes.
    pub fn byte_len(&self) -> u64 {
        u64::from(self.pages) * PAGE_SIZE as u64
    }

    /// Byte offset of `page` in this region's backing memory. The page must be in
    /// [`Self::page_range`].
    pub fn offset_of(&self, page: Page) -> u64 {
        debug_assert!(self.page_range().contains(&page), "{page} is not in region {}", self.id);
        u64::from(page.0 - self.first.0) * PAGE_SIZE as u64
    }
}

/// A range of guest-physical addresses that is backed by RAM.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct GuestSpan {
    /// Its start in the guest's physical address space; page-aligned.
    pub gpa: GuestPhys,
    /// The RAM page at its start.
    pub page: Page,
    /// Its length in pages.
    pub pages: u32,
}

impl GuestSpan {
    fn end_gpa(&self) -> GuestPhys {
        self.gpa.offset_by(u64::from(self.pages) * PAGE_SIZE as u64)
    }

    fn page_range(&self) -> Range<Page> {
        self.page..Page(self.page.0 + self.pages)
    }
}

/// All RAM of a VM: its regions, and the guest-physical addresses at which the guest sees them.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RegionMap {
    regions: Vec<RamRegion>,
    spans: Vec<GuestSpan>,
}

/// The reason why a region map was refused.
#[derive(Debug, Error, PartialEq, Eq)]
pub enum RegionMapError {
    /// The VM has no RAM at all, or a region without pages.
    #[error("RAM region {0:?} is empty")]
    Empty(String),
    /// Sizes are whole pages, and all RAM together fits the 32-bit page space.
    #[error(
        "RAM region {id:?} of {bytes} bytes is not a whole number of {PAGE_SIZE}-byte pages below 16 TiB"
    )]
    Size {
        /// The region.
        id: String,
        /// Its size in bytes.
        bytes: u64,
    },
    /// A span names pages that no region has, or is not page-aligned.
    #[error("guest-physical span at {gpa} of {pages} pages lies outside every RAM region")]
    Span {
        /// The start of the span.
        gpa: GuestPhys,
        /// Its length in pages.
        pages: u32,
    },
    /// The region does not start in the RAM page space where the regions before it end.
    #[error("RAM region {0:?} is not where the regions before it end")]
    Place(String),
}

impl RegionMap {
    /// Lays out regions of the given names and byte sizes one after another. [`Self::with_spans`]
    /// adds the spans.
    pub fn lay_out<'a>(
        sizes: impl IntoIterator<Item = (&'a str, u64)>,
    ) -> Result<Self, RegionMapError> {
        let mut map = Self::default();
        for (id, bytes) in sizes {
            map.append_region(id, bytes)?;
        }
        map.regions.first().ok_or_else(|| RegionMapError::Empty("(none)".into()))?;
        Ok(map)
    }

    fn append_region(&mut self, id: &str, bytes: u64) -> Result<(), RegionMapError> {
        let bad_size = || RegionMapError::Size { id: id.to_owned(), bytes };
        if bytes == 0 {
            return Err(RegionMapError::Empty(id.to_owned()));
        }
        if bytes % PAGE_SIZE as u64 != 0 {
            return Err(bad_size());
        }
        let first = Page(self.total_pages().next_multiple_of(REGION_ALIGN));
        let pages = u32::try_from(bytes / PAGE_SIZE as u64).map_err(|_| bad_size())?;
        first
            .0
            .checked_add(pages)
            .filter(|&end| end < u32::MAX - REGION_ALIGN)
            .ok_or_else(bad_size)?;
        self.regions.push(RamRegion { id: id.to_owned(), pages, first });
        Ok(())
    }

    /// Renames a region.
    pub fn with_region_renamed(mut self, from: &str, to: &str) -> Self {
        let named = self.regions.iter_mut().filter(|region| region.id == from);
        named.for_each(|region| to.clone_into(&mut region.id));
        self
    }

    /// Adds the guest-physical spans. Spans may overlap in RAM pages (the guest sees the same RAM
    /// twice), not in addresses.
    pub fn with_spans(mut self, mut spans: Vec<GuestSpan>) -> Result<Self, RegionMapError> {
        spans.sort_by_key(|span| span.gpa);
        for span in &spans {
            self.check_span(span)?;
        }
        self.spans = spans;
        Ok(self)
    }

    fn check_span(&self, span: &GuestSpan) -> Result<(), RegionMapError> {
        let end = span.page.0.checked_add(span.pages).map(Page);
        let region = self.region_of(span.page);
        let fits =
            matches!((end, region), (Some(end), Some(region)) if end <= region.page_range().end);
        let aligned = span.gpa.0 % PAGE_SIZE as u64 == 0 && span.pages > 0;
        if fits && aligned {
            return Ok(());
        }
        Err(RegionMapError::Span { gpa: span.gpa, pages: span.pages })
    }

    /// Checks a map from outside, such as that of an image, as strictly as [`Self::lay_out`] checks
    /// a new one.
    pub fn check_layout(&self) -> Result<(), RegionMapError> {
        let sizes = self.regions.iter().map(|region| (region.id.as_str(), region.byte_len()));
        let laid_out = Self::lay_out(sizes)?;
        for (mine, theirs) in self.regions.iter().zip(&laid_out.regions) {
            if mine != theirs {
                return Err(RegionMapError::Place(mine.id.clone()));
            }
        }
        self.spans.iter().try_for_each(|span| self.check_span(span))
    }

    /// The regions, in the order of the RAM page space.
    pub fn regions(&self) -> &[RamRegion] {
        &self.regions
    }

    /// The guest-physical spans, by address.
    pub fn guest_spans(&self) -> &[GuestSpan] {
        &self.spans
    }

    /// The number after the last RAM page. It counts the alignment pages between regions, which are
    /// never backed.
    pub fn total_pages(&self) -> u32 {
        self.regions.last().map_or(0, |region| region.page_range().end.0)
    }

    /// The size of the guest's RAM in bytes, without alignment.
    pub fn ram_bytes(&self) -> u64 {
        self.regions.iter().map(RamRegion::byte_len).sum()
    }

    /// The region that holds a page; `None` for a page between or past the regions.
    pub fn region_of(&self, page: Page) -> Option<&RamRegion> {
        let after = self.regions.partition_point(|region| region.first <= page);
        let region = self.regions.get(after.checked_sub(1)?)?;
        region.page_range().contains(&page).then_some(region)
    }

    /// The RAM page at a guest-physical address; `None` where the guest has no RAM.
    pub fn page_at(&self, gpa: GuestPhys) -> Option<Page> {
        let after = self.spans.partition_point(|span| span.gpa <= gpa);
        let span = self.spans.get(after.checked_sub(1)?)?;
        let offset = (gpa.0 - span.gpa.0) / PAGE_SIZE as u64;
        (gpa < span.end_gpa()).then(|| Page(span.page.0 + offset as u32))
    }

    /// The first guest-physical address at which the guest sees a page; `None` if the guest does
    /// not see it.
    pub fn gpa_of(&self, page: Page) -> Option<GuestPhys> {
        let span = self.spans.iter().find(|span| span.page_range().contains(&page))?;
        Some(span.gpa.offset_by(u64::from(page.0 - span.page.0) * PAGE_SIZE as u64))
    }

    /// Clips a range of pages to the regions: returns the parts of it that are RAM, in order.
    pub fn clip_to_ram(&self, range: Range<Page>) -> impl Iterator<Item = Range<Page>> + '_ {
        self.regions.iter().filter_map(move |region| {
            let ram = region.page_range();
            let part = ram.start.max(range.start)..ram.end.min(range.end);
            (part.start < part.end).then_some(part)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const MIB: u64 = 1 << 20;

    fn split_around_the_hole() -> RegionMap {
        let low = GuestSpan { gpa: GuestPhys(0), page: Page(0), pages: 0x8_0000 };
        let high = GuestSpan { gpa: GuestPhys(4 << 30), page: Page(0x8_0000), pages: 0x8_0000 };
        RegionMap::lay_out([("ram", 4096 * MIB)]).unwrap().with_spans(vec![high, low]).unwrap()
    }

    #[test]
    fn ram_above_the_pci_hole_follows_ram_below_it() {
        let map = split_around_the_hole();
        assert_eq!(map.page_at(GuestPhys(4 << 30)), Some(Page(0x8_0000)));
        assert_eq!(map.page_at(GuestPhys(3 << 30)), None);
        assert_eq!(map.gpa_of(Page(0x8_0001)), Some(GuestPhys((4 << 30) + 4096)));
    }

    #[test]
    fn regions_start_on_block_boundaries() {
        let map = RegionMap::lay_out([("a", 3 * 4096), ("b", 4096)]).unwrap();
        assert_eq!(map.regions()[1].first, Page(16));
        assert_eq!(map.region_of(Page(5)), None);
        assert_eq!(map.ram_bytes(), 4 * 4096);
    }

    #[test]
    fn a_map_with_a_moved_region_is_refused() {
        let mut map = RegionMap::lay_out([("a", MIB), ("b", MIB)]).unwrap();
        map.regions[1].first = Page(7);
        assert_eq!(map.check_layout(), Err(RegionMapError::Place("b".into())));
    }

    #[test]
    fn a_span_past_its_region_is_refused() {
        let span = GuestSpan { gpa: GuestPhys(0), page: Page(200), pages: 100 };
        let map = RegionMap::lay_out([("a", MIB)]).unwrap();
        assert!(matches!(map.with_spans(vec![span]), Err(RegionMapError::Span { pages: 100, .. })));
    }

    #[test]
    fn clipping_leaves_out_what_lies_between() {
        let map = RegionMap::lay_out([("a", 3 * 4096), ("b", 4096)]).unwrap();
        let parts: Vec<_> = map.clip_to_ram(Page(2)..Page(17)).collect();
        assert_eq!(parts, [Page(2)..Page(3), Page(16)..Page(17)]);
    }

    proptest! {
        #[test]
        fn gpa_and_page_are_inverse(page in 0u32..0x10_0000) {
            let map = split_around_the_hole();
            let gpa = map.gpa_of(Page(page)).unwrap();
            prop_assert_eq!(map.page_at(gpa), Some(Page(page)));
        }
    }
}
