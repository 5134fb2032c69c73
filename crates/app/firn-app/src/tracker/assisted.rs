//! PT assisted by the operating system: asynchronous write protection, and one scan per commit that
//! reports the written pages and protects them again. No signals; system calls may write areas as
//! well.
//!
//! If the session compares reported pages with the last committed copy, pages that are written in
//! most transactions ([`PageHeat`]) are not protected at all, and reported every time: comparing a
//! page costs a tenth of a fault. They are unregistered, and the scan skips pages that are not
//! registered, so that it remains one call. If faults cost more than comparing everything, no page
//! is protected for a while ([`FullCompare`]).
//!
//! A scan costs by the size of what it scans: large areas are scanned in parts ([`ProtectionLevels`]).

use std::sync::Arc;

use super::hot::PageHeat;
use super::interface::{Tracker, TrackerCounts, WrittenRuns};
use super::kind::TrackerKind;
use super::levels::ProtectionLevels;
use super::parts::PartSettings;
use super::whole::FullCompare;
use crate::error::Error;
use crate::memory::AreaMemory;
use crate::span::{PAGE, PageSpan};
use crate::sys::fork::OwnerProcess;
use crate::sys::pagemap::SelfPagemap;

/// See the module documentation.
#[derive(Debug)]
pub(super) struct AssistedTracker {
    levels: ProtectionLevels,
    heat: Option<PageHeat>,
    full_compare: FullCompare,
}

impl AssistedTracker {
    pub(super) fn open(parts: PartSettings) -> Result<Self, Error> {
        let owner =
            OwnerProcess::this_process().map_err(Error::system("marking a page for forks"))?;
        let pagemap = SelfPagemap::open().map_err(Error::io("opening /proc/self/pagemap"))?;
        let levels = ProtectionLevels::open(parts, owner, pagemap).map_err(|errno| {
            let why =
                format!("userfaultfd with asynchronous write protection (Linux 6.7): {errno}");
            Error::Unavailable { kind: TrackerKind::Assisted, why }
        })?;
        Ok(Self { levels, heat: None, full_compare: FullCompare::default() })
    }
}

impl Tracker for AssistedTracker {
    fn kind(&self) -> TrackerKind {
        TrackerKind::Assisted
    }

    fn set_comparing(&mut self, compares: bool) {
        self.heat = compares.then(PageHeat::default);
    }

    fn watch_span(&mut self, span: PageSpan) -> Result<(), Error> {
        self.watch_memory(span, false)
    }

    fn allocate_memory(&mut self, bytes: usize) -> Result<Arc<AreaMemory>, Error> {
        let memory = Arc::new(AreaMemory::anonymous(bytes)?);
        self.watch_memory(memory.span(), true).map(|()| memory)
    }

    fn forget_span(&mut self, span: PageSpan) -> Result<(), Error> {
        self.levels.forget_span(span)?;
        if let Some(heat) = &mut self.heat {
            heat.forget_span(span);
        }
        Ok(())
    }

    fn collect_writes(&mut self, found: &mut WrittenRuns) -> Result<(), Error> {
        if self.full_compare.is_comparing() {
            return self.report_all(found);
        }
        self.levels.collect_busy(found)?;
        // No page of a quiet part is written in most transactions: the part would be busy.
        let scanned = found.runs().len();
        self.levels.collect_quiet(found)?;
        let Some(mut heat) = self.heat.take() else { return self.levels.end_transaction() };
        let faults = found.runs().iter().map(|(_, bytes)| bytes / PAGE).sum();
        let hot = heat.hot_pages().count();
        let followed = self.update_heat(&mut heat, scanned, found);
        self.heat = Some(heat);
        followed?;
        match self.full_compare.count_followed(faults, hot, self.levels.followed().page_count()) {
            true => self.unprotect_all(),
            false => self.levels.end_transaction(),
        }
    }

    fn counts(&self) -> TrackerCounts {
        TrackerCounts { waited: self.levels.waited(), ..TrackerCounts::default() }
    }

    fn restriction(&self) -> Option<&str> {
        self.levels.restriction()
    }
}

impl AssistedTracker {
    fn watch_memory(&mut self, span: PageSpan, is_own: bool) -> Result<(), Error> {
        if self.levels.watch_span(span, is_own, self.heat.is_some()).is_err() {
            // It may have been registered: then another tracker could not follow it.
            self.levels.give_up(span);
            let why = "userfaultfd cannot follow this memory, maybe because another one does: \
                       use the tracker pt, or auto";
            return Err(Error::Unavailable { kind: TrackerKind::Assisted, why: why.to_owned() });
        }
        self.full_compare.reset_after_growth();
        Ok(())
    }

    /// Reports everything. If pages cannot be protected again it continues to compare everything.
    fn report_all(&mut self, found: &mut WrittenRuns) -> Result<(), Error> {
        let spans = self.levels.followed().all().iter();
        spans.for_each(|span| found.push_run(span.start(), span.byte_count()));
        if self.full_compare.is_last() {
            self.levels.protect_all()?;
        }
        self.full_compare.count_compared();
        Ok(())
    }

    /// Ends the protection of all pages.
    fn unprotect_all(&mut self) -> Result<(), Error> {
        self.heat = Some(PageHeat::default());
        self.levels.unprotect_all()
    }

    /// Reports hot pages, and decides which pages are hot. The pages found so far are those that
    /// are not hot; the first `scanned` runs are of busy parts.
    fn update_heat(
        &mut self,
        heat: &mut PageHeat,
        scanned: usize,
        found: &mut WrittenRuns,
    ) -> Result<(), Error> {
        // Pages that become hot now have been reported already.
        let hot = heat.hot_pages().count();
        for &(start, len) in &found.runs()[..scanned] {
            for page in (start..start + len).step_by(PAGE) {
                if heat.record_write(page) {
                    self.levels.unprotect_page(PageSpan::covering_range(page..page + PAGE))?;
                }
            }
        }
        for page in heat.hot_pages().take(hot) {
            found.push_run(page, PAGE);
        }
        heat.end_transaction();
        match heat.cool_page() {
            Some(page) => self.levels.protect_page(PageSpan::covering_range(page..page + PAGE)),
            None => Ok(()),
        }
    }
}
