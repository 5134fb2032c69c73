//! Pre-copy rounds: copies memory in rounds, and makes the cut.

use std::collections::{BTreeMap, HashSet};
use std::ops::Range;
use std::sync::Arc;
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use firn_image::{BlockPlacement, Image};
use firn_memory::{GuestMemory, MemoryError, RamUser};
use firn_types::{BandwidthLimit, Block, BlockSize, GuestPhys, Page};

use super::rounds::{CopyRounds, RoundStep};
use super::tracker::{TrackedImage, WriteTracker};
use crate::context::{CopiedMemory, SaveContext};
use crate::cut::{CutState, PreparedPause};
use crate::discards::may_discard;
use crate::error::SaveError;
use crate::lane::PackingLane;
use crate::options::SaveOptions;
use crate::order::{self, ThrottledReader};
use crate::pipeline::{PipelineIntake, RawBlock};
use crate::report::{SaveProgress, SaveReport, to_ms};

/// The number of blocks from which mapping the guest's memory for copying is worth it: that takes
/// some milliseconds, and saves a microsecond for each block.
const WINDOW_MIN: usize = 4096;

/// Blocks between two checks whether the save was cancelled.
const CHECK_BLOCKS: usize = 256;

/// A save by rounds.
pub(crate) struct PreCopy<'c, 'a> {
    pub(crate) context: &'c mut SaveContext<'a>,
    pub(crate) options: &'c SaveOptions,
    pub(crate) intake: &'c PipelineIntake,
    pub(crate) progress: &'c dyn Fn(SaveProgress),
    pub(crate) started: Instant,
    /// Whether the guest's memory is shared, and the guest may give pages back.
    pub(crate) has_holes: bool,
}

/// The state of a save by rounds.
struct CopyState {
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
    pub(crate) fn run_save(mut self) -> Result<CopiedMemory, SaveError> {
        let mut others = OtherUserSearch::start_search(&self.context.memory)?;
        let memory = Arc::clone(&self.context.memory);
        let may_discard = may_discard(self.context.vm, &memory)?;
        if may_discard && memory.has_huge_pages() {
            // The pages that were given back are not known: only that some were.
            return Err(SaveError::huge_pages_in_pre_copy());
        }
        self.has_holes = memory.is_shared() && may_discard;
        let mut tracker = self.take_tracker()?;
        firn_fault::pass_point("pre-copy.tracking");
        let copied = self.copy_memory(&mut tracker, &mut others);
        self.context.tracker = Some(tracker);
        let is_alone = others.check_none().is_ok();
        if !is_alone || self.has_holes || matches!(&copied, Err(SaveError::DirtyTracking(_))) {
            // Writes of other processes are not reported at all, some pages may have been protected
            // again without a report, and a guest must not depend on Firn to fill its holes.
            self.drop_tracker();
        }
        copied
    }

    /// Drops the tracker: the next save compares everything.
    fn drop_tracker(&mut self) {
        if let Some(Err(error)) = self.context.tracker.take().map(WriteTracker::close) {
            tracing::warn!("writes to the guest's memory are still tracked by the kernel: {error}");
        }
    }

    /// The tracker from the last checkpoint, or a new one.
    fn take_tracker(&mut self) -> Result<WriteTracker, SaveError> {
        if self.has_holes {
            // That of the last checkpoint does not report the pages that were given back.
            self.drop_tracker();
        }
        if let Some(tracker) = self.context.tracker.take() {
            return Ok(tracker);
        }
        let vcpus = self.context.vm.vcpus()?.iter().map(|vcpu| vcpu.tid).collect();
        let (process, memory) = (self.context.process.clone(), self.context.memory.clone());
        Ok(match self.has_holes {
            true => WriteTracker::start_with_holes(process, memory, vcpus)?,
            false => WriteTracker::start_tracking(process, memory, vcpus)?,
        })
    }

    fn copy_memory(
        &mut self,
        tracker: &mut WriteTracker,
        others: &mut OtherUserSearch,
    ) -> Result<CopiedMemory, SaveError> {
        let blocks = self.block_size().blocks_in(self.context.memory.region_map().total_pages());
        let mut done = CopyState {
            copied: vec![false; blocks as usize],
            count: 0,
            hot: Vec::new(),
            kept: BTreeMap::new(),
            room: self.intake.buffer_count_max() / 2,
        };
        let (mut written, roots) = self.first_round(tracker)?;
        self.open_window_for(&written)?;
        let mut rounds = CopyRounds::new(!self.context.vm.reads_past_page_cache()?);
        let is_running = self.context.vm.status()?.running;
        let mut drained = Vec::new();
        let mut next = |written: usize, done: &CopyState| match rounds.next_step(written) {
            RoundStep::Keep if done.kept.len() + written > done.room => RoundStep::Cut,
            step => step,
        };
        let mut step = if is_running { next(written.len(), &done) } else { RoundStep::Cut };
        while step != RoundStep::Cut {
            drained.extend(self.drain_requests()?);
            match step {
                RoundStep::Copy => self.copy_all(&written, &mut done)?,
                _ => self.keep_all(&written, &mut done)?,
            }
            firn_fault::pass_point("pre-copy.round");
            written = self.blocks_of(&tracker.newly_written()?);
            self.open_window_for(&written)?;
            done.hot.extend(&written);
            step = next(written.len(), &done);
        }
        others.check_none()?;
        let ready = PreparedPause::prepare_pause(self.context, false)?;
        let arm_ms = to_ms(self.started.elapsed());
        let (memory, size, intake) =
            (Arc::clone(&self.context.memory), self.block_size(), self.intake.clone());
        let cut = CutState::make_cut(self.context, self.options, ready, &mut || {
            let last = blocks_of(size, &tracker.newly_written()?);
            tracker.mark_cut();
            let left = merge_blocks(&written, &last);
            intake.duty_cycle().without_pauses(|| {
                left.iter().try_for_each(|&block| done.copy_last(block, &memory, size, &intake))
            })?;
            done.hot.extend(last);
            firn_fault::pass_point("pre-copy.copied");
            Ok(left.len() as u64 * size.page_count() as u64)
        })?;
        firn_fault::pass_point("save.resumed");
        done.submit_kept(self.intake);
        self.report_progress(&done);
        let report = SaveReport {
            rounds: rounds.rounds_done(),
            drained_ms: to_ms(drained.iter().sum()),
            round_pauses_ms: drained.into_iter().map(to_ms).collect(),
            arm_ms,
            pause: cut.pause,
            blocks_total: blocks,
            ..SaveReport::default()
        };
        let working_set = self.working_set(done.hot);
        Ok(CopiedMemory { cut, working_set, roots, report })
    }

    /// Maps the guest's memory if there is much to copy. A mapping of Firn's would fill holes.
    fn open_window_for(&self, blocks: &[Block]) -> Result<(), SaveError> {
        let is_worth_it = blocks.len() >= WINDOW_MIN && !self.has_holes;
        if is_worth_it { Ok(self.context.memory.open_window()?) } else { Ok(()) }
    }

    /// The blocks of the first round: those written since the parent, or else all blocks.
    fn first_round(
        &mut self,
        tracker: &mut WriteTracker,
    ) -> Result<(Vec<Block>, Vec<GuestPhys>), SaveError> {
        let parent = self.context.parent.clone();
        let tracked = |parent: &Arc<Image>| TrackedImage::new(parent.identity(), parent.seal());
        match parent.filter(|parent| tracker.tracks_since(&tracked(parent))) {
            Some(_) => Ok((self.blocks_of(&tracker.written_since_image()?), Vec::new())),
            None => {
                // Pages written before are copied now, and pages written from now on are reported.
                tracker.written_since_image()?;
                let memory = &ThrottledReader {
                    memory: &self.context.memory,
                    duty_cycle: self.intake.duty_cycle(),
                };
                let spaces = order::find_address_spaces(self.context.vm, memory)?;
                let mut order = order::plan_blocks(memory, &spaces, self.block_size())?;
                order.add_unbacked(|block| {
                    is_stored_in_parent(self.context.parent.as_deref(), block)
                });
                Ok((order.blocks, spaces.roots))
            }
        }
    }

    /// Has the device models complete the requests that they have begun, where that matters (see
    /// the module's documentation). Returns for how long the VM was paused for that.
    fn drain_requests(&mut self) -> Result<Option<Duration>, SaveError> {
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
        firn_fault::pass_point("pre-copy.drained");
        let continued = self.context.vm.cont();
        stopped?;
        continued?;
        let drained = since.elapsed();
        self.context.steps.record_resume().map_err(SaveError::Step)?;
        Ok(Some(drained))
    }

    fn copy_all(&self, blocks: &[Block], done: &mut CopyState) -> Result<(), SaveError> {
        let written = self.intake.written_at_most();
        let mut bandwidth =
            BandwidthLimit::new(self.options.bandwidth, self.started.elapsed(), written);
        for (at, &block) in blocks.iter().enumerate() {
            if at % CHECK_BLOCKS == 0 {
                self.report_progress(done);
                self.wait_for_bandwidth(&mut bandwidth)?;
            }
            self.intake.duty_cycle().pause_if_due();
            done.copy_block(block, &self.context.memory, self.block_size(), self.intake)?;
        }
        self.intake.wait_until_done(&|| self.context.steps.is_cancelled());
        Ok(())
    }

    /// Waits until the next blocks may be written.
    fn wait_for_bandwidth(&self, bandwidth: &mut BandwidthLimit) -> Result<(), SaveError> {
        loop {
            if self.intake.has_failed() || self.context.steps.is_cancelled() {
                return Err(SaveError::Cancelled);
            }
            let written = self.intake.written_at_most();
            match bandwidth.next_wait(written, self.started.elapsed()) {
                Duration::ZERO => return Ok(()),
                wait => thread::sleep(wait),
            }
        }
    }

    fn keep_all(&self, blocks: &[Block], done: &mut CopyState) -> Result<(), SaveError> {
        let (memory, size) = (&self.context.memory, self.block_size());
        blocks.iter().try_for_each(|&block| done.keep_block(block, memory, size, self.intake))
    }

    /// The blocks that the guest writes now, then those of the parent's working set.
    fn working_set(&self, hot: Vec<Block>) -> Vec<Block> {
        let parents = self.context.parent.as_deref().map(Image::working_set).unwrap_or_default();
        renew_working_set(hot, parents)
    }

    fn block_size(&self) -> BlockSize {
        self.options.block_size
    }

    fn blocks_of(&self, pages: &[Range<Page>]) -> Vec<Block> {
        blocks_of(self.block_size(), pages)
    }

    fn report_progress(&self, done: &CopyState) {
        (self.progress)(SaveProgress {
            blocks_done: done.count,
            blocks_total: done.copied.len() as u32,
            bytes_written: self.intake.written_bytes(),
        });
    }
}

/// A search for other processes that map the guest's memory. It must check every process of the
/// host, which takes milliseconds, and the result is not needed before the cut.
struct OtherUserSearch {
    search: Option<JoinHandle<Result<Vec<RamUser>, MemoryError>>>,
    /// Whether the search has succeeded, and found no process.
    are_none: bool,
}

impl OtherUserSearch {
    fn start_search(memory: &Arc<GuestMemory>) -> Result<Self, SaveError> {
        let memory = Arc::clone(memory);
        let looking = thread::Builder::new().name("firn-others".into());
        let looking = looking.spawn(move || memory.other_users()).map_err(SaveError::Step)?;
        Ok(Self { search: Some(looking), are_none: false })
    }

    /// Returns an error if a process was found or the search failed; the first time, the error
    /// names the cause.
    fn check_none(&mut self) -> Result<(), SaveError> {
        if let Some(looking) = self.search.take() {
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

impl CopyState {
    fn copy_block(
        &mut self,
        block: Block,
        memory: &GuestMemory,
        size: BlockSize,
        intake: &PipelineIntake,
    ) -> Result<(), SaveError> {
        let Some(mut bytes) = intake.take_buffer() else { return Ok(()) };
        memory.read_pages(size.first_page(block), &mut bytes)?;
        self.submit_block(block, bytes, intake);
        Ok(())
    }

    fn submit_block(&mut self, block: Block, bytes: Box<[u8]>, intake: &PipelineIntake) {
        let again = std::mem::replace(&mut self.copied[block.index()], true);
        self.count += u32::from(!again);
        intake.submit_block(RawBlock { lane: PackingLane::Sweep, block, bytes, again });
    }

    /// Copies a block to memory. All submitted blocks are done, so there are free buffers.
    fn keep_block(
        &mut self,
        block: Block,
        memory: &GuestMemory,
        size: BlockSize,
        intake: &PipelineIntake,
    ) -> Result<(), SaveError> {
        let kept = self.kept.remove(&block).or_else(|| intake.take_buffer());
        let Some(mut bytes) = kept else { return Ok(()) };
        memory.read_pages(size.first_page(block), &mut bytes)?;
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
        intake: &PipelineIntake,
    ) -> Result<(), SaveError> {
        match self.kept.contains_key(&block) || self.kept.len() < self.room {
            true => self.keep_block(block, memory, size, intake),
            false => self.copy_block(block, memory, size, intake),
        }
    }

    fn submit_kept(&mut self, intake: &PipelineIntake) {
        for (block, bytes) in std::mem::take(&mut self.kept) {
            self.submit_block(block, bytes, intake);
        }
    }
}

/// The working set for the next checkpoint: new blocks come first, and the oldest ones are dropped,
/// so that it does not grow with the chain.
fn renew_working_set(hot: Vec<Block>, parents: &[Block]) -> Vec<Block> {
    let longest = hot.len().max(parents.len());
    let mut known = HashSet::new();
    let all = hot.into_iter().chain(parents.iter().copied());
    all.filter(|&block| known.insert(block)).take(longest).collect()
}

/// Whether the parent stores anything but zeros for a block.
pub(crate) fn is_stored_in_parent(parent: Option<&Image>, block: Block) -> bool {
    parent.is_some_and(|parent| matches!(parent.placement_of(block), BlockPlacement::Stored { .. }))
}

/// The blocks that hold any of these pages, in order, each once.
fn blocks_of(size: BlockSize, pages: &[Range<Page>]) -> Vec<Block> {
    let of_run = |run: &Range<Page>| size.block_of(run.start).0..size.blocks_in(run.end.0);
    let mut blocks: Vec<Block> = pages.iter().flat_map(of_run).map(Block).collect();
    blocks.dedup();
    blocks
}

/// Two lists of blocks merged: in order, each block once.
fn merge_blocks(one: &[Block], other: &[Block]) -> Vec<Block> {
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
        let renewed =
            |hot: &[u32], parents: &[u32]| renew_working_set(blocks(hot), &blocks(parents));
        assert_eq!(renewed(&[7, 7, 2], &[1, 2, 3, 4]), blocks(&[7, 2, 1, 3]));
        assert_eq!(renewed(&[], &[1, 2]), blocks(&[1, 2]));
        assert_eq!(renewed(&[5, 6], &[1]), blocks(&[5, 6]));
    }

    #[test]
    fn blocks_are_reported_once() {
        let runs = [0..1, 1..2, 3..6].map(|run: Range<u32>| Page(run.start)..Page(run.end));
        assert_eq!(blocks_of(BlockSize::default(), &runs), [0, 1, 2].map(Block));
        assert_eq!(
            merge_blocks(&[Block(4), Block(1)], &[Block(2), Block(4)]),
            [1, 2, 4].map(Block)
        );
    }
}
