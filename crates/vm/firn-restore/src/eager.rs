//! An eager restore without userfaultfd: all memory is written before the vCPUs run.
//!
//! Nothing is registered, so no page fault has to be answered. The hypervisor must have been
//! started, its vCPUs paused, and its device state must not be loaded yet: loading it may write to
//! guest memory.

use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::thread;

use firn_fault::pass_point;
use firn_image::{Image, LocalityBlockId};
use firn_memory::{GuestMemory, process_memory};
use firn_types::{Block, PAGE_SIZE, Page};

use crate::error::RestoreError;
use crate::image_bytes::UnitBytes;
use crate::options::{RestoreMode, RestoreOptions};
use crate::restore::check_regions;
use crate::storage::UnitStorage;

/// Writes all memory of an image to the hypervisor. `progress` receives the written and the total
/// number of bytes; a thread of this function calls it.
///
/// # Errors
/// If the image cannot be read, or the hypervisor's memory cannot be written. The only thing left
/// to do is then to end the hypervisor.
pub fn fill_all(
    image: &std::sync::Arc<Image>,
    memory: &GuestMemory,
    options: &RestoreOptions,
    progress: &(dyn Fn(u64, u64) + Sync),
) -> Result<(), RestoreError> {
    check_regions(image, memory.region_map())?;
    memory.punch_out(memory.all_pages())?;
    pass_point("restore.punched");
    let storage = UnitStorage::new(image.clone(), RestoreMode::Eager);
    let total =
        u64::from(image.summary().stored_blocks) * image.geometry().block_size.byte_count() as u64;
    let fill = EagerFill {
        memory,
        run_length: options.run_max(storage.unit_bytes()),
        storage,
        next_unit: AtomicU32::new(0),
        written_bytes: AtomicU64::new(0),
        total_bytes: total,
        has_failed: AtomicBool::new(false),
        progress,
    };
    fill.run_threads(options.readers.max(1))
}

/// A fill that several threads share.
struct EagerFill<'a> {
    storage: UnitStorage,
    memory: &'a GuestMemory,
    /// Locality blocks that are read at once.
    run_length: u32,
    next_unit: AtomicU32,
    written_bytes: AtomicU64,
    total_bytes: u64,
    has_failed: AtomicBool,
    progress: &'a (dyn Fn(u64, u64) + Sync),
}

impl EagerFill<'_> {
    fn run_threads(&self, threads: usize) -> Result<(), RestoreError> {
        thread::scope(|scope| {
            let threads: Vec<_> =
                (0..threads).map(|_| scope.spawn(|| self.fill_until_done())).collect();
            let died = |_| Err(RestoreError::Died { name: "eager-fill" });
            threads.into_iter().try_for_each(|thread| thread.join().unwrap_or_else(died))
        })
    }

    /// The loop of one thread: fills the next run of locality blocks until none is left, or a
    /// thread has failed.
    fn fill_until_done(&self) -> Result<(), RestoreError> {
        let end = self.storage.image().locality_blocks();
        let mut raw = vec![0; self.storage.image().geometry().block_size.byte_count()];
        while !self.has_failed.load(Ordering::Relaxed) {
            let first = self.next_unit.fetch_add(self.run_length, Ordering::Relaxed);
            if first >= end {
                break;
            }
            let filled = self.fill_run(first..end.min(first + self.run_length), &mut raw);
            self.has_failed.fetch_or(filled.is_err(), Ordering::Relaxed);
            filled?;
            (self.progress)(self.written_bytes.load(Ordering::Relaxed), self.total_bytes);
        }
        Ok(())
    }

    fn fill_run(&self, units: std::ops::Range<u32>, raw: &mut [u8]) -> Result<(), RestoreError> {
        let bytes = self.storage.read_units(&units, true)?;
        for (unit, bytes) in units.zip(bytes) {
            self.fill_locality_block(LocalityBlockId(unit), &bytes, raw)?;
        }
        Ok(())
    }

    fn fill_locality_block(
        &self,
        id: LocalityBlockId,
        bytes: &UnitBytes,
        raw: &mut [u8],
    ) -> Result<(), RestoreError> {
        let image = self.storage.image();
        for entry in image.entries(id) {
            image.decode_block(entry, self.storage.stored_in(bytes, entry), raw)?;
            self.write_block(entry.block, raw)?;
            self.written_bytes.fetch_add(raw.len() as u64, Ordering::Relaxed);
        }
        Ok(())
    }

    /// A block lies in one region, and may extend past its end.
    fn write_block(&self, block: Block, raw: &[u8]) -> Result<(), RestoreError> {
        let first = self.storage.image().geometry().block_size.first_page(block);
        let regions = self.memory.region_map().regions().iter();
        let region = regions.map(|region| region.page_range()).find(|range| range.contains(&first));
        let (Some(range), Some(hva)) = (region, self.memory.hva_of(first)) else {
            let path = self.storage.image().path().to_owned();
            return Err(RestoreError::NoEntry { path, block });
        };
        let room = Page::count_in(&(first..range.end)) * PAGE_SIZE;
        let written = &raw[..raw.len().min(room)];
        Ok(process_memory::write_memory(self.memory.process(), hva, written)
            .map_err(firn_memory::MemoryError::from)?)
    }
}
