//! PT assisted by the operating system: asynchronous write protection, and one scan per commit that tells the written
//! pages and protects them again. No signals; system calls may write areas as well.

use super::{Found, Kind, Tracker};
use crate::error::Error;
use crate::span::Span;
use crate::sys::pagemap::{Pagemap, Sought};
use crate::sys::uffd::Uffd;

/// See the module documentation.
#[derive(Debug)]
pub(super) struct Assisted {
    uffd: Uffd,
    pagemap: Pagemap,
    spans: Vec<Span>,
}

impl Assisted {
    pub(super) fn open() -> Result<Self, Error> {
        let uffd = Uffd::new().map_err(|errno| {
            let why =
                format!("userfaultfd with asynchronous write protection (Linux 6.7): {errno}");
            Error::Unavailable { kind: Kind::Assisted, why }
        })?;
        let pagemap = Pagemap::open().map_err(Error::io("opening /proc/self/pagemap"))?;
        Ok(Self { uffd, pagemap, spans: Vec::new() })
    }
}

impl Tracker for Assisted {
    fn kind(&self) -> Kind {
        Kind::Assisted
    }

    fn watch(&mut self, span: Span) -> Result<(), Error> {
        self.uffd.register(span).map_err(Error::system("registering an area with userfaultfd"))?;
        self.spans.push(span);
        self.uffd.write_protect(span).map_err(Error::system("write-protecting an area"))
    }

    fn collect(&mut self, found: &mut Found) -> Result<(), Error> {
        for span in &self.spans {
            let scanned = self.pagemap.scan(*span, Sought::WrittenAndRearm, found);
            scanned.map_err(Error::system("scanning for written pages"))?;
        }
        Ok(())
    }
}

impl Drop for Assisted {
    fn drop(&mut self) {
        for span in &self.spans {
            // Closing the descriptor, which comes next, unregisters as well.
            let _ = self.uffd.unregister(*span);
        }
    }
}
