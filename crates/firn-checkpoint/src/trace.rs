//! Save trace: the fault handler of a save, which lets the guest run without losing the contents of
//! memory at the cut.
//!
//! ```text
//!            Arming                     |  Tracing
//!   guest    runs ...................... pause .. runs ................................
//!   RAM      being write-protected       |  protected, then unmapped as well
//!   a fault  note the page as written,   |  copy the memory block to a buffer (once), resume the vCPU,
//!            resume the vCPU             |  queue (lane, block)
//! ```
//!
//! While arming, noting a page and making it writable are one step under a lock, and so is the
//! emptying of the written set; protecting is not, or vCPUs would wait for it. Both of the two
//! possible orders are correct:
//!
//! ```text
//!   note P, make it writable | empty the set | protect P       P is protected
//!   empty the set | note P, make it writable | protect P       P is protected, and in the set: protected once more
//! ```
//!
//! The cut, too, is made under that lock: no page can become writable between the last protection
//! and the cut.

use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, SystemTime};

use firn_memory::{Event, FaultKind, GuestMemory, PageFaults, urgency};
use firn_types::{Block, BlockSize, Page, Tid};

use crate::lane::{Attribution, Lane, Lanes};
use crate::ledger::{Claim, Ledger};
use crate::pipeline::{Intake, RawBlock};
use crate::report::FaultCounts;
use crate::save::SaveError;
use crate::touches::Touches;
use crate::turns::Turns;
use crate::worker::{Workers, is_worker};
use crate::written::WrittenSet;

/// How long the handler sleeps when there are no faults before it checks whether it should end.
const WAIT: Duration = Duration::from_millis(20);

const ARMING: u8 = 0;
const TRACING: u8 = 1;

/// The state that the fault handler shares with the thread that controls the save.
pub(crate) struct Trace {
    pub(crate) memory: Arc<GuestMemory>,
    pub(crate) faults: PageFaults,
    pub(crate) ledger: Ledger,
    pub(crate) block_size: BlockSize,
    written: Mutex<WrittenSet>,
    touches: Mutex<Touches>,
    phase: AtomicU8,
    ended: AtomicBool,
    letting_go: AtomicBool,
    turns: Arc<Turns>,
    /// When a thread of the hypervisor that is no vCPU first wrote to memory after the cut, since
    /// 1970.
    touched_us: AtomicU64,
}

impl Trace {
    /// Shared state over a registered range. Nothing is protected yet.
    pub(crate) fn new(
        memory: Arc<GuestMemory>,
        faults: PageFaults,
        block_size: BlockSize,
        turns: Arc<Turns>,
    ) -> Self {
        let blocks = block_size.blocks_in(memory.map().total_pages());
        Self {
            memory,
            faults,
            ledger: Ledger::new(blocks),
            block_size,
            written: Mutex::default(),
            touches: Mutex::new(Touches::new(blocks)),
            phase: AtomicU8::new(ARMING),
            ended: AtomicBool::new(false),
            letting_go: AtomicBool::new(false),
            turns,
            touched_us: AtomicU64::new(u64::MAX),
        }
    }

    /// Locks the written set: while arming, no page becomes writable while the guard lives.
    pub(crate) fn written(&self) -> MutexGuard<'_, WrittenSet> {
        self.written.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The blocks that the guest touches first after the cut.
    pub(crate) fn touches(&self) -> MutexGuard<'_, Touches> {
        self.touches.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// From here on first touches are copied. The vCPUs must be stopped, and all RAM protected.
    pub(crate) fn cut(&self) {
        self.phase.store(TRACING, Ordering::Release);
    }

    /// Every block is saved, or the save has failed, and the range is about to be unregistered.
    /// That resumes a thread that still waits, and answering it may fail.
    pub(crate) fn let_go(&self) {
        self.letting_go.store(true, Ordering::Release);
    }

    fn is_letting_go(&self) -> bool {
        self.letting_go.load(Ordering::Acquire)
    }

    /// Time since the save began.
    pub(crate) fn now(&self) -> Duration {
        self.turns.now()
    }

    /// The clock of the save, and the pauses of background work.
    pub(crate) fn turns(&self) -> &Turns {
        &self.turns
    }

    /// Whether a thread that is no vCPU wrote to memory after the cut and before `then` (since
    /// 1970). Such a thread waits until the handler has seen its fault. So no write of the
    /// hypervisor's main thread is missed, which saves devices and starts the vCPUs after that.
    pub(crate) fn was_touched_before(&self, then: Duration) -> bool {
        u128::from(self.touched_us.load(Ordering::Acquire)) < then.as_micros()
    }

    /// A thread wrote to memory after the cut. vCPUs can't write before they are started. A kernel
    /// worker does not write either: it brings in a page for a vCPU, however late.
    fn touched(&self, by: Tid) {
        if self.touched_us.load(Ordering::Relaxed) == u64::MAX && !is_worker(by) {
            let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
            self.touched_us.store(now.as_micros() as u64, Ordering::Release);
        }
    }

    fn is_arming(&self) -> bool {
        self.phase.load(Ordering::Acquire) == ARMING
    }

    /// Copies a block that the caller has claimed, and marks it saved. After an error there will be
    /// no image, so the block counts as saved all the same: no thread may wait for it.
    pub(crate) fn copy_claimed(
        &self,
        block: Block,
        lane: Lane,
        intake: &Intake,
    ) -> Result<(), SaveError> {
        let copied = self.copy(block, intake);
        self.ledger.copied(block);
        if let Some(bytes) = copied? {
            intake.submit(RawBlock { lane, block, bytes, again: false });
        }
        Ok(())
    }

    fn copy(&self, block: Block, intake: &Intake) -> Result<Option<Box<[u8]>>, SaveError> {
        let Some(mut bytes) = intake.buffer() else { return Ok(None) };
        self.memory.read(self.block_size.first_page(block), &mut bytes)?;
        Ok(Some(bytes))
    }
}

/// The faults of the guest in a save.
#[derive(Debug, Default)]
pub(crate) struct FaultLog {
    /// The blocks that the guest first touched after the cut.
    pub(crate) touches: Touches,
    pub(crate) counts: FaultCounts,
}

/// The fault-handling thread.
pub(crate) struct Handler {
    trace: Arc<Trace>,
    thread: JoinHandle<Result<FaultCounts, SaveError>>,
}

impl Handler {
    /// Starts answering faults. Must run before the range is registered.
    pub(crate) fn start(trace: Arc<Trace>, lanes: Lanes, workers: Workers, intake: Intake) -> Self {
        let worker = Worker {
            trace: Arc::clone(&trace),
            lanes,
            workers,
            intake,
            counts: FaultCounts::default(),
        };
        Self { trace, thread: thread::spawn(move || die_loudly(|| worker.run())) }
    }

    /// Ends the thread once nothing can fault any more (the range is unregistered).
    pub(crate) fn finish(self) -> Result<FaultCounts, SaveError> {
        self.trace.ended.store(true, Ordering::Release);
        match self.thread.join() {
            Ok(counts) => counts,
            Err(panic) => std::panic::resume_unwind(panic),
        }
    }
}

/// Runs the handler; if it panics, ends the process at once. vCPUs must never wait for a thread
/// that is gone: the process that restarts this one takes the descriptor back and resumes them.
fn die_loudly<T>(run: impl FnOnce() -> T) -> T {
    match std::panic::catch_unwind(std::panic::AssertUnwindSafe(run)) {
        Ok(result) => result,
        Err(_) => std::process::abort(),
    }
}

struct Worker {
    trace: Arc<Trace>,
    lanes: Lanes,
    workers: Workers,
    intake: Intake,
    counts: FaultCounts,
}

impl Worker {
    fn run(mut self) -> Result<FaultCounts, SaveError> {
        let mut events = Vec::with_capacity(64);
        // Where the process may not use real-time priority, vCPUs wait a little longer.
        let _ = urgency::come_first();
        while !self.trace.ended.load(Ordering::Acquire) {
            events.clear();
            self.trace.faults.wait(&mut events, WAIT)?;
            // Threads that waited when these events were read may have been resumed since, along
            // with others.
            let was_arming = self.trace.is_arming();
            for event in &events {
                self.handle(event, was_arming)?;
            }
        }
        Ok(self.counts)
    }

    fn handle(&mut self, event: &Event, was_arming: bool) -> Result<(), SaveError> {
        let &Event::Fault { page, tid, kind, write } = event else { return Ok(()) };
        self.trace.turns().fault();
        if self.trace.is_arming() && self.note_written(page, kind, write)? {
            return Ok(());
        }
        let how = self.attribute(page, tid);
        if how.1 == Attribution::None && write && !was_arming {
            self.trace.touched(tid);
        }
        let saved = self.save_first(page, how);
        match self.release(page, kind) {
            Err(_) if self.trace.is_letting_go() => saved,
            released => released.and(saved),
        }
    }

    /// While arming: allows the access, and notes the page if it is written. `false` if the cut was
    /// made in the meantime.
    fn note_written(
        &mut self,
        page: Page,
        kind: FaultKind,
        write: bool,
    ) -> Result<bool, SaveError> {
        let trace = Arc::clone(&self.trace);
        let mut written = trace.written();
        if !trace.is_arming() {
            return Ok(false);
        }
        self.counts.while_arming += 1;
        // A kernel that can't map a page protected (before 6.4) makes it writable: then it counts
        // as written.
        let stays_protected = trace.faults.features().resume_protected;
        if write || kind == FaultKind::WriteProtect || !stays_protected {
            written.note(trace.block_size.pages_of(trace.block_size.block_of(page)));
            self.release(page, kind)?;
        } else {
            trace.faults.resume_minor(page..Page(page.0 + 1), true)?;
        }
        Ok(true)
    }

    /// The lane of a touch, and how it was attributed.
    fn attribute(&mut self, page: Page, tid: Tid) -> (Lane, Attribution) {
        let block = self.trace.block_size.block_of(page);
        let workers = &mut self.workers;
        self.lanes.attribute(tid, block, |worker| workers.vcpu_of(worker))
    }

    /// After the cut: ensures that the block is copied before it can change.
    fn save_first(
        &mut self,
        page: Page,
        (lane, how): (Lane, Attribution),
    ) -> Result<(), SaveError> {
        let block = self.trace.block_size.block_of(page);
        firn_fault::point("save.fault");
        self.counts.count(how);
        self.trace.touches().note(block, self.trace.now());
        match self.trace.ledger.claim(block) {
            Claim::Mine if self.intake.failed() => self.trace.ledger.copied(block),
            Claim::Mine => self.trace.copy_claimed(block, lane, &self.intake)?,
            Claim::Saved => {}
        }
        Ok(())
    }

    /// Resumes the faulting thread, and ends the trace of the whole block.
    fn release(&self, page: Page, kind: FaultKind) -> Result<(), SaveError> {
        let block = self.trace.block_size.block_of(page);
        let pages = self.trace.block_size.pages_of(block);
        match kind {
            FaultKind::WriteProtect => self.trace.faults.unprotect(pages)?,
            FaultKind::Minor | FaultKind::Missing => self.map_block(page, pages)?,
        }
        Ok(())
    }

    /// Maps the faulting page, and its neighbours in the block where they are backed (a hole can't
    /// be mapped).
    fn map_block(&self, page: Page, pages: std::ops::Range<Page>) -> Result<(), SaveError> {
        let faults = &self.trace.faults;
        faults.resume_minor(page..Page(page.0 + 1), false)?;
        for near in Page::each(pages).filter(|&near| near != page) {
            drop(faults.resume_minor(near..Page(near.0 + 1), false));
        }
        Ok(())
    }
}
