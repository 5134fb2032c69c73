//! Save trace: the fault handler of a save, which lets the guest run without losing the contents of
//! memory at the cut.
//!
//! ```text
//!            Arming                     |  Paused   |  Tracing
//!   guest    runs ...................... stops      runs ................................
//!   RAM      being write-protected       |  protected           | then unmapped as well
//!   a fault  note the page as written,   |  copy the memory block to a buffer (once), resume the thread,
//!            resume the vCPU             |  queue (lane, block)
//! ```
//!
//! In the pause, a device that writes to memory makes the save fail: its state would be newer than
//! memory. So a page that is read in the pause is mapped write-protected.
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
//! Where the guest may give memory back, an access to a hole of shared memory is a fault, too. It is
//! answered with a page of zeros: while arming, such a page counts as written; after the cut, its
//! block is copied and checked before ([`crate::discards`]).
//!
//! In RAM of huge pages a fault stands for all pages of its huge page, as all of them become writable
//! with the answer: while arming, all count as written; after the cut, all of their blocks are copied
//! first.
//!
//! A block that the guest touches first when the sweep has copied it already is stored a second time, where
//! the touch before it was stored, and that place counts: so what the guest uses is contiguous in the image, in
//! the order of its use, however early the sweep came. Its content is still that of the cut, because
//! no page of a block is released before its first touch.
//!
//! The cut, too, is made under that lock: no page can become writable between the last protection
//! and the cut.

use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, SystemTime};

use firn_memory::{FaultKind, GuestMemory, MemoryEvent, PageFaults, abort_on_panic, scheduling};
use firn_types::{Block, BlockSize, Page, ThreadId};

use crate::discards::DiscardCheck;
use crate::duty_cycle::DutyCycle;
use crate::error::SaveError;
use crate::lane::{FaultAttribution, LaneAttributor, PackingLane};
use crate::ledger::{BlockClaim, CopyLedger};
use crate::pipeline::{PipelineIntake, RawBlock};
use crate::report::FaultCounts;
use crate::touches::FirstTouches;
use crate::worker::{KernelWorkers, is_worker};
use crate::written::WrittenSet;

/// How long the handler sleeps when there are no faults before it checks whether it should end.
const POLL_INTERVAL: Duration = Duration::from_millis(20);

/// The blocks that are stored a second time: the maximum, and the maximum share of all blocks (one in so
/// many).
const REPEATED_MAX: u32 = 16_384;
const REPEATED_SHARE: u32 = 8;

const ARMING: u8 = 0;
const PAUSED: u8 = 1;
const TRACING: u8 = 2;

/// The state that the fault handler shares with the thread that controls the save.
pub(crate) struct SaveTrace {
    pub(crate) memory: Arc<GuestMemory>,
    pub(crate) faults: PageFaults,
    pub(crate) ledger: CopyLedger,
    pub(crate) block_size: BlockSize,
    /// For a guest that may give memory back.
    pub(crate) discards: Option<Arc<DiscardCheck>>,
    written: Mutex<WrittenSet>,
    touches: Mutex<FirstTouches>,
    phase: AtomicU8,
    ended: AtomicBool,
    releasing: AtomicBool,
    duty_cycle: Arc<DutyCycle>,
    /// When a thread of the hypervisor that is no vCPU first wrote to memory after the cut, since
    /// 1970.
    written_us: AtomicU64,
    /// How many more blocks may be stored a second time.
    repeats_left: AtomicU32,
}

impl SaveTrace {
    /// Shared state over a registered range. Nothing is protected yet.
    pub(crate) fn new(
        memory: Arc<GuestMemory>,
        faults: PageFaults,
        block_size: BlockSize,
        discards: Option<Arc<DiscardCheck>>,
        duty_cycle: Arc<DutyCycle>,
    ) -> Self {
        let blocks = block_size.blocks_in(memory.region_map().total_pages());
        Self {
            memory,
            faults,
            ledger: CopyLedger::new(blocks),
            block_size,
            discards,
            written: Mutex::default(),
            touches: Mutex::new(FirstTouches::new(blocks)),
            phase: AtomicU8::new(ARMING),
            ended: AtomicBool::new(false),
            releasing: AtomicBool::new(false),
            duty_cycle,
            written_us: AtomicU64::new(u64::MAX),
            repeats_left: AtomicU32::new(0),
        }
    }

    /// Permits blocks to be stored a second time. Not for guests that may give memory back: a block
    /// may have lost its content since the sweep copied it.
    pub(crate) fn permit_repeats(&self) {
        if self.discards.is_none() && !self.memory.has_huge_pages() {
            let blocks = self.ledger.block_count() / REPEATED_SHARE;
            self.repeats_left.store(blocks.min(REPEATED_MAX), Ordering::Relaxed);
        }
    }

    /// Whether one more block may be stored a second time.
    fn claim_repeat(&self) -> bool {
        let one_less = |left: u32| left.checked_sub(1);
        self.repeats_left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, one_less).is_ok()
    }

    /// Locks the written set: while arming, no page becomes writable while the guard lives.
    pub(crate) fn lock_written(&self) -> MutexGuard<'_, WrittenSet> {
        self.written.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The blocks that the guest touches first after the cut.
    pub(crate) fn lock_touches(&self) -> MutexGuard<'_, FirstTouches> {
        self.touches.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// From here on first touches are copied. The vCPUs must be stopped, and all RAM protected.
    pub(crate) fn begin_tracing(&self) {
        self.phase.store(PAUSED, Ordering::Release);
    }

    /// The vCPUs run again.
    pub(crate) fn end_pause(&self) {
        self.phase.store(TRACING, Ordering::Release);
    }

    fn is_paused(&self) -> bool {
        self.phase.load(Ordering::Acquire) == PAUSED
    }

    /// Every block is saved, or the save has failed, and the range is about to be unregistered.
    /// That resumes a thread that still waits, and answering it may fail.
    pub(crate) fn begin_release(&self) {
        self.releasing.store(true, Ordering::Release);
    }

    fn is_releasing(&self) -> bool {
        self.releasing.load(Ordering::Acquire)
    }

    /// Time since the save began.
    pub(crate) fn now(&self) -> Duration {
        self.duty_cycle.now()
    }

    /// The clock of the save, and the pauses of background work.
    pub(crate) fn duty_cycle(&self) -> &DutyCycle {
        &self.duty_cycle
    }

    /// Whether a thread that is no vCPU wrote to memory after the cut and before `then` (since
    /// 1970). Such a thread waits until the handler has seen its fault. So no write of the
    /// hypervisor's main thread is missed, which saves devices and starts the vCPUs after that.
    pub(crate) fn was_written_before(&self, then: Duration) -> bool {
        u128::from(self.written_us.load(Ordering::Acquire)) < then.as_micros()
    }

    /// A thread wrote to memory after the cut. vCPUs can't write before they are started. A kernel
    /// worker does not write either: it brings in a page for a vCPU, however late.
    fn record_write(&self, by: ThreadId) {
        if self.written_us.load(Ordering::Relaxed) == u64::MAX && !is_worker(by) {
            let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
            self.written_us.store(now.as_micros() as u64, Ordering::Release);
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
        lane: PackingLane,
        intake: &PipelineIntake,
    ) -> Result<(), SaveError> {
        let copied = self.copy_block(block, intake);
        self.ledger.mark_saved(block);
        if let Some(bytes) = copied? {
            intake.submit_block(RawBlock { lane, block, bytes, again: false });
        }
        Ok(())
    }

    fn copy_block(
        &self,
        block: Block,
        intake: &PipelineIntake,
    ) -> Result<Option<Box<[u8]>>, SaveError> {
        let Some(mut bytes) = intake.take_buffer() else { return Ok(None) };
        self.memory.read_pages(self.block_size.first_page(block), &mut bytes)?;
        if let Some(discards) = &self.discards {
            discards.check_copy(block, self.block_size.pages_of(block))?;
        }
        Ok(Some(bytes))
    }

    /// Whether contents of memory at the cut were lost. There will be no image.
    pub(crate) fn has_lost(&self) -> bool {
        self.discards.as_ref().is_some_and(|discards| discards.has_lost())
    }

    /// The pages that become writable together with this one: its memory block, or its huge page.
    fn released_pages(&self, page: Page) -> Range<Page> {
        let block = || self.block_size.pages_of(self.block_size.block_of(page));
        self.memory.huge_page_of(page).unwrap_or_else(block)
    }

    /// An error if contents of memory at the cut were lost.
    pub(crate) fn check_none_lost(&self) -> Result<(), SaveError> {
        self.discards.as_ref().map_or(Ok(()), |discards| discards.check_none_lost())
    }
}

/// The faults of the guest in a save.
#[derive(Debug, Default)]
pub(crate) struct FaultLog {
    /// The blocks that the guest first touched after the cut.
    pub(crate) touches: FirstTouches,
    pub(crate) counts: FaultCounts,
}

/// The fault-handling thread.
pub(crate) struct TraceHandler {
    trace: Arc<SaveTrace>,
    thread: JoinHandle<Result<FaultCounts, SaveError>>,
}

impl TraceHandler {
    /// Starts answering faults. Must run before the range is registered.
    pub(crate) fn start_thread(
        trace: Arc<SaveTrace>,
        lanes: LaneAttributor,
        workers: KernelWorkers,
        intake: PipelineIntake,
    ) -> Self {
        let worker = TraceFaultLoop {
            trace: Arc::clone(&trace),
            lanes,
            workers,
            intake,
            counts: FaultCounts::default(),
        };
        Self { trace, thread: thread::spawn(move || abort_on_panic(|| worker.answer_faults())) }
    }

    /// Ends the thread once nothing can fault any more (the range is unregistered).
    pub(crate) fn join_thread(self) -> Result<FaultCounts, SaveError> {
        self.trace.ended.store(true, Ordering::Release);
        match self.thread.join() {
            Ok(counts) => counts,
            Err(panic) => std::panic::resume_unwind(panic),
        }
    }
}

struct TraceFaultLoop {
    trace: Arc<SaveTrace>,
    lanes: LaneAttributor,
    workers: KernelWorkers,
    intake: PipelineIntake,
    counts: FaultCounts,
}

impl TraceFaultLoop {
    fn answer_faults(mut self) -> Result<FaultCounts, SaveError> {
        let mut events = Vec::with_capacity(64);
        // Where the process may not use real-time priority, vCPUs wait a little longer.
        let _ = scheduling::set_realtime();
        while !self.trace.ended.load(Ordering::Acquire) {
            events.clear();
            self.trace.faults.wait_for_events(&mut events, POLL_INTERVAL)?;
            // Threads that waited when these events were read may have been resumed since, along
            // with others.
            let was_arming = self.trace.is_arming();
            for event in &events {
                self.handle_event(event, was_arming)?;
            }
        }
        Ok(self.counts)
    }

    fn handle_event(&mut self, event: &MemoryEvent, was_arming: bool) -> Result<(), SaveError> {
        let &MemoryEvent::Fault { page, tid, kind, write } = event else { return Ok(()) };
        if self.trace.is_arming() && self.record_written(page, kind, write)? {
            return Ok(());
        }
        let how = self.attribute_fault(page, tid);
        if how.1 != FaultAttribution::Thread && write && !was_arming {
            self.trace.record_write(tid);
        }
        let saved = self.save_blocks(page, how);
        let released = match self.trace.is_paused() && !write {
            true => self.resume_reader(page, kind),
            false => self.release_pages(page, kind),
        };
        match released {
            Err(_) if self.trace.is_releasing() => saved,
            released => released.and(saved),
        }
    }

    /// While arming: allows the access, and notes the page if it is written. `false` if the cut was
    /// made in the meantime.
    fn record_written(
        &mut self,
        page: Page,
        kind: FaultKind,
        write: bool,
    ) -> Result<bool, SaveError> {
        let trace = Arc::clone(&self.trace);
        let mut written = trace.lock_written();
        if !trace.is_arming() {
            return Ok(false);
        }
        self.counts.while_arming += 1;
        // A kernel that can't map a page protected (before 6.4) makes it writable: then it counts
        // as written.
        let stays_protected = trace.faults.features().resume_protected;
        if write || kind != FaultKind::Minor || !stays_protected {
            if let Some(discards) = trace.discards.as_ref().filter(|_| kind == FaultKind::Missing) {
                discards.record_filled(page);
            }
            written.add_pages(trace.released_pages(page));
            self.release_pages(page, kind)?;
        } else {
            trace.faults.resume_minor(trace.memory.entry_of(page), true)?;
        }
        Ok(true)
    }

    /// The lane of a touch, and how it was attributed.
    fn attribute_fault(&mut self, page: Page, tid: ThreadId) -> (PackingLane, FaultAttribution) {
        let block = self.trace.block_size.block_of(page);
        let workers = &mut self.workers;
        self.lanes.attribute_fault(tid, block, |worker| workers.vcpu_of(worker))
    }

    /// After the cut: ensures that all blocks are copied that can change once the thread is resumed.
    fn save_blocks(
        &mut self,
        page: Page,
        (lane, how): (PackingLane, FaultAttribution),
    ) -> Result<(), SaveError> {
        firn_fault::pass_point("save.fault");
        self.counts.count_fault(how);
        let (size, pages) = (self.trace.block_size, self.trace.released_pages(page));
        let blocks = size.block_of(pages.start).0..size.blocks_in(pages.end.0);
        blocks.map(Block).try_for_each(|block| self.save_block(block, lane))
    }

    fn save_block(&self, block: Block, lane: PackingLane) -> Result<(), SaveError> {
        let is_first = self.trace.lock_touches().record_touch(block, self.trace.now());
        match self.trace.ledger.claim_block(block) {
            BlockClaim::Mine if self.intake.has_failed() || self.trace.has_lost() => {
                self.trace.ledger.mark_saved(block);
            }
            BlockClaim::Mine => self.trace.copy_claimed(block, lane, &self.intake)?,
            BlockClaim::Saved if is_first => self.repeat_block(block, lane)?,
            BlockClaim::Saved | BlockClaim::Empty => {}
        }
        Ok(())
    }

    /// Stores a block that the sweep has copied a second time, beside what was touched just before.
    fn repeat_block(&self, block: Block, lane: PackingLane) -> Result<(), SaveError> {
        let may_repeat = self.intake.has_room() && !self.intake.has_failed();
        if may_repeat && self.trace.claim_repeat() {
            if let Some(bytes) = self.trace.copy_block(block, &self.intake)? {
                self.intake.submit_block(RawBlock { lane, block, bytes, again: true });
            }
        }
        Ok(())
    }

    /// Resumes the faulting thread, and ends the trace of its block or huge page.
    fn release_pages(&self, page: Page, kind: FaultKind) -> Result<(), SaveError> {
        let pages = self.trace.released_pages(page);
        match kind {
            FaultKind::WriteProtect => self.trace.faults.unprotect_pages(pages)?,
            FaultKind::Minor => self.map_pages(page, pages)?,
            FaultKind::Missing => self.fill_hole(self.trace.memory.entry_of(page))?,
        }
        Ok(())
    }

    /// In the pause: resumes a thread that reads, with the page protected.
    fn resume_reader(&self, page: Page, kind: FaultKind) -> Result<(), SaveError> {
        let resume = || self.trace.faults.resume_reader(page, kind);
        match self.trace.discards.as_ref().filter(|_| kind == FaultKind::Missing) {
            Some(discards) => discards.count_filled(resume)?,
            None => resume()?,
        };
        Ok(())
    }

    fn fill_hole(&self, pages: Range<Page>) -> Result<(), SaveError> {
        let fill = || self.trace.faults.install_zeros(pages);
        match &self.trace.discards {
            Some(discards) => discards.count_filled(fill)?,
            None => fill()?,
        };
        Ok(())
    }

    /// Maps the faulting page, and its neighbours in the block where they are backed (a hole can't
    /// be mapped). A huge page is mapped as a whole.
    fn map_pages(&self, page: Page, pages: Range<Page>) -> Result<(), SaveError> {
        let (faults, entry) = (&self.trace.faults, self.trace.memory.entry_of(page));
        faults.resume_minor(entry.clone(), false)?;
        for near in Page::iter_range(pages).filter(|near| !entry.contains(near)) {
            drop(faults.resume_minor(near..Page(near.0 + 1), false));
        }
        Ok(())
    }
}
