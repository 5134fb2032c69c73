//! Stop-and-copy: copies all of RAM while the vCPUs are paused.

use std::ops::Range;
use std::sync::Arc;

use firn_image::Image;
use firn_memory::GuestMemory;
use firn_types::{Block, Page};

use crate::error::SaveError;
use crate::lane::PackingLane;
use crate::options::SaveOptions;
use crate::order::{self, AddressSpaces, ThrottledReader};
use crate::pipeline::{PipelineIntake, RawBlock};
use crate::pre_copy::is_stored_in_parent;
use crate::report::SaveProgress;

/// Blocks between two progress reports.
const BLOCKS_PER_REPORT: usize = 1024;

/// Copies the memory of a stopped VM.
pub(crate) struct StopCopy<'a> {
    pub(crate) memory: &'a GuestMemory,
    pub(crate) spaces: &'a AddressSpaces,
    /// The pages that the guest used before it was stopped.
    pub(crate) used: Vec<Range<Page>>,
    pub(crate) parent: Option<Arc<Image>>,
    pub(crate) options: &'a SaveOptions,
    pub(crate) intake: &'a PipelineIntake,
    pub(crate) progress: &'a dyn Fn(SaveProgress),
}

impl StopCopy<'_> {
    /// Copies every backed block in sweep order, recently used blocks first. Returns the recently
    /// used ones.
    pub(crate) fn copy_all(&self) -> Result<Vec<Block>, SaveError> {
        let size = self.options.block_size;
        let mut order = order::plan_blocks(
            &ThrottledReader { memory: self.memory, duty_cycle: self.intake.duty_cycle() },
            self.spaces,
            size,
        )?;
        order.add_unbacked(|block| is_stored_in_parent(self.parent.as_deref(), block));
        let working_set = order.bring_forward(&self.used, size);
        let blocks = order.blocks;
        for (done, &block) in blocks.iter().enumerate() {
            self.copy_block(block)?;
            if done % BLOCKS_PER_REPORT == 0 {
                self.report_progress(done, blocks.len());
            }
            if self.intake.has_failed() {
                break;
            }
        }
        self.report_progress(blocks.len(), blocks.len());
        Ok(working_set)
    }

    fn copy_block(&self, block: Block) -> Result<(), SaveError> {
        let Some(mut bytes) = self.intake.take_buffer() else { return Ok(()) };
        self.memory.read_pages(self.options.block_size.first_page(block), &mut bytes)?;
        self.intake.submit_block(RawBlock { lane: PackingLane::Sweep, block, bytes, again: false });
        Ok(())
    }

    fn report_progress(&self, done: usize, total: usize) {
        let (blocks_done, blocks_total) = (done as u32, total as u32);
        (self.progress)(SaveProgress {
            blocks_done,
            blocks_total,
            bytes_written: self.intake.written_bytes(),
        });
    }
}
