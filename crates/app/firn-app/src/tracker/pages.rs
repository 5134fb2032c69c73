//! PT: write-protected pages, SIGSEGV at the first write of each, one `mprotect` at commit.

use super::interface::{Tracker, WrittenRuns};
use super::kind::TrackerKind;
use crate::error::Error;
use crate::span::{PAGE, PageSpan};
use crate::sys::fault::{self, WatchedSpan};
use crate::sys::write_log::RecordedStore;

/// See the module documentation.
#[derive(Debug, Default)]
pub(super) struct PageTracker {
    watched: Vec<WatchedSpan>,
    pages: Vec<u32>,
    stores: Vec<RecordedStore>,
}

impl PageTracker {
    /// Records pages that the log of a span had, in the log of a part of it, which is followed
    /// last.
    fn record_pages_again(&self, all: PageSpan, part: PageSpan) -> Result<(), Error> {
        let Some(new) = self.watched.last() else { return Ok(()) };
        let written = self.pages.iter().map(|page| all.start() + *page as usize * PAGE);
        let mut written = written.filter(|page| (part.start()..part.end()).contains(page));
        let recorded = written.try_for_each(|page| new.write_log().record_page(page));
        recorded.map_err(Error::system("making a page writable"))
    }

    /// Whether it follows nothing.
    pub(super) fn is_empty(&self) -> bool {
        self.watched.is_empty()
    }
}

impl Tracker for PageTracker {
    fn kind(&self) -> TrackerKind {
        TrackerKind::Pages
    }

    fn watch_span(&mut self, span: PageSpan) -> Result<(), Error> {
        let watched =
            WatchedSpan::new(span, None).map_err(Error::system("write-protecting an area"))?;
        self.watched.push(watched);
        Ok(())
    }

    fn forget_span(&mut self, span: PageSpan) -> Result<(), Error> {
        let is_met = |watched: &WatchedSpan| watched.write_log().span().overlaps(span);
        let forgotten: Vec<_>;
        (forgotten, self.watched) = std::mem::take(&mut self.watched).into_iter().partition(is_met);
        for old in forgotten {
            let all = old.write_log().span();
            let taken = old.write_log().take_log(&mut self.pages, &mut self.stores);
            taken.map_err(Error::system("write-protecting pages"))?;
            drop(old);
            for left in all.without_spans(&[span]) {
                self.watch_span(left)?;
                self.record_pages_again(all, left)?;
            }
        }
        Ok(())
    }

    fn check_working(&self) -> Result<(), Error> {
        match fault::is_handler_installed() {
            true => Ok(()),
            false => Err(Error::HandlerReplaced { kind: self.kind() }),
        }
    }

    fn collect_writes(&mut self, found: &mut WrittenRuns) -> Result<(), Error> {
        for watched in &self.watched {
            let taken = watched.write_log().take_log(&mut self.pages, &mut self.stores);
            taken.map_err(Error::system("write-protecting pages"))?;
            push_pages(watched.write_log().span(), &self.pages, found);
        }
        Ok(())
    }
}

/// Adds pages of a span, by number.
pub(super) fn push_pages(span: PageSpan, pages: &[u32], found: &mut WrittenRuns) {
    for &page in pages {
        found.push_run(span.start() + page as usize * PAGE, PAGE);
    }
}
