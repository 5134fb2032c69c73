//! The answers to page faults.
//!
//! Three conditions can interrupt a request, and this module handles them:
//!
//! ```text
//!   EEXIST   the page is there already           wake the threads that wait for it, continue with the next one
//!   EAGAIN   the hypervisor is changing its      read the events, because the hypervisor waits for that; give up if they report
//!            address space                       that these pages were removed, else try again
//!   partial  stopped half-way                    continue from there
//! ```
//!
//! Where RAM is in huge pages, each answer is for whole huge pages ([`GuestMemory::entry_of`]).
//!
//! [`GuestMemory::entry_of`]: crate::GuestMemory::entry_of

use std::ops::Range;
use std::sync::atomic::Ordering;
use std::time::Duration;

use firn_types::{PAGE_SIZE, Page};
use rustix::io::Errno;

use super::{FaultKind, MemoryEvent, PageFaultError, PageFaults, lock_list, span_of_part};
use crate::guest_memory::HUGE_PAGE_BYTES;
use crate::sys::uffd::{AddressSpan, flag};

/// The maximum number of attempts while the hypervisor changes its address space: about two seconds
/// in all.
const ATTEMPTS_MAX: u32 = 2000;
/// The number of attempts that are followed by a yield only.
const YIELDS: u32 = 100;
static HUGE_PAGE_OF_ZEROS: [u8; HUGE_PAGE_BYTES as usize] = [0; HUGE_PAGE_BYTES as usize];

/// The pause after each of the others.
const PAUSE: Duration = Duration::from_millis(1);

/// The outcome of an installation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum InstallOutcome {
    /// All pages are installed.
    Done,
    /// Some pages were present already, and were kept; the others are installed.
    Present,
    /// The hypervisor gave some of these pages back meanwhile; the remaining ones were not
    /// installed. [`PageFaults::wait_for_events`] reports which pages were removed.
    Removed,
}

/// The pages that these bytes are for.
pub(super) fn pages_from(first: Page, bytes: &[u8]) -> Range<Page> {
    first..Page(first.0.saturating_add((bytes.len() / PAGE_SIZE) as u32))
}

impl PageFaults {
    /// Installs whole pages of one region and wakes the threads that wait for them. Each page
    /// appears whole or not at all.
    ///
    /// # Errors
    /// If the hypervisor is gone or has unmapped the pages.
    ///
    /// # Panics
    /// In debug builds, if `bytes` is not a whole number of pages.
    pub fn install_pages(
        &self,
        first: Page,
        bytes: &[u8],
    ) -> Result<InstallOutcome, PageFaultError> {
        debug_assert!(bytes.len() % PAGE_SIZE == 0, "{} bytes are not pages", bytes.len());
        let range = pages_from(first, bytes);
        self.repeat_request("installing", range, |part, at| {
            let from = Page::count_in(&(first..part.start)) * PAGE_SIZE;
            let to = Page::count_in(&(first..part.end)) * PAGE_SIZE;
            self.uffd.copy_pages(at.start, &bytes[from..to], 0)
        })
    }

    /// Installs pages of zeros, as [`Self::install_pages`].
    pub fn install_zeros(&self, range: Range<Page>) -> Result<InstallOutcome, PageFaultError> {
        self.repeat_request("zeroing", range, |part, at| self.map_zeros(part.start, at))
    }

    /// The kernel has no `UFFDIO_ZEROPAGE` for huge pages: one of zeros is copied.
    pub(super) fn map_zeros(&self, first: Page, at: AddressSpan) -> Result<u64, Errno> {
        match self.memory.huge_page_of(first) {
            Some(_) => self.uffd.copy_pages(at.start, &HUGE_PAGE_OF_ZEROS, 0),
            None => self.uffd.map_zeros(at, 0),
        }
    }

    /// Maps pages that the RAM file has and wakes the threads that wait for them. The pages are
    /// write-protected if `protect`. Pages that are mapped already stay unchanged. Never-backed
    /// pages are left to the kernel, which maps zeros when they are touched.
    ///
    /// # Errors
    /// If the hypervisor is gone or has unmapped the pages, or if `protect` is set and the kernel
    /// does not support it ([`super::KernelFeatures::resume_protected`]).
    pub fn resume_minor(&self, range: Range<Page>, protect: bool) -> Result<(), PageFaultError> {
        if protect && !self.features.resume_protected {
            return Err(PageFaultError::Features { missing: vec!["UFFDIO_CONTINUE_MODE_WP"] });
        }
        let mode = if protect { flag::CONTINUE_WP } else { 0 };
        let resume = |at: AddressSpan| match self.uffd.map_existing(at, mode) {
            // Never backed: counts as mapped, for the kernel maps zeros when it is touched.
            Err(Errno::FAULT) => Err(Errno::EXIST),
            other => other,
        };
        self.repeat_request("resuming", range, |_, at| resume(at)).map(drop)
    }

    /// Maps a page, or the huge page that it is in, for a thread that reads it, and wakes the
    /// thread. The next write there is a fault of its own.
    ///
    /// The page is mapped, then protected, and only then the thread is woken: `UFFDIO_ZEROPAGE`
    /// can't map a page protected, nor can `UFFDIO_CONTINUE` before Linux 6.4. Another thread may
    /// write in between, so this is for times when the vCPUs are stopped.
    ///
    /// # Errors
    /// As [`Self::protect_pages`].
    pub fn resume_reader(
        &self,
        page: Page,
        kind: FaultKind,
    ) -> Result<InstallOutcome, PageFaultError> {
        let entry = self.memory.entry_of(page);
        let mut is_present = false;
        let map = |part: Range<Page>, at| match self.map_asleep(part.start, at, kind) {
            // What is there already is protected all the same before the thread is woken.
            Err(Errno::EXIST | Errno::FAULT) => {
                is_present = true;
                Ok(at.len)
            }
            other => other,
        };
        let outcome = self.repeat_request("mapping", entry.clone(), map)?;
        self.protect_pages(entry.clone())?;
        self.wake_waiters(entry)?;
        Ok(if is_present { InstallOutcome::Present } else { outcome })
    }

    /// Maps a page or a huge page, and does not wake the threads that wait for it.
    fn map_asleep(&self, first: Page, at: AddressSpan, kind: FaultKind) -> Result<u64, Errno> {
        let is_huge = self.memory.huge_page_of(first).is_some();
        match kind {
            FaultKind::Missing if is_huge => {
                self.uffd.copy_pages(at.start, &HUGE_PAGE_OF_ZEROS, flag::COPY_DONTWAKE)
            }
            FaultKind::Missing => self.uffd.map_zeros(at, flag::ZEROPAGE_DONTWAKE),
            FaultKind::Minor => self.uffd.map_existing(at, flag::CONTINUE_DONTWAKE),
            FaultKind::WriteProtect => Ok(at.len),
        }
    }

    /// Write-protects pages: the next write to each is a [`super::FaultKind::WriteProtect`] fault.
    /// Costs 3-8 ms per GiB. In private memory, never-touched pages can only be protected if the
    /// kernel has [`super::KernelFeatures::write_protect_unpopulated`].
    ///
    /// # Errors
    /// If the hypervisor is gone or has unmapped the pages.
    pub fn protect_pages(&self, range: Range<Page>) -> Result<(), PageFaultError> {
        self.set_protection("protecting", range, flag::WRITEPROTECT_WP)
    }

    /// Removes the write protection of pages, and wakes the threads that wait for that.
    ///
    /// # Errors
    /// As [`Self::protect_pages`].
    pub fn unprotect_pages(&self, range: Range<Page>) -> Result<(), PageFaultError> {
        self.set_protection("unprotecting", range, 0)
    }

    fn set_protection(
        &self,
        what: &'static str,
        range: Range<Page>,
        mode: u64,
    ) -> Result<(), PageFaultError> {
        let set = |_, at: AddressSpan| self.uffd.write_protect(at, mode).map(|()| at.len);
        self.repeat_request(what, range, set).map(drop)
    }

    /// Wakes every thread that waits for one of these pages. It touches its page again, and faults
    /// again if nothing has changed.
    ///
    /// # Errors
    /// If the hypervisor is gone.
    pub fn wake_waiters(&self, range: Range<Page>) -> Result<(), PageFaultError> {
        for (part, hva) in self.memory.locate_parts(range) {
            let woken = self.uffd.wake(span_of_part(hva, &part));
            woken.map_err(|errno| self.request_error("waking", &part, errno))?;
        }
        Ok(())
    }

    /// Repeats a request over the regions of a range until all of it is done. The request returns
    /// the number of bytes that it completed, from the start of its span.
    fn repeat_request(
        &self,
        what: &'static str,
        range: Range<Page>,
        mut request: impl FnMut(Range<Page>, AddressSpan) -> Result<u64, Errno>,
    ) -> Result<InstallOutcome, PageFaultError> {
        let mut outcome = InstallOutcome::Done;
        let mut attempts = 0;
        for (mut part, mut hva) in self.memory.locate_parts(range) {
            while part.start < part.end {
                let bytes = match request(part.clone(), span_of_part(hva, &part)) {
                    Ok(bytes) => bytes,
                    Err(Errno::EXIST) => {
                        let present = self.memory.entry_of(part.start);
                        self.wake_waiters(present.clone())?;
                        outcome = InstallOutcome::Present;
                        (Page::count_in(&present) * PAGE_SIZE) as u64
                    }
                    Err(Errno::AGAIN) if attempts < ATTEMPTS_MAX => {
                        if self.read_removals(&part, attempts)? {
                            return Ok(InstallOutcome::Removed);
                        }
                        attempts += 1;
                        0
                    }
                    Err(errno) => return Err(self.request_error(what, &part, errno)),
                };
                part.start.0 += (bytes / PAGE_SIZE as u64) as u32;
                hva = hva.offset_by(bytes);
            }
        }
        Ok(outcome)
    }

    /// Reads the events for which the hypervisor waits, and keeps them for
    /// [`Self::wait_for_events`]. `true` if they remove any of these pages.
    fn read_removals(&self, part: &Range<Page>, attempts: u32) -> Result<bool, PageFaultError> {
        let mut held = lock_list(&self.pending_events);
        while self.read_events(&mut held)? > 0 {}
        self.has_pending.store(!held.is_empty(), Ordering::Release);
        let overlaps = |pages: &Range<Page>| pages.start < part.end && part.start < pages.end;
        let removed = held
            .iter()
            .any(|event| matches!(event, MemoryEvent::Removed { pages } if overlaps(pages)));
        drop(held);
        match attempts {
            _ if removed => {}
            ..YIELDS => std::thread::yield_now(),
            _ => std::thread::sleep(PAUSE),
        }
        Ok(removed)
    }
}
