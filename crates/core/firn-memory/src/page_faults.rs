//! The page faults of a running guest: wait for them, and answer them.
//!
//! ```text
//!                 TraceMode::Restore                    TraceMode::Save                               TraceMode::Writes
//!   registered    MISSING; of a template MINOR too      MINOR | WP                                    WP
//!   fault kinds   Missing: page not in the RAM file     Minor: in the file, not in the page tables    -
//!                                                       WriteProtect: a write to a protected page     WriteProtect
//!   answers       install_pages, install_zeros          resume_minor, unprotect_pages                 unprotect_pages
//!   other events  Removed: the guest gave pages back    -                                             -
//! ```
//!
//! A fault blocks one thread of the hypervisor until it is answered; the others continue. A page
//! installed by [`PageFaults::install_pages`] appears whole or not at all, so a page that the RAM
//! file has is always right, whatever happens to Firn in between.
//!
//! All functions take `&self`: one thread may wait while others install.

use std::ops::Range;
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use firn_types::{HostVirt, PAGE_SIZE, Page};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;

use crate::guest_memory::GuestMemory;
use crate::process::ProcessError;
use crate::sys::uffd::{AddressSpan, Uffd, UffdMessage, flag};
use crate::template::TemplateWriter;
use crate::tracee::Tracee;

mod access;
mod adopt;
mod answer;
mod attempt;
mod error;
mod event;
mod features;
mod handler_thread;
mod make;

pub use access::UserfaultfdAccess;
pub use answer::InstallOutcome;
pub use attempt::InstallAttempt;
pub use error::PageFaultError;
pub use event::{FaultKind, MemoryEvent};
pub use features::{KernelFeatures, TraceMode};
pub use handler_thread::abort_on_panic;

/// The maximum number of messages that one read takes.
const BATCH: usize = 64;

/// Firn's copy of a userfaultfd of the hypervisor.
///
/// Dropping it leaves the hypervisor's own copy, and with it all registrations: a guest that
/// touches a missing page waits for the next Firn to [`PageFaults::adopt`] it.
/// [`PageFaults::close`] ends it completely.
#[derive(Debug)]
pub struct PageFaults {
    memory: Arc<GuestMemory>,
    uffd: Uffd,
    /// The number of the hypervisor's copy in its own table.
    remote: i32,
    trace: TraceMode,
    /// Whether accesses to pages that are not in the RAM file fault too.
    with_holes: bool,
    features: KernelFeatures,
    /// Where pages are installed in place of the hypervisor's own memory.
    template: Option<Arc<TemplateWriter>>,
    /// The registered ranges. Only these may be unregistered, as another process may have
    /// registered others.
    registered: Mutex<Vec<Range<Page>>>,
    /// Events that were read while answering, for the next [`Self::wait_for_events`].
    pending_events: Mutex<Vec<MemoryEvent>>,
    has_pending: AtomicBool,
}

impl PageFaults {
    /// Makes a userfaultfd in the hypervisor, and copies the descriptor. Nothing is registered yet.
    ///
    /// # Errors
    /// If the hypervisor's user may not have one, or the kernel lacks a feature that `trace` needs.
    pub fn create(
        tracee: &mut Tracee<'_>,
        memory: Arc<GuestMemory>,
        trace: TraceMode,
    ) -> Result<Self, PageFaultError> {
        let features = KernelFeatures::of_kernel()?;
        if trace == TraceMode::Save && !memory.is_shared() {
            return Err(PageFaultError::Private);
        }
        let remote = make::create_userfaultfd(tracee)?;
        let made = Self::copy_remote(memory, remote, trace, features);
        if made.is_err() {
            // The first error is the one to report.
            let _ = make::close_descriptor(tracee, remote);
        }
        made
    }

    fn copy_remote(
        memory: Arc<GuestMemory>,
        remote: i32,
        trace: TraceMode,
        features: KernelFeatures,
    ) -> Result<Self, PageFaultError> {
        let uffd = Uffd::new(memory.process().copy_descriptor(remote)?);
        features::negotiate_features(&uffd, trace, features)?;
        Ok(Self::from_parts(memory, uffd, remote, trace, features))
    }

    fn from_parts(
        memory: Arc<GuestMemory>,
        uffd: Uffd,
        remote: i32,
        trace: TraceMode,
        features: KernelFeatures,
    ) -> Self {
        let (with_holes, registered, pending_events, has_pending) = Default::default();
        let template = None;
        Self {
            memory,
            uffd,
            remote,
            trace,
            with_holes,
            features,
            template,
            registered,
            pending_events,
            has_pending,
        }
    }

    /// From the next registration on, the first access to a page that is not in the RAM file is a
    /// [`FaultKind::Missing`] fault too, in each mode: no page of shared memory comes into being
    /// without an answer ([`Self::install_zeros`]). For shared memory and for huge pages.
    pub fn report_holes(&mut self) {
        self.with_holes = true;
    }

    /// From now on [`Self::try_install`] puts pages into this template, for all that share it, and
    /// maps them in this hypervisor. If the template's holder has ended, pages are installed in the
    /// hypervisor's own memory.
    pub fn share_template(&mut self, template: Arc<TemplateWriter>) {
        self.template = Some(template);
    }

    /// The template that pages are put into.
    pub fn template(&self) -> Option<&TemplateWriter> {
        self.template.as_deref()
    }

    fn register_mode(&self) -> u64 {
        let holes = if self.with_holes { flag::REGISTER_MISSING } else { 0 };
        let is_clone = self.trace == TraceMode::Restore && self.memory.has_template();
        let unfilled = if is_clone { flag::REGISTER_MINOR } else { 0 };
        self.trace.register_mode() | holes | unfilled
    }

    /// The mode it was created for.
    pub fn trace_mode(&self) -> TraceMode {
        self.trace
    }

    /// The features of the kernel.
    pub fn features(&self) -> KernelFeatures {
        self.features
    }

    /// The memory whose faults these are.
    pub fn memory(&self) -> &Arc<GuestMemory> {
        &self.memory
    }

    /// Registers all of RAM. Pages that are mapped already are not affected.
    ///
    /// # Errors
    /// If a region is registered with another userfaultfd (QEMU's own postcopy or background
    /// snapshot).
    pub fn register_all(&self) -> Result<(), PageFaultError> {
        let registered = self.register_range(self.memory.all_pages());
        if registered.is_err() {
            // The first error is the one to report.
            let _ = self.unregister_all();
        }
        registered
    }

    /// Registers a range, as [`Self::register_all`].
    pub fn register_range(&self, range: Range<Page>) -> Result<(), PageFaultError> {
        for (part, hva) in self.memory.locate_parts(range) {
            if lock_list(&self.registered).contains(&part) {
                continue;
            }
            self.uffd
                .register(span_of_part(hva, &part), self.register_mode())
                .map_err(|errno| self.request_error("registering", &part, errno))?;
            lock_list(&self.registered).push(part);
        }
        Ok(())
    }

    /// Unregisters all registered ranges: drops write protection, and wakes every thread that
    /// waits. It does so piece by piece, because no thread of the hypervisor can map or fault
    /// memory while the kernel goes through the page tables of a piece. Missing pages read as zeros
    /// from now on, so a restore unregisters only when all of RAM is present.
    ///
    /// # Errors
    /// If the hypervisor is gone. All pieces are unregistered in any case.
    pub fn unregister_all(&self) -> Result<(), PageFaultError> {
        self.unregister_by_pieces(&|| ())
    }

    /// As [`Self::unregister_all`], but calls `between` after each piece. There are many pieces, so
    /// a caller without urgency lets other threads run first.
    ///
    /// # Errors
    /// As [`Self::unregister_all`].
    pub fn unregister_by_pieces(&self, between: &dyn Fn()) -> Result<(), PageFaultError> {
        let mut result = Ok(());
        let registered = std::mem::take(&mut *lock_list(&self.registered));
        for piece in registered.into_iter().flat_map(split_into_pieces) {
            for (part, hva) in self.memory.locate_parts(piece) {
                result = result.and(self.unregister_part(&part, span_of_part(hva, &part)));
            }
            between();
        }
        result
    }

    /// Each step is tried whatever became of the one before: a thread that waits has to be woken.
    fn unregister_part(&self, part: &Range<Page>, span: AddressSpan) -> Result<(), PageFaultError> {
        let unprotected = self.drop_write_protection(span);
        let unregistered = self.uffd.unregister(span);
        // The kernel itself wakes only the threads that wait for missing pages.
        let woken = self.uffd.wake(span);
        let result = unprotected.and(unregistered).and(woken);
        result.map_err(|errno| self.request_error("unregistering", part, errno))
    }

    fn drop_write_protection(&self, span: AddressSpan) -> Result<(), Errno> {
        match self.trace {
            TraceMode::Restore => Ok(()),
            _ => match self.uffd.write_protect(span, 0) {
                Err(Errno::NOENT) => Ok(()),
                result => result,
            },
        }
    }

    /// Unregisters, and closes the hypervisor's copy of the descriptor; Firn's copy is closed when
    /// this is dropped. Call it once only: the number may name another file afterwards.
    ///
    /// # Errors
    /// If the hypervisor is gone.
    pub fn close(&self, tracee: &mut Tracee<'_>) -> Result<(), PageFaultError> {
        let unregistered = self.unregister_all();
        make::close_descriptor(tracee, self.remote)?;
        unregistered
    }

    /// Waits for events, at most `timeout`, and appends them to `out`: up to some dozens at once,
    /// none if the time is over. With a timeout of zero it only polls, in one system call, and does
    /// not notice the hypervisor's end.
    ///
    /// # Errors
    /// If the hypervisor has ended.
    pub fn wait_for_events(
        &self,
        out: &mut Vec<MemoryEvent>,
        timeout: Duration,
    ) -> Result<(), PageFaultError> {
        if self.take_pending_events(out) || self.read_events(out)? > 0 {
            return Ok(());
        }
        if timeout.is_zero() {
            return Ok(());
        }
        let timeout = Timespec::try_from(timeout).ok();
        let mut fds = [
            PollFd::new(&self.uffd, PollFlags::IN),
            PollFd::from_borrowed_fd(self.memory.process().pidfd(), PollFlags::IN),
        ];
        match poll(&mut fds, timeout.as_ref()) {
            Ok(0) | Err(Errno::INTR) => return Ok(()),
            Ok(_) => {}
            Err(errno) => {
                return Err(self.request_error("waiting for", &self.memory.all_pages(), errno));
            }
        }
        if !fds[1].revents().is_empty() {
            return Err(ProcessError::Gone { pid: self.memory.process().pid() }.into());
        }
        self.read_events(out).map(drop)
    }

    /// Reads one batch of messages. Returns the number of messages.
    fn read_events(&self, out: &mut Vec<MemoryEvent>) -> Result<usize, PageFaultError> {
        let mut messages: [UffdMessage; BATCH] = [[0; 4]; BATCH];
        let count = self.uffd.read_messages(&mut messages).map_err(|errno| {
            self.request_error("reading the faults of", &self.memory.all_pages(), errno)
        })?;
        out.extend(
            messages[..count]
                .iter()
                .filter_map(|message| event::decode_message(message, &self.memory)),
        );
        Ok(count)
    }

    fn take_pending_events(&self, out: &mut Vec<MemoryEvent>) -> bool {
        if !self.has_pending.load(Ordering::Acquire) {
            return false;
        }
        let mut held = lock_list(&self.pending_events);
        self.has_pending.store(false, Ordering::Release);
        out.append(&mut held);
        true
    }

    fn request_error(
        &self,
        what: &'static str,
        part: &Range<Page>,
        errno: Errno,
    ) -> PageFaultError {
        let process = self.memory.process();
        if errno == Errno::SRCH || process.is_dying() {
            return ProcessError::Gone { pid: process.pid() }.into();
        }
        PageFaultError::from_errno(what, part, errno)
    }
}

impl AsFd for PageFaults {
    /// Readable when [`PageFaults::wait_for_events`] has events to return, except for those that
    /// were read while answering.
    fn as_fd(&self) -> std::os::fd::BorrowedFd<'_> {
        self.uffd.as_fd()
    }
}

/// Locks a list that is consistent after every single push, so a panic elsewhere does not spoil it.
fn lock_list<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Pages that are unregistered in one request: the kernel goes through their page tables in less
/// than a millisecond.
const PIECE_PAGES: u32 = (64 << 20) / PAGE_SIZE as u32;

pub(crate) fn split_into_pieces(range: Range<Page>) -> impl Iterator<Item = Range<Page>> {
    let end = range.end.0;
    let starts = (range.start.0..end).step_by(PIECE_PAGES as usize);
    starts.map(move |start| Page(start)..Page(end.min(start.saturating_add(PIECE_PAGES))))
}

fn span_of_part(hva: HostVirt, part: &Range<Page>) -> AddressSpan {
    AddressSpan { start: hva.0, len: (Page::count_in(part) * PAGE_SIZE) as u64 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_make_the_whole() {
        let all = Page(5)..Page(5 + 2 * PIECE_PAGES + 7);
        let found: Vec<_> = split_into_pieces(all.clone()).collect();
        assert_eq!(found.len(), 3);
        assert_eq!((found[0].start, found[2].end), (all.start, all.end));
        assert!(found.windows(2).all(|two| two[0].end == two[1].start));
        assert_eq!(split_into_pieces(Page(3)..Page(3)).count(), 0);
        assert_eq!(split_into_pieces(Page(u32::MAX - 1)..Page(u32::MAX)).count(), 1);
    }
}
