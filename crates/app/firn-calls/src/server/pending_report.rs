//! The pages of a session that are to be reported, and those of replies that may not have arrived.

use std::collections::BTreeSet;

use crate::message::{FollowedAreaId, PageRun};

/// A page of an area, counted from the area's start.
pub(super) type AreaPage = (FollowedAreaId, u32);

/// See the module documentation. Its cost depends on the written pages, not on the areas.
#[derive(Debug, Default)]
pub(super) struct PendingReport {
    /// Pages written since the last reply.
    written: BTreeSet<AreaPage>,
    /// Pages reported in a reply that may not have arrived.
    reported: BTreeSet<AreaPage>,
}

impl PendingReport {
    /// Records that a page was written.
    pub(super) fn mark_written(&mut self, page: AreaPage) {
        self.written.insert(page);
    }

    /// Records that all pages of an area may have been written.
    pub(super) fn mark_area(&mut self, id: FollowedAreaId, pages: u32) {
        self.written.extend((0..pages).map(|page| (id, page)));
    }

    /// Removes the pages of an area that is no longer followed.
    pub(super) fn forget_area(&mut self, id: FollowedAreaId) {
        self.written.retain(|page| page.0 != id);
        self.reported.retain(|page| page.0 != id);
    }

    /// Records that the last reply has arrived.
    pub(super) fn acknowledge_reported(&mut self) {
        self.reported.clear();
    }

    /// The runs of pages to report.
    pub(super) fn report_runs(&mut self) -> Vec<PageRun> {
        match self.reported.is_empty() {
            true => std::mem::swap(&mut self.reported, &mut self.written),
            false => self.reported.append(&mut self.written),
        }
        let mut runs: Vec<PageRun> = Vec::new();
        for &(area, page) in &self.reported {
            match runs.last_mut() {
                Some(run) if run.area == area && run.first + run.pages == page => run.pages += 1,
                _ => runs.push(PageRun { area, first: page, pages: 1 }),
            }
        }
        runs
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn reported_runs(report: &mut PendingReport) -> Vec<(u16, u32, u32)> {
        report.report_runs().into_iter().map(|run| (run.area.0, run.first, run.pages)).collect()
    }

    #[test]
    fn pages_are_reported_until_the_reply_has_arrived() {
        let (mut report, area) = (PendingReport::default(), FollowedAreaId);
        assert_eq!(reported_runs(&mut report), []);
        report.mark_written((area(0), 1));
        report.mark_written((area(0), 3));
        assert_eq!(reported_runs(&mut report), [(0, 1, 1), (0, 3, 1)]);
        report.mark_written((area(0), 2));
        report.mark_area(area(1), 2);
        let all = [(0, 1, 3), (1, 0, 2)];
        assert_eq!(reported_runs(&mut report), all, "the answer before may not have come");
        report.forget_area(area(0));
        assert_eq!(reported_runs(&mut report), [(1, 0, 2)]);
        report.acknowledge_reported();
        assert_eq!(reported_runs(&mut report), []);
    }
}
