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
