//! PT assisted by the operating system: asynchronous write protection, and one scan per commit that
//! reports the written pages and protects them again. No signals; system calls may write areas as
//! well.
//!
//! If the session compares reported pages with the last committed copy, pages that are written in
//! most transactions ([`PageHeat`]) are not protected at all, and reported every time: comparing a
//! page costs a tenth of a fault. They are unregistered, and the scan skips pages that are not
//! registered, so that it remains one call. If faults cost more than comparing everything, no page
//! is protected for a while ([`FullCompare`]).

use super::hot::PageHeat;
use super::interface::{Tracker, WrittenRuns};
use super::kind::TrackerKind;
use super::whole::FullCompare;
use crate::error::Error;
use crate::span::{PAGE, PageSpan};
use crate::sys::fork::OwnerProcess;
use crate::sys::pagemap::{ScanCriterion, SelfPagemap};
use crate::sys::uffd::AsyncUffd;

/// See the module documentation.
#[derive(Debug)]
pub(super) struct AssistedTracker {
    uffd: AsyncUffd,
    pagemap: SelfPagemap,
    spans: Vec<PageSpan>,
    heat: Option<PageHeat>,
    full_compare: FullCompare,
    owner: OwnerProcess,
}

impl AssistedTracker {
    pub(super) fn open() -> Result<Self, Error> {
        let uffd = AsyncUffd::new().map_err(|errno| {
            let why =
                format!("userfaultfd with asynchronous write protection (Linux 6.7): {errno}");
            Error::Unavailable { kind: TrackerKind::Assisted, why }
        })?;
        let owner =
            OwnerProcess::this_process().map_err(Error::system("marking a page for forks"))?;
        let pagemap = SelfPagemap::open().map_err(Error::io("opening /proc/self/pagemap"))?;
        Ok(Self {
            uffd,
            pagemap,
            spans: Vec::new(),
            heat: None,
            full_compare: FullCompare::default(),
            owner,
        })
    }

    fn protect_span(&self, span: PageSpan) -> Result<(), Error> {
        self.uffd
            .register_span(span)
            .map_err(Error::system("registering an area with userfaultfd"))?;
        self.uffd.write_protect(span).map_err(Error::system("write-protecting an area"))
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
        if self.protect_span(span).is_err() {
            // It may have been registered: then another tracker could not follow it.
            let _ = self.uffd.unregister_span(span);
            let why = "userfaultfd cannot follow this memory, maybe because another one does: \
                       use the tracker pt, or auto";
            return Err(Error::Unavailable { kind: TrackerKind::Assisted, why: why.to_owned() });
        }
        self.full_compare.reset_after_growth();
        // One scan for all areas that are side by side.
        span.add_to(&mut self.spans);
        Ok(())
    }

    fn forget_span(&mut self, span: PageSpan) -> Result<(), Error> {
        let unregistered = self.uffd.unregister_span(span);
        unregistered.map_err(Error::system("taking an area out of userfaultfd"))?;
        span.remove_from(&mut self.spans);
        if let Some(heat) = &mut self.heat {
            heat.forget_span(span);
        }
        Ok(())
    }

    fn collect_writes(&mut self, found: &mut WrittenRuns) -> Result<(), Error> {
        if self.full_compare.is_comparing() {
            return self.report_all(found);
        }
        for span in &self.spans {
            let scanned = self.pagemap.scan_span(*span, ScanCriterion::WrittenAndRearm, found);
            scanned.map_err(Error::system("scanning for written pages"))?;
        }
        let Some(mut heat) = self.heat.take() else { return Ok(()) };
        let faults = found.runs().iter().map(|(_, bytes)| bytes / PAGE).sum();
        let hot = heat.hot_pages().count();
        let followed = self.update_heat(&mut heat, found);
        self.heat = Some(heat);
        followed?;
        let pages = self.spans.iter().map(|span| span.page_count()).sum();
        match self.full_compare.count_followed(faults, hot, pages) {
            true => self.unprotect_all(),
            false => Ok(()),
        }
    }
}

impl AssistedTracker {
    /// Reports everything. If pages cannot be protected again it continues to compare everything.
    fn report_all(&mut self, found: &mut WrittenRuns) -> Result<(), Error> {
        self.spans.iter().for_each(|span| found.push_run(span.start(), span.byte_count()));
        if self.full_compare.is_last() {
            self.spans.iter().try_for_each(|span| self.protect_span(*span))?;
        }
        self.full_compare.count_compared();
        Ok(())
    }

    /// Ends the protection of all pages.
    fn unprotect_all(&mut self) -> Result<(), Error> {
        self.heat = Some(PageHeat::default());
        let unregistered = self.spans.iter().try_for_each(|span| self.uffd.unregister_span(*span));
        unregistered.map_err(Error::system("taking an area out of userfaultfd"))
    }

    /// Reports hot pages, and decides which pages are hot. The pages found so far are those that
    /// are not hot.
    fn update_heat(&self, heat: &mut PageHeat, found: &mut WrittenRuns) -> Result<(), Error> {
        // Pages that become hot now have been reported already.
        let hot = heat.hot_pages().count();
        for &(start, len) in found.runs() {
            for page in (start..start + len).step_by(PAGE) {
                if heat.record_write(page) {
                    let unregistered =
                        self.uffd.unregister_span(PageSpan::covering_range(page..page + PAGE));
                    unregistered.map_err(Error::system("taking a page out of userfaultfd"))?;
                }
            }
        }
        for page in heat.hot_pages().take(hot) {
            found.push_run(page, PAGE);
        }
        heat.end_transaction();
        match heat.cool_page() {
            Some(page) => self.protect_span(PageSpan::covering_range(page..page + PAGE)),
            None => Ok(()),
        }
    }
}

impl Drop for AssistedTracker {
    fn drop(&mut self) {
        // A child's descriptor is its parent's: the parent's pages are registered with it.
        let spans = self.spans.iter().filter(|_| self.owner.is_this_process());
        for span in spans {
            // Closing the descriptor, which comes next, unregisters as well.
            let _ = self.uffd.unregister_span(*span);
        }
    }
}
