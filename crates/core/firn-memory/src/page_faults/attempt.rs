//! Answers that are tried once, for a page server whose threads answer at the same time.
//!
//! A thread that decided to install a page must not do so after the guest gave that page back.
//! [`PageFaults::install_pages`] reads events between its attempts. That lets the hypervisor finish
//! giving the page back, and then another thread can notice it too late. So here nothing is read
//! and nothing is repeated: a thread that finds the hypervisor busy gets [`InstallAttempt::Busy`],
//! the thread that reads the events handles them, and the first one decides anew.

use std::ops::Range;

use firn_types::{PAGE_SIZE, Page};
use rustix::io::Errno;

use super::answer::pages_from;
use super::{PageFaultError, PageFaults, span_of_part};
use crate::sys::uffd::AddressSpan;
use crate::template::TemplateWriter;

/// A fault on a filled page of a template maps pages of an aligned run of this many, as the kernel
/// does around a fault that it handles itself.
const AROUND_PAGES: u32 = 16;

/// The outcome of an answer that was tried once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum InstallAttempt {
    /// All pages are installed.
    Done,
    /// Some pages were present already, and were kept; the others are installed.
    Present,
    /// The hypervisor is giving pages back, and waits until that event is read. Some of the pages
    /// may be installed.
    Busy,
}

impl PageFaults {
    /// Installs whole pages of one region and wakes the threads that wait for them, as
    /// [`Self::install_pages`].
    ///
    /// # Errors
    /// If the hypervisor is gone or has unmapped the pages.
    ///
    /// # Panics
    /// In debug builds, if `bytes` is not a whole number of pages.
    pub fn try_install(&self, first: Page, bytes: &[u8]) -> Result<InstallAttempt, PageFaultError> {
        debug_assert_eq!(bytes.len() % PAGE_SIZE, 0, "{} bytes are not pages", bytes.len());
        let range = pages_from(first, bytes);
        self.request_once("installing", range, |part, at| {
            let from = Page::count_in(&(first..part.start)) * PAGE_SIZE;
            let to = Page::count_in(&(first..part.end)) * PAGE_SIZE;
            match &self.template {
                Some(template) => self.install_shared(template, part.start, at, &bytes[from..to]),
                None => self.uffd.copy_pages(at.start, &bytes[from..to], 0),
            }
        })
    }

    /// Puts pages into a template, and maps them in this hypervisor. If the template's holder has
    /// ended, installs one page in the hypervisor's own memory, unless the template has that page.
    fn install_shared(
        &self,
        template: &TemplateWriter,
        first: Page,
        at: AddressSpan,
        bytes: &[u8],
    ) -> Result<u64, Errno> {
        let one = AddressSpan { len: PAGE_SIZE as u64, ..at };
        match template.write_pages(first, bytes) {
            Ok(()) => self.uffd.map_existing(at, 0),
            Err(Errno::SRCH) if template.is_filled(first) => self.uffd.map_existing(one, 0),
            Err(Errno::SRCH) => self.uffd.copy_pages(at.start, &bytes[..PAGE_SIZE], 0),
            Err(errno) => Err(errno),
        }
    }

    /// Resumes the threads of a hypervisor that wait for a page of a template. The page must be
    /// final: filled in the template, in the hypervisor's own memory, or zeros. If it is filled, the
    /// filled pages after it are mapped as well, up to an aligned run of some pages.
    ///
    /// # Errors
    /// As [`Self::try_install`].
    pub fn try_resume(&self, page: Page) -> Result<InstallAttempt, PageFaultError> {
        let one = page..Page(page.0 + 1);
        let Some(template) = &self.template else {
            return self.request_once("resuming", one, |_, at| self.map_template_or_zeros(at));
        };
        let end = Page((page.0 / AROUND_PAGES + 1).saturating_mul(AROUND_PAGES));
        match template.filled_run(page, end) {
            run if run.is_empty() => self.try_install_zeros(one),
            run => self.request_once("resuming", run, |_, at| self.uffd.map_existing(at, 0)),
        }
    }

    /// Without its holder only the kernel knows whether the template has a page.
    fn map_template_or_zeros(&self, at: AddressSpan) -> Result<u64, Errno> {
        match self.uffd.map_existing(at, 0) {
            Err(Errno::FAULT) => self.uffd.map_zeros(at, 0),
            result => result,
        }
    }

    /// Installs pages of zeros, as [`Self::try_install`].
    ///
    /// # Errors
    /// As [`Self::try_install`].
    pub fn try_install_zeros(&self, range: Range<Page>) -> Result<InstallAttempt, PageFaultError> {
        self.request_once("zeroing", range, |part, at| self.map_zeros(part.start, at))
    }

    /// Whether the hypervisor is giving pages back at this moment, and waits until that event is
    /// read: then every attempt is [`InstallAttempt::Busy`]. One system call of a tenth of a
    /// microsecond.
    pub fn is_giving_back(&self) -> bool {
        // An impossible request: the kernel checks for changes of the address space before it
        // checks the range.
        self.uffd.map_zeros(AddressSpan { start: 0, len: 0 }, 0) == Err(Errno::AGAIN)
    }

    fn request_once(
        &self,
        what: &'static str,
        range: Range<Page>,
        request: impl Fn(Range<Page>, AddressSpan) -> Result<u64, Errno>,
    ) -> Result<InstallAttempt, PageFaultError> {
        let mut outcome = InstallAttempt::Done;
        for (mut part, mut hva) in self.memory.locate_parts(range) {
            while part.start < part.end {
                let bytes = match request(part.clone(), span_of_part(hva, &part)) {
                    Ok(bytes) => bytes,
                    Err(Errno::EXIST) => {
                        let present = self.memory.entry_of(part.start);
                        self.wake_waiters(present.clone())?;
                        outcome = InstallAttempt::Present;
                        (Page::count_in(&present) * PAGE_SIZE) as u64
                    }
                    Err(Errno::AGAIN) => return Ok(InstallAttempt::Busy),
                    Err(errno) => return Err(self.request_error(what, &part, errno)),
                };
                part.start.0 += (bytes / PAGE_SIZE as u64) as u32;
                hva = hva.offset_by(bytes);
            }
        }
        Ok(outcome)
    }
}
