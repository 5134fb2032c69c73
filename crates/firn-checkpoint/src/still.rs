//! Stop-and-copy: copies all of RAM while the vCPUs are paused.

use std::ops::Range;
use std::sync::Arc;

use firn_image::Image;
use firn_memory::GuestMemory;
use firn_types::{Block, Page};

use crate::lane::Lane;
use crate::options::SaveOptions;
use crate::order::{self, AddressSpaces, Resting};
use crate::pipeline::{Intake, RawBlock};
use crate::pre_copy::stores;
use crate::report::Progress;
use crate::save::SaveError;

/// Blocks between two progress reports.
const REPORT_EVERY: usize = 1024;

/// Copies the memory of a stopped VM.
pub(crate) struct Still<'a> {
    pub(crate) memory: &'a GuestMemory,
    pub(crate) spaces: &'a AddressSpaces,
    /// The pages that the guest used before it was stopped.
    pub(crate) used: Vec<Range<Page>>,
    pub(crate) parent: Option<Arc<Image>>,
    pub(crate) options: &'a SaveOptions,
    pub(crate) intake: &'a Intake,
    pub(crate) progress: &'a dyn Fn(Progress),
}

impl Still<'_> {
    /// Copies every backed block in sweep order, recently used blocks first. Returns the recently
    /// used ones.
    pub(crate) fn copy_all(&self) -> Result<Vec<Block>, SaveError> {
        let size = self.options.block_size;
        let mut order = order::blocks(
            &Resting { memory: self.memory, turns: self.intake.turns() },
            self.spaces,
            size,
        )?;
        order.add_unbacked(|block| stores(self.parent.as_deref(), block));
        let working_set = order.bring_forward(&self.used, size);
        let blocks = order.blocks;
        for (done, &block) in blocks.iter().enumerate() {
            self.copy(block)?;
            if done % REPORT_EVERY == 0 {
                self.report(done, blocks.len());
            }
            if self.intake.failed() {
                break;
            }
        }
        self.report(blocks.len(), blocks.len());
        Ok(working_set)
    }

    fn copy(&self, block: Block) -> Result<(), SaveError> {
        let Some(mut bytes) = self.intake.buffer() else { return Ok(()) };
        self.memory.read(self.options.block_size.first_page(block), &mut bytes)?;
        self.intake.submit(RawBlock { lane: Lane::Sweep, block, bytes, again: false });
        Ok(())
    }

    fn report(&self, done: usize, total: usize) {
        let (blocks_done, blocks_total) = (done as u32, total as u32);
        (self.progress)(Progress {
            blocks_done,
            blocks_total,
            bytes_written: self.intake.written(),
        });
    }
}
