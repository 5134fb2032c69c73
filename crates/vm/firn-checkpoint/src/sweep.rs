//! Background sweep: copies the blocks that the guest did not touch, so that a save ends.
//!
//! Blocks are taken in the order of [`crate::order`]. The sweep leaves the pages traced: a page
//! that the guest touches later still faults once, cheaply, and so shows that it belongs to the
//! working set. Only the blocks that are to be released may be written again without a fault.

use std::sync::Arc;
use std::thread;
use std::time::Duration;

use firn_types::{BandwidthLimit, Block};

use crate::cut::SaveSteps;
use crate::error::SaveError;
use crate::lane::PackingLane;
use crate::pipeline::PipelineIntake;
use crate::report::SaveProgress;
use crate::sweep_throttle::{SweepDeadline, SweepStep, SweepThrottle};
use crate::trace::SaveTrace;

/// How long the sweep waits for compressors to catch up.
const ROOM_POLL_INTERVAL: Duration = Duration::from_millis(1);

/// How often the sweep reports its progress.
const REPORT_INTERVAL: Duration = Duration::from_millis(50);

/// How often the sweep checks for a cancelled save once everything is copied.
const CANCEL_POLL_INTERVAL: Duration = Duration::from_millis(10);

/// The end of the time for which a guest is watched, on the clock of [`SaveTrace::now`]: the
/// earliest, and the latest if it touches more and more blocks.
#[derive(Clone, Copy, Debug)]
pub(crate) struct WatchPeriod {
    pub(crate) until: Duration,
    pub(crate) at_most_until: Duration,
}

/// A sweep over the blocks of one save.
pub(crate) struct BackgroundSweep<'a> {
    pub(crate) trace: &'a Arc<SaveTrace>,
    pub(crate) intake: &'a PipelineIntake,
    pub(crate) throttle: SweepThrottle,
    pub(crate) bandwidth: BandwidthLimit,
    pub(crate) deadline: Option<SweepDeadline>,
    pub(crate) progress: &'a dyn Fn(SaveProgress),
    pub(crate) steps: &'a dyn SaveSteps,
    /// The time for which the guest is watched.
    pub(crate) watch: WatchPeriod,
    /// The number of blocks that were copied and released.
    pub(crate) released_blocks: u32,
    /// When every block was copied, on the clock of [`SaveTrace::now`].
    pub(crate) copied_at: Duration,
    /// When it last reported its progress, on the clock of [`SaveTrace::now`].
    pub(crate) reported: Duration,
}

impl BackgroundSweep<'_> {
    /// Copies every block of `order` that is not copied yet, and releases the first `release_count`
    /// of them. Ends early if the image can't be written. Returns when all was copied, and the
    /// minimum watch time was over.
    pub(crate) fn run_sweep(
        &mut self,
        order: Vec<Block>,
        release_count: usize,
    ) -> Result<Duration, SaveError> {
        let numbered = order.into_iter().enumerate();
        let mut order = numbered.map(|(number, block)| (block, number < release_count));
        loop {
            if self.steps.is_cancelled() {
                return Err(SaveError::Cancelled);
            }
            self.trace.check_none_lost()?;
            let wait = self.bandwidth.next_wait(self.intake.written_at_most(), self.trace.now());
            if !wait.is_zero() {
                thread::sleep(wait);
                continue;
            }
            match self.throttle.next_step(self.intake.guest_block_count()) {
                SweepStep::Wait(wait) if !self.is_late() => thread::sleep(wait),
                SweepStep::Wait(_) => {}
                SweepStep::Copy(blocks) => {
                    if !self.copy_some(&mut order, blocks)? || self.intake.has_failed() {
                        self.copied_at = self.trace.now();
                        return self.watch_guest();
                    }
                }
            }
        }
    }

    /// Whether the save is behind the time that its user has set.
    fn is_late(&self) -> bool {
        let total = self.trace.ledger.block_count();
        let saved = total - self.trace.ledger.unsaved_count();
        self.deadline.is_some_and(|deadline| deadline.is_late(saved, total, self.trace.now()))
    }

    /// Leaves the pages traced for a while: the fault handler records what the guest touches.
    fn watch_guest(&self) -> Result<Duration, SaveError> {
        let WatchPeriod { until, at_most_until } = self.watch;
        self.wait_while(|now| now < until)?;
        let watched = self.trace.now();
        let is_settled = |now| self.trace.lock_touches().is_settled(now);
        self.wait_while(|now| now < at_most_until && !is_settled(now))?;
        Ok(watched)
    }

    fn wait_while(&self, is_early: impl Fn(Duration) -> bool) -> Result<(), SaveError> {
        while is_early(self.trace.now()) && !self.intake.has_failed() {
            if self.steps.is_cancelled() {
                return Err(SaveError::Cancelled);
            }
            self.trace.check_none_lost()?;
            thread::sleep(CANCEL_POLL_INTERVAL);
        }
        Ok(())
    }

    /// Copies up to `blocks` blocks; `false` at the end of the order.
    fn copy_some(
        &mut self,
        order: &mut impl Iterator<Item = (Block, bool)>,
        blocks: u32,
    ) -> Result<bool, SaveError> {
        firn_fault::pass_point("save.sweep");
        let began = self.trace.now();
        let (mut left, mut paused) = (blocks, Duration::ZERO);
        while left > 0 {
            let Some((block, lets_go)) = order.next() else {
                self.report_progress();
                return Ok(false);
            };
            paused += self.wait_for_turn();
            let is_copied = self.copy_block(block)?;
            if is_copied && lets_go {
                self.trace.faults.unprotect_pages(self.trace.block_size.pages_of(block))?;
                self.released_blocks += 1;
            }
            left -= u32::from(is_copied);
        }
        let took = self.trace.now().saturating_sub(began + paused);
        self.throttle.record_batch(blocks, took);
        self.report_at_times();
        Ok(true)
    }

    /// Waits until compressors have caught up, and while background work pauses. Returns the length
    /// of the pause.
    fn wait_for_turn(&self) -> Duration {
        while !self.intake.has_room() && !self.intake.has_failed() {
            thread::sleep(ROOM_POLL_INTERVAL);
        }
        match self.is_late() {
            true => Duration::ZERO,
            false => self.trace.duty_cycle().pause_if_due(),
        }
    }

    fn copy_block(&self, block: Block) -> Result<bool, SaveError> {
        let mine = self.trace.ledger.try_claim(block);
        if mine {
            self.trace.copy_claimed(block, PackingLane::Sweep, self.intake)?;
        }
        Ok(mine)
    }

    fn report_at_times(&mut self) {
        let now = self.trace.now();
        if now.saturating_sub(self.reported) >= REPORT_INTERVAL {
            self.reported = now;
            self.report_progress();
        }
    }

    /// Reports the progress of the save to the caller.
    fn report_progress(&self) {
        let total = self.trace.ledger.block_count();
        let done = total - self.trace.ledger.unsaved_count();
        let progress = SaveProgress {
            blocks_done: done,
            blocks_total: total,
            bytes_written: self.intake.written_bytes(),
        };
        (self.progress)(progress);
    }
}
