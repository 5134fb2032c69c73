//! The answers to page faults.
//!
//! Three things can come between a request and its end, and are dealt with here:
//!
//! ```text
//!   EEXIST   the page is there already           wake who waits for it, go on with the next one
//!   EAGAIN   the hypervisor is changing its      read the events, because it waits for that; give up if they say that
//!            address space                       the very pages were removed, else try again
//!   partial  stopped half-way                    go on from there
//! ```

use std::ops::Range;
use std::sync::atomic::Ordering;
use std::time::Duration;

use firn_types::{PAGE_SIZE, Page};
use rustix::io::Errno;

use super::{Event, PageFaultError, PageFaults, lock, span};
use crate::sys::uffd::{Span, flag};

/// How often a request is repeated while the hypervisor changes its address space: about two seconds in all.
const ATTEMPTS_MAX: u32 = 2000;
/// How many of these only yield.
const YIELDS: u32 = 100;
/// Pause between the others.
const PAUSE: Duration = Duration::from_millis(1);

/// How an installation went.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Install {
    /// All pages are installed.
    Done,
    /// Some pages were present already, and kept; the others are installed.
    Present,
    /// The hypervisor gave some of these pages back meanwhile; the rest was not installed. [`PageFaults::wait`] says
    /// which pages are gone.
    Removed,
}

/// The pages that these bytes are for.
pub(super) fn pages_from(first: Page, bytes: &[u8]) -> Range<Page> {
    first..Page(first.0.saturating_add((bytes.len() / PAGE_SIZE) as u32))
}

impl PageFaults {
    /// Installs whole pages of one region and wakes who waits for them. Each page appears whole or not at all.
    ///
    /// # Errors
    /// If the hypervisor is gone or has unmapped the pages.
    ///
    /// # Panics
    /// In debug builds, if `bytes` is not a whole number of pages.
    pub fn install(&self, first: Page, bytes: &[u8]) -> Result<Install, PageFaultError> {
        debug_assert!(bytes.len() % PAGE_SIZE == 0, "{} bytes are not pages", bytes.len());
        let range = pages_from(first, bytes);
        self.answer("installing", range, |part, at| {
            let from = Page::count(&(first..part.start)) * PAGE_SIZE;
            let to = Page::count(&(first..part.end)) * PAGE_SIZE;
            self.uffd.copy(at.start, &bytes[from..to])
        })
    }

    /// Installs pages of zeros, as [`Self::install`].
    pub fn zero(&self, range: Range<Page>) -> Result<Install, PageFaultError> {
        self.answer("zeroing", range, |_, at| self.uffd.zero(at))
    }

    /// Maps pages that the RAM file has and wakes who waits for them, write-protected if `protect`. Pages that are mapped
    /// already stay as they are; never-backed pages are left to the kernel, which makes zeros of them when touched.
    ///
    /// # Errors
    /// If the hypervisor is gone or has unmapped the pages, or if `protect` is set and the kernel cannot do that
    /// ([`super::Features::resume_protected`]).
    pub fn resume_minor(&self, range: Range<Page>, protect: bool) -> Result<(), PageFaultError> {
        if protect && !self.features.resume_protected {
            return Err(PageFaultError::Features { missing: vec!["UFFDIO_CONTINUE_MODE_WP"] });
        }
        let mode = if protect { flag::CONTINUE_WP } else { 0 };
        let resume = |at: Span| match self.uffd.resume(at, mode) {
            // Never backed: as good as mapped, for the kernel maps zeros when it is touched.
            Err(Errno::FAULT) => Err(Errno::EXIST),
            other => other,
        };
        self.answer("resuming", range, |_, at| resume(at)).map(drop)
    }

    /// Write-protects pages: the next write to each is a [`super::FaultKind::WriteProtect`] fault. Costs 3-8 ms per GiB.
    /// Of private memory, pages that were never touched can only be protected where
    /// [`super::Features::write_protect_unpopulated`] says so.
    ///
    /// # Errors
    /// If the hypervisor is gone or has unmapped the pages.
    pub fn protect(&self, range: Range<Page>) -> Result<(), PageFaultError> {
        self.set_protection("protecting", range, flag::WRITEPROTECT_WP)
    }

    /// Lets pages be written again, and wakes who waits for that.
    ///
    /// # Errors
    /// As [`Self::protect`].
    pub fn unprotect(&self, range: Range<Page>) -> Result<(), PageFaultError> {
        self.set_protection("unprotecting", range, 0)
    }

    fn set_protection(
        &self,
        what: &'static str,
        range: Range<Page>,
        mode: u64,
    ) -> Result<(), PageFaultError> {
        let set = |_, at: Span| self.uffd.write_protect(at, mode).map(|()| at.len);
        self.answer(what, range, set).map(drop)
    }

    /// Wakes every thread that waits for one of these pages. It will touch its page again, and fault again if nothing has
    /// changed.
    ///
    /// # Errors
    /// If the hypervisor is gone.
    pub fn wake(&self, range: Range<Page>) -> Result<(), PageFaultError> {
        for (part, hva) in self.memory.located(range) {
            let woken = self.uffd.wake(span(hva, &part));
            woken.map_err(|errno| self.error("waking", &part, errno))?;
        }
        Ok(())
    }

    /// Repeats a request over the regions of a range until all of it is done. The request gives the bytes it did from
    /// the start of what it is given.
    fn answer(
        &self,
        what: &'static str,
        range: Range<Page>,
        mut request: impl FnMut(Range<Page>, Span) -> Result<u64, Errno>,
    ) -> Result<Install, PageFaultError> {
        let mut outcome = Install::Done;
        let mut attempts = 0;
        for (mut part, mut hva) in self.memory.located(range) {
            while part.start < part.end {
                let bytes = match request(part.clone(), span(hva, &part)) {
                    Ok(bytes) => bytes,
                    Err(Errno::EXIST) => {
                        let page = part.start..Page(part.start.0 + 1);
                        self.wake(page)?;
                        outcome = Install::Present;
                        PAGE_SIZE as u64
                    }
                    Err(Errno::AGAIN) if attempts < ATTEMPTS_MAX => {
                        if self.make_way(&part, attempts)? {
                            return Ok(Install::Removed);
                        }
                        attempts += 1;
                        0
                    }
                    Err(errno) => return Err(self.error(what, &part, errno)),
                };
                part.start.0 += (bytes / PAGE_SIZE as u64) as u32;
                hva = hva.plus(bytes);
            }
        }
        Ok(outcome)
    }

    /// Reads the events that the hypervisor waits for us to read, and keeps them for [`Self::wait`]. `true` if they
    /// remove any of these pages.
    fn make_way(&self, part: &Range<Page>, attempts: u32) -> Result<bool, PageFaultError> {
        let mut held = lock(&self.held);
        while self.read(&mut held)? > 0 {}
        self.holds.store(!held.is_empty(), Ordering::Release);
        let overlaps = |pages: &Range<Page>| pages.start < part.end && part.start < pages.end;
        let removed =
            held.iter().any(|event| matches!(event, Event::Removed { pages } if overlaps(pages)));
        drop(held);
        match attempts {
            _ if removed => {}
            ..YIELDS => std::thread::yield_now(),
            _ => std::thread::sleep(PAUSE),
        }
        Ok(removed)
    }
}
