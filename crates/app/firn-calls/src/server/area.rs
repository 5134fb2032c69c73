//! A followed area: addresses, and the parts that it touches.

use std::ops::Range;

use firn_types::{PAGE_SIZE, Page};

use super::access::{PartNumber, PartTranslation};
use crate::message::{CallRefusal, FollowedAreaId};
use crate::store_recording::RecordedArea;

/// A followed area of one address space.
#[derive(Clone, Copy, Debug)]
pub(super) struct FollowedArea {
    /// The address of its first page.
    pub(super) start: u64,
    /// The count of its pages.
    pub(super) pages: u32,
}

impl FollowedArea {
    /// The parts that it touches.
    pub(super) fn parts(self) -> impl Iterator<Item = PartNumber> {
        let end = self.start + u64::from(self.pages) * PAGE_SIZE as u64;
        let last = PartNumber::of_address(end - 1);
        (PartNumber::of_address(self.start).0..=last.0).map(PartNumber)
    }

    /// Its pages within a part that it touches: their numbers in the part, and the number of the
    /// first in the area.
    pub(super) fn pages_within(self, part: PartNumber) -> (Range<usize>, u32) {
        let own = self.start / PAGE_SIZE as u64;
        let first = own.max(part.first_page());
        let end = (own + u64::from(self.pages)).min(part.first_page() + PartNumber::PAGES);
        let within = |page| (page - part.first_page()) as usize;
        (within(first)..within(end), (first - own) as u32)
    }

    /// The physical pages that hold its contents and its tables, unless the program may not write
    /// one of its pages.
    pub(super) fn physical_pages(
        self,
        translations: &[(PartNumber, PartTranslation)],
    ) -> Result<Vec<Page>, CallRefusal> {
        let mut all = Vec::new();
        for (part, translation) in translations {
            all.extend(translation.mapping.table);
            for page in self.pages_within(*part).0 {
                let unmapped = Err(CallRefusal::Unmapped(self.start));
                all.push(translation.pages.get(page).copied().unwrap_or(unmapped)?);
            }
        }
        Ok(all)
    }

    /// The area in the form that the plugin needs to record stores; `None` if it is too large for
    /// that.
    pub(super) fn recorded_area(self, id: FollowedAreaId) -> Option<RecordedArea> {
        let Self { start, pages } = self;
        (pages <= RecordedArea::PAGES_MAX).then_some(RecordedArea { id, start, pages })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_area_is_cut_where_parts_begin() {
        let area = FollowedArea { start: 0x3f_e000, pages: 515 };
        let cut: Vec<_> = area.parts().map(|part| (part.0, area.pages_within(part))).collect();
        assert_eq!(cut, [(1, (510..512, 0)), (2, (0..512, 2)), (3, (0..1, 514))]);
        let whole = FollowedArea { start: 0x40_0000, pages: 512 };
        assert_eq!(whole.parts().collect::<Vec<_>>(), [PartNumber(2)]);
        assert_eq!(whole.pages_within(PartNumber(2)), (0..512, 0));
    }
}
