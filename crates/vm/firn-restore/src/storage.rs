//! Image storage: reads the image unit by unit.
//!
//! ```text
//!   unit            locality restore                   lazy restore
//!   try_block       pread of one memory block          the same
//!   try_unit        pread of one locality block        pread of one memory block
//!   read            pread of neighbouring ones         pread of one memory block
//! ```
//!
//! The two `try` calls take bytes from the page cache and never wait for storage; if the page cache
//! does not have them, the kernel has begun to read them when the call returns.

use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use firn_image::{BlockEntry, BlockPlacement, Image, LocalityBlockId, ReadOrder};
use firn_types::Block;

use crate::error::RestoreError;
use crate::image_bytes::{BufferPool, UnitBytes};
use crate::options::RestoreMode;
use crate::server::{ReadPlan, ReadUnit};

/// An image, and how it is divided into read units.
#[derive(Debug)]
pub(crate) struct UnitStorage {
    image: Arc<Image>,
    /// In a lazy restore, the memory block that is each unit.
    singles: Option<Vec<Block>>,
    pool: Arc<BufferPool>,
    /// When the image's files were last opened again.
    reopened: Mutex<Option<Instant>>,
}

/// The minimum time between two attempts to open the image's files again.
const REOPEN_PAUSE: Duration = Duration::from_millis(500);

impl UnitStorage {
    pub(crate) fn new(image: Arc<Image>, mode: RestoreMode) -> Self {
        image.advise_order(ReadOrder::Random);
        let singles = (mode == RestoreMode::Lazy).then(|| stored_blocks(&image).collect());
        Self { image, singles, pool: Arc::default(), reopened: Mutex::default() }
    }

    pub(crate) fn image(&self) -> &Image {
        &self.image
    }

    /// Opens the image's files again where they can be opened and are the same image: after a
    /// failure of the network, a descriptor may be unusable; and a file that was removed may have
    /// returned.
    pub(crate) fn reopen_image(&self) {
        let now = Instant::now();
        let mut reopened = self.reopened.lock().unwrap_or_else(PoisonError::into_inner);
        if reopened.is_some_and(|before| now - before < REOPEN_PAUSE) {
            return;
        }
        *reopened = Some(now);
        drop(reopened);
        if let Err(error) = self.image.reopen() {
            tracing::debug!(error = &error as &dyn std::error::Error, "cannot reopen the image");
        }
    }

    /// The memory blocks of each read unit.
    pub(crate) fn read_plan(&self) -> ReadPlan {
        let mut plan = ReadPlan::new(self.image.geometry().block_count());
        match &self.singles {
            Some(blocks) => blocks.iter().for_each(|&block| {
                plan.push_unit([block]);
            }),
            None => (0..self.image.locality_blocks()).map(LocalityBlockId).for_each(|id| {
                plan.push_unit(self.image.entries(id).iter().map(|entry| entry.block));
            }),
        }
        plan
    }

    /// Maximum number of bytes of a read unit.
    pub(crate) fn unit_bytes(&self) -> u32 {
        let geometry = self.image.geometry();
        match self.singles {
            Some(_) => geometry.block_size.byte_count() as u32,
            None => geometry.locality_block_bytes,
        }
    }

    /// The location of the stored bytes of a memory block.
    pub(crate) fn locate_block(
        &self,
        block: Block,
    ) -> Result<(LocalityBlockId, BlockEntry), RestoreError> {
        let found = self.image.entry_of(block).map(|(id, entry)| (id, *entry));
        found.ok_or_else(|| RestoreError::NoEntry { path: self.image.path().to_owned(), block })
    }

    /// Reads the stored bytes of one memory block, if the page cache has them.
    pub(crate) fn try_read_block(
        &self,
        (id, entry): (LocalityBlockId, BlockEntry),
        stored: &mut Vec<u8>,
    ) -> Result<bool, RestoreError> {
        Ok(self.image.try_read_entry(&entry, id, stored)?)
    }

    /// Reads the stored bytes of one memory block.
    pub(crate) fn read_block(
        &self,
        (id, entry): (LocalityBlockId, BlockEntry),
        stored: &mut Vec<u8>,
    ) -> Result<(), RestoreError> {
        Ok(self.image.read_entry(&entry, id, stored)?)
    }

    /// Reads a unit, if the page cache has it.
    pub(crate) fn try_read_unit(&self, unit: ReadUnit) -> Result<Option<UnitBytes>, RestoreError> {
        let mut buffer = self.pool.take_buffer();
        let cached = match &self.singles {
            Some(_) => {
                let (id, entry) = self.locate_block(self.single_block(unit))?;
                self.image.try_read_entry(&entry, id, &mut buffer)?
            }
            None => self.image.try_read_locality_block(LocalityBlockId(unit.0), &mut buffer)?,
        };
        let run = self.pool.wrap_buffer(buffer);
        Ok(cached.then(|| UnitBytes::new(run, 0)))
    }

    /// Reads neighbouring units, with one request as far as possible; with more than one if
    /// `in_order`, in which case the units that follow are wanted as well. Returns the bytes of
    /// each.
    pub(crate) fn read_units(
        &self,
        units: &Range<u32>,
        in_order: bool,
    ) -> Result<Vec<UnitBytes>, RestoreError> {
        let order = if in_order { ReadOrder::Sequential } else { ReadOrder::Random };
        match &self.singles {
            Some(_) => units.clone().map(|unit| self.read_single(ReadUnit(unit))).collect(),
            None => self.read_run(units, order),
        }
    }

    fn read_single(&self, unit: ReadUnit) -> Result<UnitBytes, RestoreError> {
        let mut buffer = self.pool.take_buffer();
        self.read_block(self.locate_block(self.single_block(unit))?, &mut buffer)?;
        Ok(UnitBytes::new(self.pool.wrap_buffer(buffer), 0))
    }

    fn read_run(
        &self,
        units: &Range<u32>,
        order: ReadOrder,
    ) -> Result<Vec<UnitBytes>, RestoreError> {
        let mut buffer = self.pool.take_buffer();
        let ids = LocalityBlockId(units.start)..LocalityBlockId(units.end);
        self.image.read_locality_blocks(ids, order, &mut buffer)?;
        let run = self.pool.wrap_buffer(buffer);
        let bytes = self.unit_bytes() as usize;
        Ok((0..units.len()).map(|at| UnitBytes::new(run.clone(), at * bytes)).collect())
    }

    /// The stored bytes of a memory block in those of its unit. Shorter than they should be only if
    /// the image is wrong.
    pub(crate) fn stored_in<'a>(&self, bytes: &'a UnitBytes, entry: &BlockEntry) -> &'a [u8] {
        let (start, len) = match self.singles {
            Some(_) => (0, entry.stored_len as usize),
            None => (entry.offset as usize, entry.stored_len as usize),
        };
        let all = bytes.to_read_end();
        let start = start.min(all.len());
        &all[start..all.len().min(start + len)]
    }

    /// The offset of a unit in the file, and its length, in bytes.
    pub(crate) fn unit_extent(&self, unit: ReadUnit) -> (u64, u32) {
        match self.singles.as_ref().map(|_| self.locate_block(self.single_block(unit))) {
            Some(Ok((id, entry))) => {
                (self.image.offset_of(id) + u64::from(entry.offset), entry.stored_len)
            }
            Some(Err(_)) => (0, 0),
            None => {
                let id = LocalityBlockId(unit.0);
                (self.image.offset_of(id), self.image.used_bytes(id) as u32)
            }
        }
    }

    /// The offset of neighbouring units in the file, and their length together.
    pub(crate) fn extent_of(&self, units: &Range<u32>) -> (u64, u32) {
        let (offset, _) = self.unit_extent(ReadUnit(units.start));
        let (last, len) = self.unit_extent(ReadUnit(units.end.saturating_sub(1)));
        (offset, (last + u64::from(len)).saturating_sub(offset) as u32)
    }

    fn single_block(&self, unit: ReadUnit) -> Block {
        let blocks = self.singles.as_deref().unwrap_or_default();
        blocks.get(unit.index()).copied().unwrap_or(Block(u32::MAX))
    }
}

/// All memory blocks that the image stores, in physical order.
fn stored_blocks(image: &Image) -> impl Iterator<Item = Block> {
    let blocks = (0..image.geometry().block_count()).map(Block);
    blocks.filter(|&block| matches!(image.placement_of(block), BlockPlacement::Stored { .. }))
}
