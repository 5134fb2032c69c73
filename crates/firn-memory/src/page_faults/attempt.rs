//! Answers that are given once, for a page server whose threads answer at the same time.
//!
//! A page that the guest gives back must not be brought back by a thread that decided on it before. [`PageFaults::install`]
//! reads events while it tries again, which lets the hypervisor go on giving the page back, and then another thread can
//! be too late to notice. So here nothing is read and nothing is tried again: a thread that finds the hypervisor busy
//! is told so, lets whoever reads the events look at them, and decides anew.

use std::ops::Range;

use firn_types::{PAGE_SIZE, Page};
use rustix::io::Errno;

use super::answer::pages_from;
use super::{PageFaultError, PageFaults, span};
use crate::sys::uffd::Span;

/// How an answer that was tried once went.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Attempt {
    /// All pages are installed.
    Done,
    /// Some pages were present already, and kept; the others are installed.
    Present,
    /// The hypervisor is giving pages back, and waits until that event is read. Some pages may be installed.
    Busy,
}

impl PageFaults {
    /// Installs whole pages of one region and wakes who waits for them, as [`Self::install`].
    ///
    /// # Errors
    /// If the hypervisor is gone or has unmapped the pages.
    ///
    /// # Panics
    /// In debug builds, if `bytes` is not a whole number of pages.
    pub fn try_install(&self, first: Page, bytes: &[u8]) -> Result<Attempt, PageFaultError> {
        debug_assert_eq!(bytes.len() % PAGE_SIZE, 0, "{} bytes are not pages", bytes.len());
        let range = pages_from(first, bytes);
        self.attempt("installing", range, |part, at| {
            let from = Page::count(&(first..part.start)) * PAGE_SIZE;
            let to = Page::count(&(first..part.end)) * PAGE_SIZE;
            self.uffd.copy(at.start, &bytes[from..to])
        })
    }

    /// Installs pages of zeros, as [`Self::try_install`].
    ///
    /// # Errors
    /// As [`Self::try_install`].
    pub fn try_zero(&self, range: Range<Page>) -> Result<Attempt, PageFaultError> {
        self.attempt("zeroing", range, |_, at| self.uffd.zero(at))
    }

    /// Whether the hypervisor is giving pages back at this moment, and waits until that event is read: then every attempt
    /// is [`Attempt::Busy`]. One system call of a tenth of a microsecond.
    pub fn is_giving_back(&self) -> bool {
        // An impossible request: the kernel looks for changes of the address space before it looks at the range.
        self.uffd.zero(Span { start: 0, len: 0 }) == Err(Errno::AGAIN)
    }

    fn attempt(
        &self,
        what: &'static str,
        range: Range<Page>,
        request: impl Fn(Range<Page>, Span) -> Result<u64, Errno>,
    ) -> Result<Attempt, PageFaultError> {
        let mut outcome = Attempt::Done;
        for (mut part, mut hva) in self.memory.located(range) {
            while part.start < part.end {
                let bytes = match request(part.clone(), span(hva, &part)) {
                    Ok(bytes) => bytes,
                    Err(Errno::EXIST) => {
                        self.wake(part.start..Page(part.start.0 + 1))?;
                        outcome = Attempt::Present;
                        PAGE_SIZE as u64
                    }
                    Err(Errno::AGAIN) => return Ok(Attempt::Busy),
                    Err(errno) => return Err(self.error(what, &part, errno)),
                };
                part.start.0 += (bytes / PAGE_SIZE as u64) as u32;
                hva = hva.plus(bytes);
            }
        }
        Ok(outcome)
    }
}
