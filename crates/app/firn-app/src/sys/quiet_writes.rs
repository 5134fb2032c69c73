//! Spans of which little is written: the first write of each page waits for a thread of the
//! library, which records the page and makes it writable.
//!
//! ```text
//!   a thread of the application            the thread here
//!   writes a protected page --> kernel --> reads the address
//!   waits                                  records the page in the log
//!   writes           <-- kernel <--------- permits writes of the page
//!
//!   commit: takes the log, protects its pages again
//! ```
//!
//! A page is recorded before it can be written, so no write is lost. The writer may hold any lock,
//! that of the allocator as well, and be inside of a system call. So the thread here allocates
//! nothing, locks nothing, handles no signal, and writes only its stack and the log, which has pages
//! of its own. No span has the first or the last page of what a session follows: they may have data
//! beside an area, which is anybody's.
//!
//! The log has a fixed size. If it is full, the thread records only that: then the page map shows
//! which pages are writable.

mod ahead;
mod log;
mod session_words;

use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread::{self, JoinHandle};

use rustix::io::Errno;

use super::fork::OwnerProcess;
use super::mapping::OwnedMapping;
use super::processor::{self, FollowedProcessor};
use super::uffd::Uffd;
use crate::span::PageSpan;
use ahead::WriteAhead;
use log::RunLog;
use session_words::SessionWords;

const STACK_BYTES: usize = 64 << 10;

/// What both threads have.
#[derive(Debug)]
struct SharedState {
    uffd: Uffd,
    log: RunLog,
    session: SessionWords,
    /// A page that the session writes to wake the thread.
    bell: OwnedMapping,
}

impl SharedState {
    /// Records a run, and permits writes of it.
    fn permit_run(&self, run: PageSpan) -> Result<(), Errno> {
        self.log.record(run, self.session.taken().load(Ordering::Acquire));
        self.uffd.permit_writes(run)
    }
}

/// Pages that were written since the last call. They are still writable.
#[derive(Debug)]
pub(crate) enum QuietRuns {
    /// These.
    Runs(Vec<PageSpan>),
    /// More than the log holds.
    TooMany,
}

/// The spans, and the thread. Dropping it makes the spans writable and ends the thread.
#[derive(Debug)]
pub(crate) struct QuietWrites {
    shared: Arc<SharedState>,
    thread: Option<JoinHandle<()>>,
    permits_ahead: bool,
    owner: OwnerProcess,
}

impl QuietWrites {
    /// Starts the thread. If `permits_ahead`, it permits more pages than are written, in the spans of
    /// [`QuietWrites::set_ahead`]: writes of page after page double the run, within blocks of
    /// `block` bytes.
    pub(crate) fn start(
        owner: OwnerProcess,
        block: usize,
        permits_ahead: bool,
    ) -> io::Result<Self> {
        let shared = Arc::new(SharedState {
            uffd: Uffd::synchronous()?,
            log: RunLog::new()?,
            session: SessionWords::new()?,
            bell: OwnedMapping::map_anonymous(1)?,
        });
        shared.uffd.register_span(shared.bell.span())?;
        let thread = {
            let shared = shared.clone();
            let builder = thread::Builder::new().name("firn-app-writes".into());
            let serve = move || serve_writers(&shared, block);
            without_signals(|| builder.stack_size(STACK_BYTES).spawn(serve))?
        };
        Ok(Self { shared, thread: Some(thread), permits_ahead, owner })
    }

    /// Begins to follow a span that no other descriptor follows.
    pub(crate) fn follow_span(&self, span: PageSpan) -> Result<(), Errno> {
        self.shared.uffd.register_span(span)?;
        self.shared.uffd.write_protect(span)?;
        // Huge pages can't be protected one small page at a time: then the first write would never
        // end.
        let page = span.sub_span(0..1);
        self.shared.uffd.permit_writes(page)?;
        self.shared.uffd.write_protect(page)
    }

    /// Ends to follow a span. Threads that wait to write it continue. Afterwards the thread here
    /// makes no page of it writable, which by then another descriptor may protect.
    pub(crate) fn release_span(&self, span: PageSpan) -> Result<(), Errno> {
        self.shared.session.clear_ahead();
        self.shared.uffd.unregister_span(span)?;
        self.wait_for_thread()
    }

    /// Sets the spans where more pages may be permitted than are written. The session follows all
    /// pages of each. [`QuietWrites::release_span`] clears them.
    pub(crate) fn set_ahead(&self, spans: &[PageSpan]) -> Result<(), Errno> {
        if self.permits_ahead {
            self.shared.session.clear_ahead();
            self.wait_for_thread()?;
            self.shared.session.set_ahead(spans);
        }
        Ok(())
    }

    /// Waits until the thread has answered what it is answering: it answers one write after the
    /// other, and this one is the last.
    fn wait_for_thread(&self) -> Result<(), Errno> {
        self.shared.uffd.write_protect(self.shared.bell.span())?;
        OwnedMapping::touch_pages(self.shared.bell.span());
        Ok(())
    }

    /// Protects a span again that was followed before.
    pub(crate) fn protect_again(&self, span: PageSpan) -> Result<(), Errno> {
        self.shared.uffd.write_protect(span)
    }

    /// Takes what was written.
    pub(crate) fn take_runs(&self) -> QuietRuns {
        let (log, session) = (&self.shared.log, &self.shared.session);
        let overflowed = log.take_overflow();
        let (first, end) = (session.taken().load(Ordering::Relaxed), log.recorded());
        let runs = (first..end).map(|number| log.run(number)).collect();
        session.taken().store(end, Ordering::Release);
        session.committer().store(processor::this_thread(), Ordering::Relaxed);
        if overflowed { QuietRuns::TooMany } else { QuietRuns::Runs(runs) }
    }

    /// The count of writes that waited so far, less those that the log could not hold.
    pub(crate) fn waited(&self) -> u64 {
        self.shared.log.recorded()
    }
}

impl Drop for QuietWrites {
    fn drop(&mut self) {
        let thread = self.thread.take();
        if !self.owner.is_this_process() {
            // A child has no such thread.
            return std::mem::forget(thread);
        }
        self.shared.session.stop().store(1, Ordering::SeqCst);
        // If the kernel refuses, the thread stays, and this one does not wait for it.
        if let (Ok(()), Some(thread)) = (self.wait_for_thread(), thread) {
            // It can't panic.
            let _ = thread.join();
        }
    }
}

/// The thread. It ends when the session does.
fn serve_writers(shared: &SharedState, block: usize) {
    let mut next = WriteAhead::new(block);
    let mut processor = FollowedProcessor::new();
    loop {
        let Some(writer) = shared.uffd.wait_for_writer() else { continue };
        let page = PageSpan::covering_range(writer.address..writer.address + 1);
        if page == shared.bell.span() {
            let is_over = shared.session.stop().load(Ordering::SeqCst) != 0;
            let _ = shared.uffd.permit_writes(page);
            if is_over {
                return;
            }
            continue;
        }
        answer_writer(shared, &mut next, page);
        let committer = shared.session.committer().load(Ordering::Relaxed);
        processor.follow(writer.thread, committer);
    }
}

fn answer_writer(shared: &SharedState, next: &mut WriteAhead, page: PageSpan) {
    let run = next.choose_run(page, shared.session.ahead_end(page.start()));
    // If it fails, not all of the run is protected here.
    if shared.permit_run(run).is_err() && (run == page || shared.permit_run(page).is_err()) {
        // The span was released meanwhile, which woke the writer; or the writer tries again.
        let _ = shared.uffd.wake_writers(page);
    }
}

/// Starts a thread in which all signals are blocked. A handler of the application there might write
/// a span, and wait for ever.
fn without_signals<T>(start: impl FnOnce() -> T) -> T {
    // SAFETY: both sets are initialized before they are used, and the mask is the calling thread's
    // own.
    unsafe {
        let (mut all, mut before) = (std::mem::zeroed(), std::mem::zeroed());
        libc::sigfillset(&raw mut all);
        libc::pthread_sigmask(libc::SIG_SETMASK, &raw const all, &raw mut before);
        let started = start();
        libc::pthread_sigmask(libc::SIG_SETMASK, &raw const before, std::ptr::null_mut());
        started
    }
}
