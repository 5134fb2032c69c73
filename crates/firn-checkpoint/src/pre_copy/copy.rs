//! Pre-copy rounds: copies memory in rounds, and makes the cut.

use std::collections::{BTreeMap, HashSet};
use std::ops::Range;
use std::sync::Arc;
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use firn_image::{Image, Placement};
use firn_memory::{GuestMemory, MemoryError, User};
use firn_types::{Block, BlockSize, GuestPhys, Page};

use super::rounds::{Rounds, Step};
use super::tracker::Tracker;
use crate::cut::{Cut, Ready};
use crate::lane::Lane;
use crate::options::SaveOptions;
use crate::order::{self, Resting};
use crate::pipeline::{Intake, RawBlock};
use crate::report::{Progress, SaveReport, ms};
use crate::save::{Copied, SaveContext, SaveError};

/// The number of blocks from which mapping the guest's memory for copying is worth it: that takes
/// some milliseconds, and saves a microsecond for each block.
const WINDOW_MIN: usize = 4096;

/// Blocks between two checks whether the save was cancelled.
const LOOK_EVERY: usize = 256;

/// A save by rounds.
pub(crate) struct PreCopy<'c, 'a> {
    pub(crate) context: &'c mut SaveContext<'a>,
    pub(crate) options: &'c SaveOptions,
    pub(crate) intake: &'c Intake,
    pub(crate) progress: &'c dyn Fn(Progress),
    pub(crate) started: Instant,
}

/// The state of a save by rounds.
struct Done {
    /// Blocks that were copied, and that the kernel may report as written again.
    copied: Vec<bool>,
    /// The number of these blocks.
    count: u32,
    /// Blocks that were written during the save: the guest's writable working set.
    hot: Vec<Block>,
    /// The last copies of blocks that may be copied once more.
    kept: BTreeMap<Block, Box<[u8]>>,
    /// The maximum number of kept blocks: a thread that waits for a buffer must get one.
    room: usize,
}

impl PreCopy<'_, '_> {
    pub(crate) fn run(mut self) -> Result<Copied, SaveError> {
        let mut others = Others::look_for(&self.context.memory)?;
        if let Err(refusal) = self.check_balloon() {
            self.forget();
            return Err(refusal);
        }
        let mut tracker = self.tracker()?;
        firn_fault::point("pre-copy.armed");
        let copied = self.copy(&mut tracker, &mut others);
        self.context.tracker = Some(tracker);
        let is_alone = others.are_none().is_ok();
        if !is_alone || matches!(&copied, Err(SaveError::Scan(_))) {
            // Writes of other processes are not reported at all, and some pages may have been
            // protected again without a report.
            self.forget();
        }
        copied
    }

    /// Pages that a balloon gives back become zeros, and the kernel does not report it.
    fn check_balloon(&mut self) -> Result<(), SaveError> {
        match self.context.vm.balloon()? {
            Some(_) => Err(SaveError::Balloon),
            None => Ok(()),
        }
    }

    /// Drops the tracker: the next save compares everything.
    fn forget(&mut self) {
        if let Some(Err(error)) = self.context.tracker.take().map(Tracker::close) {
            tracing::warn!("writes to the guest's memory are still tracked by the kernel: {error}");
        }
    }

    /// The tracker from the last checkpoint, or a new one.
    fn tracker(&mut self) -> Result<Tracker, SaveError> {
        if let Some(tracker) = self.context.tracker.take() {
            return Ok(tracker);
        }
        let vcpus = self.context.vm.vcpus()?.iter().map(|vcpu| vcpu.tid).collect();
        let (process, memory) = (self.context.process.clone(), self.context.memory.clone());
        Ok(Tracker::start(process, memory, vcpus)?)
    }

    fn copy(&mut self, tracker: &mut Tracker, others: &mut Others) -> Result<Copied, SaveError> {
        let blocks = self.size().blocks_in(self.context.memory.map().total_pages());
        let mut done = Done {
            copied: vec![false; blocks as usize],
            count: 0,
            hot: Vec::new(),
            kept: BTreeMap::new(),
            room: self.intake.buffers() / 2,
        };
        let (mut written, roots) = self.first(tracker)?;
        self.open_window_for(&written)?;
        let mut rounds = Rounds::new(!self.context.vm.reads_past_page_cache()?);
        let is_running = self.context.vm.status()?.running;
        let mut drained = Vec::new();
        let mut next = |written: usize, done: &Done| match rounds.next(written) {
            Step::Keep if done.kept.len() + written > done.room => Step::Cut,
            step => step,
        };
        let mut step = if is_running { next(written.len(), &done) } else { Step::Cut };
        while step != Step::Cut {
            drained.extend(self.let_requests_end()?);
            match step {
                Step::Copy => self.copy_all(&written, &mut done)?,
                _ => self.keep_all(&written, &mut done)?,
            }
            firn_fault::point("pre-copy.round");
            written = self.blocks_of(&tracker.newly_written()?);
            self.open_window_for(&written)?;
            done.hot.extend(&written);
            step = next(written.len(), &done);
        }
        others.are_none()?;
        let ready = Ready::make(self.context, false)?;
        let arm_ms = ms(self.started.elapsed());
        let (memory, size, intake) =
            (Arc::clone(&self.context.memory), self.size(), self.intake.clone());
        let cut = Cut::make(self.context, self.options, ready, &mut || {
            let last = blocks_of(size, &tracker.newly_written()?);
            tracker.cut();
            let left = union(&written, &last);
            intake.turns().while_still(|| {
                left.iter().try_for_each(|&block| done.copy_last(block, &memory, size, &intake))
            })?;
            done.hot.extend(last);
            firn_fault::point("pre-copy.copied");
            Ok(left.len() as u64 * size.pages() as u64)
        })?;
        firn_fault::point("save.resumed");
        done.submit_kept(self.intake);
        self.report(&done);
        let report = SaveReport {
            rounds: rounds.done(),
            drained_ms: ms(drained.iter().sum()),
            round_pauses_ms: drained.into_iter().map(ms).collect(),
            arm_ms,
            pause: cut.pause,
            blocks_total: blocks,
            ..SaveReport::default()
        };
        let working_set = self.working_set(done.hot);
        Ok(Copied { cut, working_set, roots, report })
    }

    /// Maps the guest's memory if there is much to copy.
    fn open_window_for(&self, blocks: &[Block]) -> Result<(), SaveError> {
        let is_worth_it = blocks.len() >= WINDOW_MIN;
        if is_worth_it { Ok(self.context.memory.open_window()?) } else { Ok(()) }
    }

    /// The blocks of the first round: those written since the parent, or else all blocks.
    fn first(&mut self, tracker: &mut Tracker) -> Result<(Vec<Block>, Vec<GuestPhys>), SaveError> {
        let parent = self.context.parent.clone();
        match parent.filter(|parent| tracker.knows(&parent.identity())) {
            Some(_) => Ok((self.blocks_of(&tracker.written()?), Vec::new())),
            None => {
                // Pages written before are copied now, and pages written from now on are reported.
                tracker.written()?;
                let memory = &Resting { memory: &self.context.memory, turns: self.intake.turns() };
                let spaces = order::address_spaces(self.context.vm, memory)?;
                let mut order = order::blocks(memory, &spaces, self.size())?;
                order.add_unbacked(|block| stores(self.context.parent.as_deref(), block));
                Ok((order.blocks, spaces.roots))
            }
        }
    }

    /// Has the device models complete the requests that they have begun, where that matters (see
    /// the module's documentation). Returns for how long the VM was paused for that.
    fn let_requests_end(&mut self) -> Result<Option<Duration>, SaveError> {
        if !self.context.vm.reads_past_page_cache()? {
            return Ok(None);
        }
        if !self.context.vm.status()?.running {
            // The user stopped it in the meantime. Then no request is running.
            return Ok(None);
        }
        self.context.drives.flush_files();
        self.context.steps.about_to_stop().map_err(SaveError::Step)?;
        let since = Instant::now();
        let stopped = self.context.vm.stop();
        firn_fault::point("pre-copy.drained");
        let continued = self.context.vm.cont();
        stopped?;
        continued?;
        let drained = since.elapsed();
        self.context.steps.resumed().map_err(SaveError::Step)?;
        Ok(Some(drained))
    }

    fn copy_all(&self, blocks: &[Block], done: &mut Done) -> Result<(), SaveError> {
        for (at, &block) in blocks.iter().enumerate() {
            if at % LOOK_EVERY == 0 {
                self.report(done);
                if self.intake.failed() || self.context.steps.cancelled() {
                    return Err(SaveError::Cancelled);
                }
            }
            self.intake.turns().rest();
            done.copy(block, &self.context.memory, self.size(), self.intake)?;
        }
        self.intake.settle(&|| self.context.steps.cancelled());
        Ok(())
    }

    fn keep_all(&self, blocks: &[Block], done: &mut Done) -> Result<(), SaveError> {
        let (memory, size) = (&self.context.memory, self.size());
        blocks.iter().try_for_each(|&block| done.keep(block, memory, size, self.intake))
    }

    /// The blocks that the guest writes now, then those of the parent's working set.
    fn working_set(&self, hot: Vec<Block>) -> Vec<Block> {
        let parents = self.context.parent.as_deref().map(Image::working_set).unwrap_or_default();
        renewed(hot, parents)
    }

    fn size(&self) -> BlockSize {
        self.options.block_size
    }

    fn blocks_of(&self, pages: &[Range<Page>]) -> Vec<Block> {
        blocks_of(self.size(), pages)
    }

    fn report(&self, done: &Done) {
        (self.progress)(Progress {
            blocks_done: done.count,
            blocks_total: done.copied.len() as u32,
            bytes_written: self.intake.written(),
        });
    }
}

/// A search for other processes that map the guest's memory. It must check every process of the
/// host, which takes milliseconds, and the result is not needed before the cut.
struct Others {
    looking: Option<JoinHandle<Result<Vec<User>, MemoryError>>>,
    /// Whether the search has succeeded, and found no process.
    are_none: bool,
}

impl Others {
    fn look_for(memory: &Arc<GuestMemory>) -> Result<Self, SaveError> {
        let memory = Arc::clone(memory);
        let looking = thread::Builder::new().name("firn-others".into());
        let looking = looking.spawn(move || memory.other_users()).map_err(SaveError::Step)?;
        Ok(Self { looking: Some(looking), are_none: false })
    }

    /// Returns an error if a process was found or the search failed; the first time, the error
    /// names the cause.
    fn are_none(&mut self) -> Result<(), SaveError> {
        if let Some(looking) = self.looking.take() {
            let found = looking.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))?;
            if let Some(other) = found.first() {
                return Err(SaveError::Foreign(other.to_string()));
            }
            self.are_none = true;
        }
        match self.are_none {
            true => Ok(()),
            false => Err(SaveError::Options("another process maps the guest's memory")),
        }
    }
}

impl Done {
    fn copy(
        &mut self,
        block: Block,
        memory: &GuestMemory,
        size: BlockSize,
        intake: &Intake,
    ) -> Result<(), SaveError> {
        let Some(mut bytes) = intake.buffer() else { return Ok(()) };
        memory.read(size.first_page(block), &mut bytes)?;
        self.submit(block, bytes, intake);
        Ok(())
    }

    fn submit(&mut self, block: Block, bytes: Box<[u8]>, intake: &Intake) {
        let again = std::mem::replace(&mut self.copied[block.index()], true);
        self.count += u32::from(!again);
        intake.submit(RawBlock { lane: Lane::Sweep, block, bytes, again });
    }

    /// Copies a block to memory. All submitted blocks are done, so there are free buffers.
    fn keep(
        &mut self,
        block: Block,
        memory: &GuestMemory,
        size: BlockSize,
        intake: &Intake,
    ) -> Result<(), SaveError> {
        let kept = self.kept.remove(&block).or_else(|| intake.buffer());
        let Some(mut bytes) = kept else { return Ok(()) };
        memory.read(size.first_page(block), &mut bytes)?;
        self.kept.insert(block, bytes);
        Ok(())
    }

    /// At the cut: the kept copy of a block is replaced, and a block without one is kept or
    /// submitted at once.
    fn copy_last(
        &mut self,
        block: Block,
        memory: &GuestMemory,
        size: BlockSize,
        intake: &Intake,
    ) -> Result<(), SaveError> {
        match self.kept.contains_key(&block) || self.kept.len() < self.room {
            true => self.keep(block, memory, size, intake),
            false => self.copy(block, memory, size, intake),
        }
    }

    fn submit_kept(&mut self, intake: &Intake) {
        for (block, bytes) in std::mem::take(&mut self.kept) {
            self.submit(block, bytes, intake);
        }
    }
}

/// The working set for the next checkpoint: new blocks come first, and the oldest ones are dropped,
/// so that it does not grow with the chain.
fn renewed(hot: Vec<Block>, parents: &[Block]) -> Vec<Block> {
    let longest = hot.len().max(parents.len());
    let mut known = HashSet::new();
    let all = hot.into_iter().chain(parents.iter().copied());
    all.filter(|&block| known.insert(block)).take(longest).collect()
}

/// Whether the parent stores anything but zeros for a block.
pub(crate) fn stores(parent: Option<&Image>, block: Block) -> bool {
    parent.is_some_and(|parent| matches!(parent.lookup(block), Placement::Stored { .. }))
}

/// The blocks that hold any of these pages, in order, each once.
fn blocks_of(size: BlockSize, pages: &[Range<Page>]) -> Vec<Block> {
    let of_run = |run: &Range<Page>| size.block_of(run.start).0..size.blocks_in(run.end.0);
    let mut blocks: Vec<Block> = pages.iter().flat_map(of_run).map(Block).collect();
    blocks.dedup();
    blocks
}

/// Two lists of blocks merged: in order, each block once.
fn union(one: &[Block], other: &[Block]) -> Vec<Block> {
    let mut all = [one, other].concat();
    all.sort_unstable();
    all.dedup();
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_working_set_does_not_grow_with_the_chain() {
        let blocks = |numbers: &[u32]| numbers.iter().copied().map(Block).collect::<Vec<_>>();
        let renewed = |hot: &[u32], parents: &[u32]| renewed(blocks(hot), &blocks(parents));
        assert_eq!(renewed(&[7, 7, 2], &[1, 2, 3, 4]), blocks(&[7, 2, 1, 3]));
        assert_eq!(renewed(&[], &[1, 2]), blocks(&[1, 2]));
        assert_eq!(renewed(&[5, 6], &[1]), blocks(&[5, 6]));
    }

    #[test]
    fn blocks_are_told_once() {
        let runs = [0..1, 1..2, 3..6].map(|run: Range<u32>| Page(run.start)..Page(run.end));
        assert_eq!(blocks_of(BlockSize::default(), &runs), [0, 1, 2].map(Block));
        assert_eq!(union(&[Block(4), Block(1)], &[Block(2), Block(4)]), [1, 2, 4].map(Block));
    }
}
