//! PT assisted by the operating system: asynchronous write protection, and one scan per commit that
//! reports the written pages and protects them again. No signals; system calls may write areas as
//! well.
//!
//! If the session compares reported pages with the last committed copy, pages that are written in
//! most transactions ([`PageHeat`]) are not protected at all, and reported every time: comparing a
//! page costs a tenth of a fault. They are unregistered, and the scan skips pages that are not
//! registered, so that it remains one call. If faults cost more than comparing everything, no page
//! is protected for a while ([`FullCompare`]).

use super::hot::Heat;
use super::whole::Whole;
use super::{Found, Kind, Tracker};
use crate::error::Error;
use crate::span::{PAGE, Span};
use crate::sys::fork::Owner;
use crate::sys::pagemap::{Pagemap, Sought};
use crate::sys::uffd::Uffd;

/// See the module documentation.
#[derive(Debug)]
pub(super) struct Assisted {
    uffd: Uffd,
    pagemap: Pagemap,
    spans: Vec<Span>,
    heat: Option<Heat>,
    whole: Whole,
    owner: Owner,
}

impl Assisted {
    pub(super) fn open() -> Result<Self, Error> {
        let uffd = Uffd::new().map_err(|errno| {
            let why =
                format!("userfaultfd with asynchronous write protection (Linux 6.7): {errno}");
            Error::Unavailable { kind: Kind::Assisted, why }
        })?;
        let owner = Owner::this_process().map_err(Error::system("marking a page for forks"))?;
        let pagemap = Pagemap::open().map_err(Error::io("opening /proc/self/pagemap"))?;
        Ok(Self { uffd, pagemap, spans: Vec::new(), heat: None, whole: Whole::default(), owner })
    }

    fn protect(&self, span: Span) -> Result<(), Error> {
        self.uffd.register(span).map_err(Error::system("registering an area with userfaultfd"))?;
        self.uffd.write_protect(span).map_err(Error::system("write-protecting an area"))
    }
}

impl Tracker for Assisted {
    fn kind(&self) -> Kind {
        Kind::Assisted
    }

    fn compares(&mut self, compares: bool) {
        self.heat = compares.then(Heat::default);
    }

    fn watch(&mut self, span: Span) -> Result<(), Error> {
        self.protect(span)?;
        self.whole.grew();
        self.spans.push(span);
        Ok(())
    }

    fn collect(&mut self, found: &mut Found) -> Result<(), Error> {
        if self.whole.is_looking() {
            return self.look(found);
        }
        for span in &self.spans {
            let scanned = self.pagemap.scan(*span, Sought::WrittenAndRearm, found);
            scanned.map_err(Error::system("scanning for written pages"))?;
        }
        let Some(mut heat) = self.heat.take() else { return Ok(()) };
        let faults = found.runs().iter().map(|(_, bytes)| bytes / PAGE).sum();
        let hot = heat.hot().count();
        let followed = self.follow(&mut heat, found);
        self.heat = Some(heat);
        followed?;
        let pages = self.spans.iter().map(|span| span.pages()).sum();
        match self.whole.followed(faults, hot, pages) {
            true => self.let_go(),
            false => Ok(()),
        }
    }
}

impl Assisted {
    /// Reports everything. If pages cannot be protected again it continues to compare everything.
    fn look(&mut self, found: &mut Found) -> Result<(), Error> {
        self.spans.iter().for_each(|span| found.push(span.start(), span.bytes()));
        if self.whole.is_last() {
            self.spans.iter().try_for_each(|span| self.protect(*span))?;
        }
        self.whole.looked();
        Ok(())
    }

    /// Ends the protection of all pages.
    fn let_go(&mut self) -> Result<(), Error> {
        self.heat = Some(Heat::default());
        let let_go = self.spans.iter().try_for_each(|span| self.uffd.unregister(*span));
        let_go.map_err(Error::system("taking an area out of userfaultfd"))
    }

    /// Reports hot pages, and decides which pages are hot. The pages found so far are those that
    /// are not hot.
    fn follow(&self, heat: &mut Heat, found: &mut Found) -> Result<(), Error> {
        // Pages that become hot now have been reported already.
        let hot = heat.hot().count();
        for &(start, len) in found.runs() {
            for page in (start..start + len).step_by(PAGE) {
                if heat.written(page) {
                    let unregistered = self.uffd.unregister(Span::covering(page..page + PAGE));
                    unregistered.map_err(Error::system("taking a page out of userfaultfd"))?;
                }
            }
        }
        for page in heat.hot().take(hot) {
            found.push(page, PAGE);
        }
        heat.tick();
        match heat.cooled() {
            Some(page) => self.protect(Span::covering(page..page + PAGE)),
            None => Ok(()),
        }
    }
}

impl Drop for Assisted {
    fn drop(&mut self) {
        // A child's descriptor is its parent's: the parent's pages are registered with it.
        let spans = self.spans.iter().filter(|_| self.owner.is_here());
        for span in spans {
            // Closing the descriptor, which comes next, unregisters as well.
            let _ = self.uffd.unregister(*span);
        }
    }
}
