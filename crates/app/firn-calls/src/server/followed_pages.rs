//! The pages that a session follows, and their remembered translation.
//!
//! The guest's kernel may move a page at any time. To translate all pages at each look would cost by
//! the size of the areas. So a part (2 MiB) is translated again only if the tables may say something
//! else than before:
//!
//! ```text
//!   1. find_mappings   the entry above each part, as it is now
//!   2. take_written    pages of contents and of tables that were written since the last look
//!   3. translate_part  the parts whose mapping differs, or whose table was written (stale);
//!                      then the same again for these parts, until none is stale
//! ```
//!
//! Nothing is missed, although the guest runs meanwhile. If a part is not stale, its table was not
//! written from the time when it was read until step 2, and it was the table of the part in step 1.
//! So in step 1 each page was where it is thought to be, with all that the application wrote before.
//! If that differs from the last report, the physical page was written before step 1, and step 2
//! finds it. This holds although pages may have been elsewhere and come back. It does not hold for a
//! page that came back between steps 2 and 3: its copy is a write that only the next step 2 finds.
//! So a part that was translated is looked at again. If its table does not come to rest, all pages
//! of the part count as written.
//!
//! A table is read after its writes were taken, so a later write to it is reported at the next look.
//! The same holds for a table that is read here for the first time: a write after the last take is
//! still to be reported, to this session or to another one, and the server marks it in all of them.
//!
//! The processor, too, writes tables: accessed and dirty bits. That costs the translation of a
//! part, which then is as before. QEMU's emulation and KVM do so through the hypervisor's mapping of
//! RAM, or under its write protection, so such writes are reported like all others. A processor that
//! treats each walk as a write (KVM with accessed bits in nested page tables) costs a few
//! translations at each look.
//!
//! A page that moved counts as written, because Firn has not observed writes to it meanwhile. So
//! does, at each look, a page that is not mapped.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use firn_types::{GuestPhys, Page};

use super::access::{GuestAccess, PartMapping, PartNumber, PartTranslation};
use super::area::FollowedArea;
use super::page_index::PageIndex;
use super::pending_report::{AreaPage, PendingReport};
use crate::message::FollowedAreaId;

/// See the module documentation.
#[derive(Debug, Default)]
pub(super) struct FollowedPages {
    parts: BTreeMap<PartNumber, FollowedPart>,
    /// Virtual pages, by the physical page with their contents.
    contents: PageIndex,
    /// Parts, by the physical page with their table.
    tables: PageIndex,
    /// Parts to translate at the next look.
    stale: BTreeSet<PartNumber>,
    /// Parts of which a followed page is not mapped.
    incomplete: BTreeSet<PartNumber>,
    /// All physical pages of contents and tables, until one changes.
    ranges: Option<Vec<Range<Page>>>,
}

/// The followed pages of a part.
#[derive(Debug)]
struct FollowedPart {
    mapping: PartMapping,
    /// The areas that touch it: their pages in the part, and the number of the first in the area.
    areas: BTreeMap<FollowedAreaId, (Range<usize>, u32)>,
    /// The physical page of each followed page at the last translation, if it was mapped.
    physical: Vec<Option<Page>>,
}

impl FollowedPart {
    fn new(mapping: PartMapping) -> Self {
        let physical = vec![None; PartNumber::PAGES as usize];
        Self { mapping, areas: BTreeMap::new(), physical }
    }

    /// The pages of areas that are this page of the part.
    fn area_pages(&self, page: usize) -> impl Iterator<Item = AreaPage> + '_ {
        let areas = self.areas.iter().filter(move |(_, (pages, _))| pages.contains(&page));
        areas.map(move |(id, (pages, first))| (*id, first + (page - pages.start) as u32))
    }

    fn is_followed(&self, page: usize) -> bool {
        self.areas.values().any(|(pages, _)| pages.contains(&page))
    }

    /// The followed pages, each once, in ascending order.
    fn followed_pages(&self) -> Vec<usize> {
        let mut is_followed = vec![false; self.physical.len()];
        self.areas.values().for_each(|(pages, _)| is_followed[pages.clone()].fill(true));
        (0..)
            .zip(is_followed)
            .filter_map(|(page, is_followed)| is_followed.then_some(page))
            .collect()
    }
}

impl FollowedPages {
    /// Follows an area, whose parts were just translated. They are translated once more at the next
    /// look, because the guest may have changed a table meanwhile.
    pub(super) fn add_area(
        &mut self,
        id: FollowedAreaId,
        area: FollowedArea,
        translations: Vec<(PartNumber, PartTranslation)>,
        report: &mut PendingReport,
    ) {
        for (number, translation) in translations {
            let is_new = !self.parts.contains_key(&number);
            if is_new {
                self.tables.replace_page(number.0, None, translation.mapping.table);
                self.parts.insert(number, FollowedPart::new(translation.mapping));
            }
            self.update_part(number, &translation, report);
            let (pages, first) = area.pages_within(number);
            let Some(part) = self.parts.get_mut(&number) else { continue };
            let fresh: Vec<_> = pages.clone().filter(|&page| !part.is_followed(page)).collect();
            for page in fresh {
                part.physical[page] = translation.pages.get(page).and_then(|page| page.ok());
                let user = number.first_page() + page as u64;
                self.contents.replace_page(user, None, part.physical[page]);
            }
            part.areas.insert(id, (pages, first));
            self.stale.insert(number);
        }
        self.ranges = None;
    }

    /// Follows an area no longer.
    pub(super) fn remove_area(&mut self, id: FollowedAreaId, area: FollowedArea) {
        for number in area.parts() {
            let Some(part) = self.parts.get_mut(&number) else { continue };
            let Some((pages, _)) = part.areas.remove(&id) else { continue };
            for page in pages {
                if !part.is_followed(page) {
                    let user = number.first_page() + page as u64;
                    self.contents.replace_page(user, part.physical[page].take(), None);
                }
            }
            if part.areas.is_empty() {
                self.tables.replace_page(number.0, part.mapping.table, None);
                self.parts.remove(&number);
                self.stale.remove(&number);
                self.incomplete.remove(&number);
            }
        }
        self.ranges = None;
    }

    /// The physical pages of contents and tables, as ranges in ascending order.
    pub(super) fn physical_ranges(&mut self) -> &[Range<Page>] {
        let (contents, tables) = (&self.contents, &self.tables);
        self.ranges.get_or_insert_with(|| {
            ranges_of_pages(contents.pages().chain(tables.pages()).collect())
        })
    }

    /// Records that these physical pages were written.
    pub(super) fn mark_written(&mut self, written: &[Page], report: &mut PendingReport) {
        for &physical in written {
            for user in self.contents.users_of(physical) {
                self.mark_page(user, report);
            }
            self.stale.extend(self.tables.users_of(physical).map(PartNumber));
        }
    }

    /// Records that any table may have been written.
    pub(super) fn mark_tables_written(&mut self) {
        self.stale.extend(self.parts.keys());
    }

    /// All parts.
    pub(super) fn parts(&self) -> BTreeSet<PartNumber> {
        self.parts.keys().copied().collect()
    }

    /// The physical pages of contents and tables of some parts, as ranges in ascending order.
    pub(super) fn ranges_of_parts(&mut self, numbers: &BTreeSet<PartNumber>) -> Vec<Range<Page>> {
        if numbers.len() == self.parts.len() {
            return self.physical_ranges().to_vec();
        }
        let parts = numbers.iter().filter_map(|number| self.parts.get(number));
        let pages = parts.flat_map(|part| part.physical.iter().chain([&part.mapping.table]));
        ranges_of_pages(pages.flatten().copied().collect())
    }

    /// Step 1: records which of these parts have another mapping than before.
    pub(super) fn compare_mappings(
        &mut self,
        numbers: &BTreeSet<PartNumber>,
        space: GuestPhys,
        below: &mut dyn GuestAccess,
    ) {
        let listed: Vec<PartNumber> = numbers.iter().copied().collect();
        for (number, now) in listed.iter().zip(below.find_mappings(space, &listed)) {
            if self.parts.get(number).is_some_and(|part| part.mapping != now) {
                self.stale.insert(*number);
            }
        }
    }

    /// Step 3: translates the stale parts, and returns them. Pages that moved count as written.
    pub(super) fn translate_stale(
        &mut self,
        space: GuestPhys,
        below: &mut dyn GuestAccess,
        report: &mut PendingReport,
    ) -> BTreeSet<PartNumber> {
        let stale = std::mem::take(&mut self.stale);
        for number in &stale {
            let translation = below.translate_part(space, *number);
            self.update_part(*number, &translation, report);
        }
        stale
    }

    /// Records that any page of these parts may have been written, and translates them again at the
    /// next look.
    pub(super) fn distrust_parts(
        &mut self,
        numbers: &BTreeSet<PartNumber>,
        report: &mut PendingReport,
    ) {
        for part in numbers.iter().filter_map(|number| self.parts.get(number)) {
            for page in part.followed_pages() {
                part.area_pages(page).for_each(|page| report.mark_written(page));
            }
        }
        self.stale.extend(numbers);
    }

    /// Replaces the translation of the followed pages of a part.
    fn update_part(
        &mut self,
        number: PartNumber,
        translation: &PartTranslation,
        report: &mut PendingReport,
    ) {
        let Some(part) = self.parts.get_mut(&number) else { return };
        if part.mapping != translation.mapping {
            self.tables.replace_page(number.0, part.mapping.table, translation.mapping.table);
            part.mapping = translation.mapping;
            self.ranges = None;
        }
        self.incomplete.remove(&number);
        for page in part.followed_pages() {
            let now = translation.pages.get(page).and_then(|page| page.ok());
            if now.is_none() {
                self.incomplete.insert(number);
            }
            let before = std::mem::replace(&mut part.physical[page], now);
            if before != now {
                self.contents.replace_page(number.first_page() + page as u64, before, now);
                self.ranges = None;
                part.area_pages(page).for_each(|page| report.mark_written(page));
            }
        }
    }

    /// Records that pages that are not mapped may have been written.
    pub(super) fn mark_incomplete(&self, report: &mut PendingReport) {
        for part in self.incomplete.iter().filter_map(|number| self.parts.get(number)) {
            for page in part.followed_pages() {
                if part.physical[page].is_none() {
                    part.area_pages(page).for_each(|page| report.mark_written(page));
                }
            }
        }
    }

    /// Marks a virtual page in all areas.
    fn mark_page(&self, page: u64, report: &mut PendingReport) {
        let Some(part) = self.parts.get(&PartNumber(page / PartNumber::PAGES)) else { return };
        let within = (page % PartNumber::PAGES) as usize;
        part.area_pages(within).for_each(|page| report.mark_written(page));
    }
}

/// Pages in any order, as ranges in ascending order.
pub(super) fn ranges_of_pages(mut pages: Vec<Page>) -> Vec<Range<Page>> {
    pages.sort_unstable();
    let mut ranges: Vec<Range<Page>> = Vec::new();
    for page in pages {
        match ranges.last_mut() {
            Some(last) if page < last.end => {}
            Some(last) if page == last.end => last.end = Page(page.0 + 1),
            _ => ranges.push(page..Page(page.0 + 1)),
        }
    }
    ranges
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_are_ranges_in_order_and_once() {
        let pages = [9, 4, 5, 4, 7, 6].map(Page).to_vec();
        assert_eq!(ranges_of_pages(pages), [Page(4)..Page(8), Page(9)..Page(10)]);
        assert_eq!(ranges_of_pages(Vec::new()), []);
    }
}
