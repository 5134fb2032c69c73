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

use std::io;
use std::os::fd::{AsFd as _, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use rustix::event::{EventfdFlags, eventfd};
use rustix::io::Errno;

use super::fork::OwnerProcess;
use super::mapping::OwnedMapping;
use super::processor::{self, FollowedProcessor};
use super::uffd::Uffd;
use crate::span::{PAGE, PageSpan};

/// The count of runs that the log holds.
const LOG_RUNS: usize = 1022;
/// The words before the runs: the count of runs so far, and whether runs are missing.
const HEADER_WORDS: usize = 2;
/// The maximum count of pages that one write makes writable: a run is an address of a page, plus
/// its count of pages.
const RUN_PAGES_MAX: usize = 512;
/// The count of words before the spans of [`SessionWords`], and of these spans.
const SESSION_HEADER: usize = 4;
const AHEAD_SPANS_MAX: usize = 254;
const STACK_BYTES: usize = 64 << 10;

/// The runs that were written, in a mapping of its own. One thread adds runs, another takes them.
#[derive(Debug)]
struct RunLog(OwnedMapping);

impl RunLog {
    fn new() -> Result<Self, Errno> {
        let words = HEADER_WORDS + LOG_RUNS;
        OwnedMapping::map_anonymous(words * size_of::<u64>()).map(Self)
    }

    fn header(&self) -> &[AtomicU64] {
        self.0.atomic_words(0, HEADER_WORDS)
    }

    fn run_word(&self, number: u64) -> &AtomicU64 {
        let at = HEADER_WORDS + number as usize % LOG_RUNS;
        &self.0.atomic_words(at * size_of::<u64>(), 1)[0]
    }

    /// The count of runs that were recorded so far.
    fn recorded(&self) -> u64 {
        self.header()[0].load(Ordering::Acquire)
    }

    /// Records a run. `taken` is the count of runs that were taken so far.
    fn record(&self, run: PageSpan, taken: u64) {
        let number = self.header()[0].load(Ordering::Relaxed);
        if number - taken >= LOG_RUNS as u64 {
            self.header()[1].store(1, Ordering::Release);
            return;
        }
        let word = run.start() as u64 | run.page_count() as u64;
        self.run_word(number).store(word, Ordering::Relaxed);
        self.header()[0].store(number + 1, Ordering::Release);
    }

    fn take_overflow(&self) -> bool {
        self.header()[1].swap(0, Ordering::AcqRel) != 0
    }

    fn run(&self, number: u64) -> PageSpan {
        let word = self.run_word(number).load(Ordering::Relaxed) as usize;
        let start = word / PAGE * PAGE;
        PageSpan::covering_range(start..start + word % PAGE * PAGE)
    }
}

/// What the session sets, in a mapping of its own.
///
/// ```text
///   word 0   the count of runs that were taken from the log
///   word 1   the thread that commits, and its processor
///   word 2   the count of spans that follow, where more pages may be permitted than are written
///   word 3   odd while a write is answered
///   then     the start and the end of each span
/// ```
#[derive(Debug)]
struct SessionWords(OwnedMapping);

impl SessionWords {
    fn new() -> Result<Self, Errno> {
        let words = SESSION_HEADER + 2 * AHEAD_SPANS_MAX;
        OwnedMapping::map_anonymous(words * size_of::<u64>()).map(Self)
    }

    fn word(&self, number: usize) -> &AtomicU64 {
        &self.0.atomic_words(number * size_of::<u64>(), 1)[0]
    }

    fn taken(&self) -> &AtomicU64 {
        self.word(0)
    }

    fn committer(&self) -> &AtomicU64 {
        self.word(1)
    }

    fn answers(&self) -> &AtomicU64 {
        self.word(3)
    }

    /// Waits until the thread has answered what it is answering.
    fn wait_for_answer(&self) {
        let before = self.answers().load(Ordering::SeqCst);
        while before % 2 == 1 && self.answers().load(Ordering::SeqCst) == before {
            thread::sleep(Duration::from_micros(20));
        }
    }

    fn clear_ahead(&self) {
        self.word(2).store(0, Ordering::SeqCst);
        self.wait_for_answer();
    }

    /// Sets the spans: after [`SessionWords::clear_ahead`], so that the thread reads none of them.
    fn set_ahead(&self, spans: &[PageSpan]) {
        let spans = &spans[..spans.len().min(AHEAD_SPANS_MAX)];
        for (number, span) in spans.iter().enumerate() {
            let at = SESSION_HEADER + 2 * number;
            self.word(at).store(span.start() as u64, Ordering::Relaxed);
            self.word(at + 1).store(span.end() as u64, Ordering::Relaxed);
        }
        self.word(2).store(spans.len() as u64, Ordering::SeqCst);
    }

    /// The end of the span with an address.
    fn ahead_end(&self, address: usize) -> Option<usize> {
        let count = self.word(2).load(Ordering::SeqCst) as usize;
        let span = |number: usize| {
            let at = SESSION_HEADER + 2 * number;
            let bound = |at| self.word(at).load(Ordering::Relaxed) as usize;
            bound(at)..bound(at + 1)
        };
        (0..count).map(span).find(|span| span.contains(&address)).map(|span| span.end)
    }
}

/// What both threads have.
#[derive(Debug)]
struct SharedState {
    uffd: Uffd,
    log: RunLog,
    session: SessionWords,
    stop: OwnedFd,
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
            stop: eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?,
        });
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
        self.shared.session.wait_for_answer();
        Ok(())
    }

    /// Sets the spans where more pages may be permitted than are written. The session follows all
    /// pages of each. [`QuietWrites::release_span`] clears them.
    pub(crate) fn set_ahead(&self, spans: &[PageSpan]) {
        if self.permits_ahead {
            self.shared.session.clear_ahead();
            self.shared.session.set_ahead(spans);
        }
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
        // The counter of a new event can't be full.
        let _ = rustix::io::write(&self.shared.stop, &1_u64.to_ne_bytes());
        if let Some(thread) = thread {
            // It can't panic.
            let _ = thread.join();
        }
    }
}

/// The thread. It ends when the session does.
fn serve_writers(shared: &SharedState, block: usize) {
    let mut next = WriteAhead { block, ..WriteAhead::default() };
    let mut processor = FollowedProcessor::new();
    let answers = shared.session.answers();
    loop {
        // Before the message is read: who waits for the end of an answer never misses one.
        answers.fetch_add(1, Ordering::SeqCst);
        let writer = shared.uffd.read_writer();
        if let Some(writer) = writer {
            answer_writer(shared, &mut next, writer.address);
        }
        answers.fetch_add(1, Ordering::SeqCst);
        match writer {
            Some(writer) => {
                let committer = shared.session.committer().load(Ordering::Relaxed);
                processor.follow(writer.thread, committer);
            }
            None if shared.uffd.wait_for_writer(shared.stop.as_fd()) => {}
            None => return,
        }
    }
}

fn answer_writer(shared: &SharedState, next: &mut WriteAhead, address: usize) {
    let page = PageSpan::covering_range(address..address + 1);
    let run = next.choose_run(page, shared.session.ahead_end(address));
    // If it fails, not all of the run is protected here.
    if shared.permit_run(run).is_err() && (run == page || shared.permit_run(page).is_err()) {
        // The span was released meanwhile, which woke the writer; or the writer tries again.
        let _ = shared.uffd.wake_writers(page);
    }
}

/// Chooses how many pages a write makes writable.
#[derive(Debug, Default)]
struct WriteAhead {
    /// The bytes of an aligned block, which no run leaves.
    block: usize,
    /// The address after the last run, and its count of pages.
    end: usize,
    pages: usize,
}

impl WriteAhead {
    /// The run that begins with a page. `end`: where it has to end; `None`: after this page.
    fn choose_run(&mut self, page: PageSpan, end: Option<usize>) -> PageSpan {
        let is_next = page.start() == self.end;
        let pages = if is_next { (self.pages * 2).min(RUN_PAGES_MAX) } else { 1 };
        let block_end = page.start() / self.block * self.block + self.block;
        let end = block_end.min(end.unwrap_or(page.end())).min(page.start() + pages * PAGE);
        (self.end, self.pages) = (end, pages);
        PageSpan::covering_range(page.start()..end)
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

#[cfg(test)]
mod tests {
    use super::*;

    fn pages(first: usize, count: usize) -> PageSpan {
        PageSpan::covering_range(first * PAGE..(first + count) * PAGE)
    }

    #[test]
    fn a_run_doubles_while_pages_are_written_in_order() {
        let mut ahead = WriteAhead { block: 16 * PAGE, ..WriteAhead::default() };
        let end = Some(42 * PAGE);
        let runs = [5, 6, 8, 12, 40, 41, 3].map(|page| ahead.choose_run(pages(page, 1), end));
        let expected = [(5, 1), (6, 2), (8, 4), (12, 4), (40, 1), (41, 1), (3, 1)];
        assert_eq!(runs, expected.map(|(first, count)| pages(first, count)));
        let one = [5, 6, 7].map(|page| ahead.choose_run(pages(page, 1), None).page_count());
        assert_eq!(one, [1; 3]);
    }

    #[test]
    fn runs_go_ahead_where_the_session_permits_it() {
        let words = SessionWords::new().unwrap();
        assert_eq!(words.ahead_end(5 * PAGE), None);
        words.set_ahead(&[pages(2, 8), pages(20, 5)]);
        let ends = [1, 2, 9, 10, 24, 25].map(|page| words.ahead_end(page * PAGE));
        assert_eq!(
            ends,
            [None, Some(10), Some(10), None, Some(25), None]
                .map(|it| it.map(|page: usize| page * PAGE))
        );
        words.set_ahead(&vec![pages(100, 1); 2 * AHEAD_SPANS_MAX]);
        words.clear_ahead();
        assert_eq!(words.ahead_end(100 * PAGE), None);
    }

    #[test]
    fn the_log_reports_that_it_was_full() {
        let log = RunLog::new().unwrap();
        (0..LOG_RUNS).for_each(|page| log.record(pages(page + 1, 1 + page % 512), 0));
        assert!(!log.take_overflow());
        assert_eq!(log.run(700), pages(701, 1 + 700 % 512));
        log.record(pages(7, 1), 0);
        assert!(log.take_overflow() && !log.take_overflow());
        assert_eq!(log.recorded(), LOG_RUNS as u64);
        log.record(pages(9, 2), LOG_RUNS as u64);
        assert_eq!(log.run(LOG_RUNS as u64), pages(9, 2));
    }
}
