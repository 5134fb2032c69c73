//! PT: write-protected pages, SIGSEGV at the first write of each, one `mprotect` at commit.

use super::{Found, Kind, Tracker};
use crate::error::Error;
use crate::span::{PAGE, Span};
use crate::sys::fault::Watched;
use crate::sys::notes::Noted;

/// See the module documentation.
#[derive(Debug, Default)]
pub(super) struct Pages {
    watched: Vec<Watched>,
    pages: Vec<u32>,
    stores: Vec<Noted>,
}

impl Tracker for Pages {
    fn kind(&self) -> Kind {
        Kind::Pages
    }

    fn watch(&mut self, span: Span) -> Result<(), Error> {
        let watched =
            Watched::new(span, None).map_err(Error::system("write-protecting an area"))?;
        self.watched.push(watched);
        Ok(())
    }

    fn collect(&mut self, found: &mut Found) -> Result<(), Error> {
        for watched in &self.watched {
            let taken = watched.notes().take(&mut self.pages, &mut self.stores);
            taken.map_err(Error::system("write-protecting pages"))?;
            push_pages(watched.notes().span(), &self.pages, found);
        }
        Ok(())
    }
}

/// Adds pages of a span, by number.
pub(super) fn push_pages(span: Span, pages: &[u32], found: &mut Found) {
    for &page in pages {
        found.push(span.start() + page as usize * PAGE, PAGE);
    }
}
