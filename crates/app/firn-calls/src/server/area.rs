//! A followed area: the physical addresses of its pages, and which of them were written.

use firn_types::Page;

use crate::message::{CallRefusal, FollowedAreaId, PageRun};
use crate::store_recording::RecordedArea;

/// A followed area of one address space.
#[derive(Debug)]
pub(super) struct FollowedArea {
    pub(super) start: u64,
    /// The physical page of each of its pages at the last translation, if it was mapped.
    physical: Vec<Option<Page>>,
    /// The inverse map: physical page, and page of the area.
    by_physical: Vec<(Page, u32)>,
    /// Pages written since the last reply.
    written: Vec<bool>,
    /// Pages reported in a reply that may not have arrived.
    reported: Vec<bool>,
}

impl FollowedArea {
    pub(super) fn new(start: u64, physical: Vec<Page>) -> Self {
        let none = vec![false; physical.len()];
        let mut area = Self {
            start,
            physical: physical.into_iter().map(Some).collect(),
            by_physical: Vec::new(),
            written: none.clone(),
            reported: none,
        };
        area.rebuild_index();
        area
    }

    fn rebuild_index(&mut self) {
        let pages = self.physical.iter().zip(0..);
        self.by_physical =
            pages.filter_map(|(physical, page)| Some(((*physical)?, page))).collect();
        self.by_physical.sort_unstable();
    }

    pub(super) fn page_count(&self) -> u32 {
        self.physical.len() as u32
    }

    /// The physical pages, in ascending order.
    pub(super) fn physical_pages(&self) -> impl Iterator<Item = Page> + '_ {
        self.by_physical.iter().map(|(physical, _)| *physical)
    }

    /// Updates the physical pages. The guest's kernel may have moved some, or unmapped them for a
    /// while. Firn has not observed writes to them meanwhile, so they count as written.
    pub(super) fn update_physical(&mut self, now: &[Result<Page, CallRefusal>]) {
        let mut changed = false;
        for (page, now) in now.iter().enumerate().take(self.physical.len()) {
            let now = now.ok();
            self.written[page] |= now.is_none() || now != self.physical[page];
            changed |= now != self.physical[page];
            self.physical[page] = now;
        }
        if changed {
            self.rebuild_index();
        }
    }

    /// The area in the form that the plugin needs to record stores; `None` if it is too large for
    /// that.
    pub(super) fn recorded_area(&self, id: FollowedAreaId) -> Option<RecordedArea> {
        let (start, pages) = (self.start, self.page_count());
        (pages <= RecordedArea::PAGES_MAX).then_some(RecordedArea { id, start, pages })
    }

    /// Records that these physical pages, in ascending order, were written.
    pub(super) fn mark_written(&mut self, written: &[Page]) {
        for physical in written {
            let from = self.by_physical.partition_point(|(it, _)| it < physical);
            for (_, page) in self.by_physical[from..].iter().take_while(|(it, _)| it == physical) {
                self.written[*page as usize] = true;
            }
        }
    }

    /// Records that all pages may have been written.
    pub(super) fn mark_all_written(&mut self) {
        self.written.fill(true);
    }

    /// Records that the last reply has arrived.
    pub(super) fn acknowledge_reported(&mut self) {
        self.reported.fill(false);
    }

    /// Adds the runs of pages to report.
    pub(super) fn report_runs(&mut self, id: FollowedAreaId, runs: &mut Vec<PageRun>) {
        for (page, (known, fresh)) in (0..).zip(self.reported.iter_mut().zip(&mut self.written)) {
            *known |= std::mem::take(fresh);
            if !*known {
                continue;
            }
            match runs.last_mut() {
                Some(run) if run.area == id && run.first + run.pages == page => run.pages += 1,
                _ => runs.push(PageRun { area: id, first: page, pages: 1 }),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn reported_runs(area: &mut FollowedArea) -> Vec<(u32, u32)> {
        let mut runs = Vec::new();
        area.report_runs(FollowedAreaId(0), &mut runs);
        runs.into_iter().map(|run| (run.first, run.pages)).collect()
    }

    #[test]
    fn pages_are_reported_until_the_reply_has_arrived() {
        let mut area = FollowedArea::new(0, [9, 4, 5, 4].map(Page).to_vec());
        assert_eq!(reported_runs(&mut area), []);
        area.mark_written(&[Page(4), Page(7)]);
        assert_eq!(reported_runs(&mut area), [(1, 1), (3, 1)], "a page that is there twice");
        area.mark_written(&[Page(5)]);
        assert_eq!(reported_runs(&mut area), [(1, 3)], "the answer before may not have come");
        area.acknowledge_reported();
        assert_eq!(reported_runs(&mut area), []);
    }

    #[test]
    fn a_page_that_moved_counts_as_written() {
        let mut area = FollowedArea::new(0, [1, 2, 3].map(Page).to_vec());
        area.update_physical(&[Ok(Page(1)), Ok(Page(8)), Err(CallRefusal::Unmapped(0))]);
        assert_eq!(reported_runs(&mut area), [(1, 2)]);
        area.acknowledge_reported();
        assert_eq!(area.physical_pages().collect::<Vec<_>>(), [Page(1), Page(8)]);
        area.update_physical(&[Ok(Page(1)), Ok(Page(8)), Err(CallRefusal::Unmapped(0))]);
        assert_eq!(reported_runs(&mut area), [(2, 1)], "as long as it is away");
    }
}
