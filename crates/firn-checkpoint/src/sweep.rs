//! Background sweep: copies the blocks that the guest did not touch, so that a save ends.
//!
//! Blocks are taken in the order of [`crate::order`]. The sweep leaves the pages traced: a page
//! that the guest touches later still faults once, cheaply, and so shows that it belongs to the
//! working set. Only the blocks that are to be released may be written again without a fault.

use std::sync::Arc;
use std::thread;
use std::time::Duration;

use firn_types::Block;

use crate::cut::Steps;
use crate::lane::Lane;
use crate::pace::{Pace, Step};
use crate::pipeline::Intake;
use crate::report::Progress;
use crate::save::SaveError;
use crate::trace::Trace;

/// How long the sweep waits for compressors to catch up.
const WAIT_FOR_ROOM: Duration = Duration::from_millis(1);

/// How often the sweep reports its progress.
const REPORT_EVERY: Duration = Duration::from_millis(50);

/// How often the sweep checks for a cancelled save once everything is copied.
const LOOK: Duration = Duration::from_millis(10);

/// The end of the time for which a guest is watched, on the clock of [`SaveTrace::now`]: the
/// earliest, and the latest if it touches more and more blocks.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Watch {
    pub(crate) until: Duration,
    pub(crate) at_most_until: Duration,
}

/// A sweep over the blocks of one save.
pub(crate) struct Sweep<'a> {
    pub(crate) trace: &'a Arc<Trace>,
    pub(crate) intake: &'a Intake,
    pub(crate) pace: Pace,
    pub(crate) progress: &'a dyn Fn(Progress),
    pub(crate) steps: &'a dyn Steps,
    /// The time for which the guest is watched.
    pub(crate) watch: Watch,
    /// The number of blocks that were copied and released.
    pub(crate) let_go: u32,
    /// When it last reported its progress, on the clock of [`SaveTrace::now`].
    pub(crate) reported: Duration,
}

impl Sweep<'_> {
    /// Copies every block of `order` that is not copied yet, and releases the first `let_go` of
    /// them. Ends early if the image can't be written. Returns when all was copied, and the minimum
    /// watch time was over.
    pub(crate) fn run(&mut self, order: Vec<Block>, let_go: usize) -> Result<Duration, SaveError> {
        let numbered = order.into_iter().enumerate();
        let mut order = numbered.map(|(number, block)| (block, number < let_go));
        loop {
            if self.steps.cancelled() {
                return Err(SaveError::Cancelled);
            }
            match self.pace.step(self.trace.now(), self.trace.turns().last_fault()) {
                Step::Wait(wait) => thread::sleep(wait),
                Step::Copy(blocks) => {
                    if !self.copy_some(&mut order, blocks)? || self.intake.failed() {
                        return self.watch();
                    }
                }
            }
        }
    }

    /// Leaves the pages traced for a while: the fault handler records what the guest touches.
    fn watch(&self) -> Result<Duration, SaveError> {
        let Watch { until, at_most_until } = self.watch;
        self.wait_while(|now| now < until)?;
        let watched = self.trace.now();
        let is_settled = |now| self.trace.touches().is_settled(now);
        self.wait_while(|now| now < at_most_until && !is_settled(now))?;
        Ok(watched)
    }

    fn wait_while(&self, is_early: impl Fn(Duration) -> bool) -> Result<(), SaveError> {
        while is_early(self.trace.now()) && !self.intake.failed() {
            if self.steps.cancelled() {
                return Err(SaveError::Cancelled);
            }
            thread::sleep(LOOK);
        }
        Ok(())
    }

    /// Copies up to `blocks` blocks; `false` at the end of the order.
    fn copy_some(
        &mut self,
        order: &mut impl Iterator<Item = (Block, bool)>,
        blocks: u32,
    ) -> Result<bool, SaveError> {
        firn_fault::point("save.sweep");
        let mut left = blocks;
        while left > 0 {
            let Some((block, lets_go)) = order.next() else {
                self.report();
                return Ok(false);
            };
            let is_copied = self.copy(block)?;
            if is_copied && lets_go {
                self.trace.faults.unprotect(self.trace.block_size.pages_of(block))?;
                self.let_go += 1;
            }
            left -= u32::from(is_copied);
        }
        self.report_at_times();
        Ok(true)
    }

    fn copy(&self, block: Block) -> Result<bool, SaveError> {
        while !self.intake.has_room() && !self.intake.failed() {
            thread::sleep(WAIT_FOR_ROOM);
        }
        self.trace.turns().rest();
        let mine = self.trace.ledger.try_claim(block);
        if mine {
            self.trace.copy_claimed(block, Lane::Sweep, self.intake)?;
        }
        Ok(mine)
    }

    fn report_at_times(&mut self) {
        let now = self.trace.now();
        if now.saturating_sub(self.reported) >= REPORT_EVERY {
            self.reported = now;
            self.report();
        }
    }

    /// Reports the progress of the save to the caller.
    fn report(&self) {
        let total = self.trace.ledger.blocks();
        let done = total - self.trace.ledger.unsaved();
        let progress = Progress {
            blocks_done: done,
            blocks_total: total,
            bytes_written: self.intake.written(),
        };
        (self.progress)(progress);
    }
}
