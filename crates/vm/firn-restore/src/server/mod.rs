//! The page server: decides which units to read and which pages to install, and in which order. It
//! does no I/O.
//!
//! Threads report events to it and perform the actions that it returns. A test simulates the
//! threads from a seed. All methods take a few hundred nanoseconds, so that one lock around the
//! server is enough: no system call is made under it.
//!
//! # A read unit
//!
//! A unit is a locality block; in a lazy restore, a single memory block (see [`ReadPlan`]).
//!
//! ```text
//!             fault                   missed               taken                 arrived
//!   Stored ---------> Trying ----------------> Asked --------------> Reading ------------> Memory
//!      |                 |                       ^                      ^  |                 |  |
//!      |                 |  fetched (page cache) |  lost (page cache)   |  | failed          |  | all pages
//!      |                 +-----------------------|----------------------|--|---------------->|  | settled
//!      |                                         +----------------------|--|-----------------+  v
//!      +----------------------------------------------------------------+  v                   Done
//!               taken: prefetch, background fill                        Failed ---> Reading, after a pause
//! ```
//!
//! *Trying*: the fault handler checks whether the page cache has the unit; it never waits for
//! storage itself. *Asked*: a reader thread will read the unit. *Reading*: a reader thread reads
//! it. Nothing is read twice: a fault on a unit that is being read waits for that read, a fault on
//! a unit in memory is answered from there, and prefetching takes only *Stored* units. *Failed*:
//! the unit is read again after a pause, and a vCPU that touches one of its pages waits for that. A
//! read that passes over a failed unit on its way to other units brings it in as well. The same
//! holds for a single memory block whose stored bytes turn out to be damaged: the file may be
//! repaired (`retries`).
//!
//! # A memory block
//!
//! Its pages are *settled* one by one: installed, or given back by the guest. Of a unit in memory,
//! the blocks that faulted are installed first; workers install the other blocks in stored order.
//! If the guest faults on a block that a worker has just taken, the fault handler installs it as
//! well, because the worker thread may not be running: the kernel installs pages atomically and
//! does not change a page that is present.
//!
//! # Storage and guest
//!
//! With [`PageServerRules::is_adaptive`] the server adapts to both (`cost`, `prefetch`,
//! `divergence`):
//!
//! ```text
//!                      low latency: flash             high latency: a disk
//!   demand reads       the unit                       as many units as can be read in the time of one access
//!   prefetches         in the order of first access;  all in stored order, gaps read through,
//!                      while the guest waits for      whatever the guest does, which may not
//!                      storage, short, half the time  even run before it is there; or everything, in stored order
//!   background fill    when the guest waits           between the guest's own reads, if all can be there soon, and
//!                      seldom for storage             at once when it has waited for long; else as on flash
//! ```
//!
//! With [`PageServerRules::is_fill_late`] the fill begins when the guest is responsive, or has waited as
//! long as the fill takes (`fill_start`), and nothing is read beside what is requested or expected.
//!
//! # Pages given back
//!
//! A page the guest gives back (balloon, free-page reporting) is settled from that moment and zero
//! when touched again. An install that was decided before must not restore the old contents: its
//! thread compares [`BlockInstall::version`] right before it installs.

use std::collections::VecDeque;
use std::ops::Range;
use std::time::Duration;

use firn_types::{Block, BlockSize, Page};

mod actions;
mod cost;
mod divergence;
mod fill_pace;
mod fill_start;
mod fill_throttle;
mod high_latency;
mod install_throttle;
mod plan;
mod prefetch;
mod progress;
mod reading;
mod retries;
#[cfg(test)]
mod retry_tests;
mod sequence;
mod settled;
#[cfg(test)]
mod simulation;
mod units;

pub use actions::{
    BlockInstall, FaultAnswer, InstallWork, ReadDecision, ReadReason, RestoreCounts, ThreadWakeups,
    UnitRead, UnitSource,
};
pub(crate) use cost::StorageCost;
pub use fill_throttle::PageServerRules;
pub(crate) use high_latency::{PrefetchRequests, expected_misses, is_working_set_complete};
pub(crate) use install_throttle::FAULT_PAUSE_MIN;
pub use plan::{ReadPlan, ReadUnit};
pub(crate) use sequence::{CoalescingRules, order_requests};
pub use settled::{PageMask, SettledPages};

use divergence::DivergenceDetector;
use fill_start::FillStart;
use fill_throttle::FillThrottle;
use install_throttle::InstallThrottle;
use prefetch::PrefetchQueue;
use retries::RetrySchedule;
use units::{UnitState, UnitTable};

/// Maximum number of zero pages installed by one fault: neighbours in an aligned run of this many
/// pages.
const ZERO_RUN: u32 = 16;

/// A fault on a unit that is being read.
#[derive(Clone, Copy, Debug)]
struct WaitingFault {
    unit: ReadUnit,
    block: Block,
    page: Page,
}

/// The state of one restore. `B` is a handle to the bytes of a unit in memory.
#[derive(Debug)]
pub struct PageServer<B> {
    block_size: BlockSize,
    plan: ReadPlan,
    rules: PageServerRules,
    settled: SettledPages,
    units: UnitTable<B>,
    taken: Vec<u64>,
    cost: StorageCost,
    fill_start: FillStart,
    fill_throttle: FillThrottle,
    install_throttle: InstallThrottle,
    asked: VecDeque<ReadUnit>,
    reads_on_demand: u32,
    waiting: Vec<WaitingFault>,
    urgent: VecDeque<WaitingFault>,
    ready: VecDeque<ReadUnit>,
    withheld: Vec<ReadUnit>,
    retries: RetrySchedule,
    /// Memory blocks that were prefetched and are installed; a block may be listed more than once.
    prefetched: Vec<Block>,
    prefetch: PrefetchQueue,
    divergence: DivergenceDetector,
    fill_from: u32,
    has_read_all: bool,
    /// The sum of the times of all reads that the guest waited for.
    read_on_demand_for: Duration,
    wants_room: bool,
    version: u32,
    missing_pages: u32,
    counts: RestoreCounts,
}

impl<B: Clone> PageServer<B> {
    /// A server for the pages that `settled` does not contain.
    pub fn new(
        block_size: BlockSize,
        plan: ReadPlan,
        settled: SettledPages,
        rules: PageServerRules,
        now: Duration,
    ) -> Self {
        let missing_in = |unit| {
            let blocks = plan.members(ReadUnit(unit)).iter();
            blocks.filter(|&&block| !settled.missing_in(block).is_empty()).count() as u32
        };
        let units = UnitTable::new((0..plan.unit_count()).map(missing_in).collect());
        let missing_pages = plan.missing_pages(&settled);
        Self {
            block_size,
            taken: vec![0; (plan.block_count() as usize).div_ceil(64)],
            plan,
            rules,
            settled,
            units,
            cost: StorageCost::new(rules.unit_bytes, rules.known_latency),
            fill_start: FillStart::with_delay(rules.fill_delay),
            fill_throttle: FillThrottle::new(now),
            install_throttle: InstallThrottle::default(),
            asked: VecDeque::with_capacity(64),
            reads_on_demand: 0,
            waiting: Vec::with_capacity(64),
            urgent: VecDeque::with_capacity(64),
            ready: VecDeque::with_capacity(1024),
            withheld: Vec::new(),
            retries: RetrySchedule::default(),
            prefetched: Vec::new(),
            prefetch: PrefetchQueue::empty(now),
            divergence: DivergenceDetector::default(),
            fill_from: 0,
            has_read_all: false,
            read_on_demand_for: Duration::ZERO,
            wants_room: false,
            version: 0,
            missing_pages,
            counts: RestoreCounts::default(),
        }
    }

    /// The counts of this restore until now.
    pub fn counts(&self) -> &RestoreCounts {
        &self.counts
    }

    /// Counts `pages` pages that were installed before this server was made. They belong to these
    /// memory blocks, some of which may still have missing pages.
    pub fn count_prefilled(&mut self, pages: u64, blocks: &[Block]) {
        self.counts.ahead_pages += pages;
        let complete = |block: &&Block| self.settled.missing_in(**block).is_empty();
        self.prefetched = blocks.iter().filter(complete).copied().collect();
    }

    /// Pages that the guest was expected to touch, as runs: the first page and the number of pages.
    pub fn prefetched_runs(&self) -> Vec<(u32, u32)> {
        let mut blocks = self.prefetched.clone();
        blocks.sort_unstable();
        blocks.dedup();
        let mut runs: Vec<(u32, u32)> = Vec::new();
        for pages in blocks.into_iter().map(|block| self.block_size.pages_of(block)) {
            let len = pages.end.0 - pages.start.0;
            match runs.last_mut() {
                Some((first, count)) if *first + *count == pages.start.0 => *count += len,
                _ => runs.push((pages.start.0, len)),
            }
        }
        runs
    }

    /// The settled pages.
    pub fn settled_pages(&mut self) -> &mut SettledPages {
        &mut self.settled
    }

    /// Pages in the image that are not settled.
    pub fn missing_pages(&self) -> u32 {
        self.missing_pages
    }

    /// The units that hold these blocks, in the order in which they are first mentioned.
    pub fn units_of(&self, blocks: &[Block]) -> Vec<ReadUnit> {
        let mut seen = vec![false; self.plan.unit_count() as usize];
        let units = blocks.iter().filter_map(|&block| self.plan.unit_of(block));
        units.filter(|unit| !std::mem::replace(&mut seen[unit.index()], true)).collect()
    }

    /// Changes whenever pages are given back.
    pub fn version(&self) -> u32 {
        self.version
    }

    /// The pages of a block that may still be installed.
    pub fn missing_in(&self, block: Block) -> PageMask {
        self.settled.missing_in(block)
    }

    /// Whether everything was prefetched, expected or not: that the guest did not wait for a page
    /// means nothing then.
    pub fn has_read_all(&self) -> bool {
        self.has_read_all
    }

    /// The storage latency, if the reads of this restore have shown that it is high.
    pub fn found_latency(&self) -> Option<Duration> {
        self.cost.found_latency()
    }

    /// Whether nothing in the image is missing in memory any more.
    pub fn is_finished(&self) -> bool {
        self.units.unfinished_count() == 0
    }

    /// Decides how to answer a vCPU that faults on a page.
    pub fn answer_fault(&mut self, now: Duration, page: Page) -> FaultAnswer<B> {
        self.fill_throttle.record_fault(now);
        self.counts.faults += 1;
        if self.settled.contains(page) {
            self.counts.late_faults += 1;
            return FaultAnswer::AlreadySettled(page);
        }
        let block = self.block_size.block_of(page);
        if self.retries.request_page(block, page) {
            return FaultAnswer::Wait;
        }
        let Some(unit) = self.plan.unit_of(block) else {
            self.counts.zero_faults += 1;
            return FaultAnswer::Zero(self.zeros_around(page));
        };
        self.install_throttle.record_fault(now);
        match self.units.state_of(unit) {
            UnitState::Stored => {
                self.start_unit(unit, UnitState::Trying);
                let install = self.start_install(unit, block, page, UnitSource::PageCache);
                match self.rules.is_adaptive && self.cost.is_high_latency() {
                    true => FaultAnswer::RequestRead(install),
                    false => FaultAnswer::TryPageCache(install),
                }
            }
            UnitState::Memory { source, why, .. } => {
                let (source, why) = (source.clone(), *why);
                self.count_use(why);
                self.install_throttle.record_late_fault(now);
                FaultAnswer::Install(self.start_install(unit, block, page, source))
            }
            UnitState::Trying | UnitState::Asked | UnitState::Reading | UnitState::Failed => {
                self.counts.joined_faults += 1;
                self.waiting.push(WaitingFault { unit, block, page });
                FaultAnswer::Wait
            }
            // A unit that is done has no page that is not settled.
            UnitState::Done => FaultAnswer::Wait,
        }
    }

    fn count_use(&mut self, why: ReadReason) {
        if self.rules.account_use && why != ReadReason::Fill {
            self.counts.prefetched_used_pages += 1;
        }
    }

    /// Pages around a zero page that are zeros too, and not settled.
    fn zeros_around(&self, page: Page) -> Range<Page> {
        let start = page.0 / ZERO_RUN * ZERO_RUN;
        let is_zero = |page: &u32| {
            let block = self.block_size.block_of(Page(*page));
            self.plan.unit_of(block).is_none() && !self.settled.contains(Page(*page))
        };
        let before = (start..page.0).rev().take_while(is_zero).count() as u32;
        let after = (page.0 + 1..start + ZERO_RUN).take_while(is_zero).count() as u32;
        Page(page.0 - before)..Page(page.0 + 1 + after)
    }

    /// The install that answers a fault. If the use of prefetched pages is counted, it covers the
    /// requested page only, so that first touches of its neighbours fault as well.
    fn start_install<S>(
        &mut self,
        unit: ReadUnit,
        block: Block,
        page: Page,
        source: UnitSource<S>,
    ) -> BlockInstall<S> {
        self.claim_block(block);
        let missing = self.settled.missing_in(block);
        let pages = match self.rules.account_use && !self.is_fill(unit) {
            true => missing.and(self.page_bit(page)),
            false => missing,
        };
        BlockInstall { block, unit, pages, source, wanted: Some(page), version: self.version }
    }

    fn page_bit(&self, page: Page) -> PageMask {
        PageMask(1 << (page.index() % self.block_size.page_count()))
    }

    fn is_fill(&self, unit: ReadUnit) -> bool {
        matches!(self.units.state_of(unit), UnitState::Memory { why: ReadReason::Fill, .. })
    }

    fn claim_block(&mut self, block: Block) {
        self.taken[block.index() / 64] |= 1 << (block.index() % 64);
    }

    fn release_block(&mut self, block: Block) {
        self.taken[block.index() / 64] &= !(1 << (block.index() % 64));
    }

    fn is_claimed(&self, block: Block) -> bool {
        self.taken[block.index() / 64] >> (block.index() % 64) & 1 == 1
    }
}
