//! Prefill: restores memory while the hypervisor is still starting.
//!
//! QEMU takes longer to start than a cached working set takes to read. The RAM files belong to
//! Firn, so it fills them before any vCPU can fault:
//!
//! ```text
//!   Firn         RAM files made | read, decode, write ............. | stop | register | keep or empty | serve faults
//!   hypervisor                  | starts, maps them, resets the machine .. | is paused
//! ```
//!
//! While it resets the machine, the hypervisor may write to guest RAM, before or after Firn wrote
//! there. So a page is kept only if the page tables of the hypervisor do not map it: then the
//! hypervisor has not written to it. If the kernel has scanned anonymous memory in this time
//! because it was short of memory (it unmaps pages then), nothing is kept. All other contents of
//! the files are emptied, and Firn checks that: a page that counts as missing must be missing, or
//! the guest would see zeros.
//!
//! The starting hypervisor reads files too, often from the same disk. Where the guest does not wait
//! for the prefill, each read is therefore followed by a pause of the same length, unless the
//! storage is known to have high latency. The prefill ends without waiting for the reads that are
//! running.
//!
//! Errors end the prefill without a report: the page server meets them again, and reports them.

use std::collections::VecDeque;
use std::fs::File;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::sync::{Arc, Mutex, PoisonError, RwLock};
use std::thread::JoinHandle;
use std::time::Instant;

use firn_fault::pass_point;
use firn_image::{Image, LocalityBlockId};
use firn_memory::{GuestMemory, Process, mapped_pages};
use firn_types::{Block, PAGE_SIZE, Page, RamRegion};

use crate::error::RestoreError;
use crate::image_bytes::UnitBytes;
use crate::options::{RestoreMode, RestoreOptions};
use crate::server::{
    CoalescingRules, PageServer, PrefetchRequests, ReadReason, SettledPages, StorageCost, UnitRead,
    order_requests,
};
use crate::storage::UnitStorage;
use crate::storage_reads::{StorageReads, bytes_fetched_by};

/// Threads that fill. One processor is left to the hypervisor, which is starting.
const THREAD_COUNT: usize = 2;

/// Their nice value: the hypervisor has priority.
const NICE: i32 = 10;

/// A running prefill. Dropping it ends its threads.
pub struct PrefillThreads {
    job: Arc<PrefillJob>,
    threads: Vec<JoinHandle<()>>,
    scanned_before: Option<u64>,
}

/// The result of a prefill.
#[derive(Debug, Default)]
pub struct PrefilledMemory {
    blocks: Vec<Block>,
    reads: Vec<PrefillRead>,
    is_trusted: bool,
}

/// One read from storage.
#[derive(Clone, Debug)]
pub(crate) struct PrefillRead {
    pub(crate) began: Instant,
    pub(crate) ended: Instant,
    /// The locality blocks.
    pub(crate) read: UnitRead,
    /// The bytes that were fetched from storage for it; `None` if the page cache had them all.
    pub(crate) fetched: Option<u64>,
    /// Offset and length in the image, in bytes.
    pub(crate) extent: (u64, u32),
}

/// The state that the threads share.
struct PrefillJob {
    storage: UnitStorage,
    files: Vec<(RamRegion, File)>,
    queue: Mutex<PrefillQueue>,
    /// Whether each read of low-latency storage is followed by a pause.
    pauses_after_reads: bool,
    /// A thread that writes to memory holds the read lock; once the value is true, no thread
    /// writes.
    is_over: RwLock<bool>,
    filled: Mutex<Vec<Block>>,
    reads: Mutex<Vec<PrefillRead>>,
}

/// The units that are still to be read.
#[derive(Debug)]
struct PrefillQueue {
    low_latency: PendingRequests,
    /// The requests to make instead if earlier restores have found that the storage has high
    /// latency, unless the image is cached.
    high_latency: Option<PendingRequests>,
    /// Whether reads go to storage: true if one did; `None` before the first read.
    from_storage: Option<bool>,
}

/// Requests that are not made yet.
#[derive(Debug)]
struct PendingRequests {
    runs: VecDeque<Range<u32>>,
    covers_all_units: bool,
}

impl PendingRequests {
    fn unit_count(&self) -> usize {
        self.runs.iter().map(ExactSizeIterator::len).sum()
    }
}

impl From<PrefetchRequests> for PendingRequests {
    fn from(PrefetchRequests { runs, covers_all_units }: PrefetchRequests) -> Self {
        Self { runs: runs.into(), covers_all_units }
    }
}

impl PrefillThreads {
    /// Begins to fill RAM files with the pages that these options want early. There must be one
    /// file for each region of the image, in order, and nothing else may write to them before the
    /// hypervisor does.
    pub fn start_fill(image: Arc<Image>, options: &RestoreOptions, files: Vec<File>) -> Self {
        let files = image.regions().regions().iter().cloned().zip(files).collect();
        let storage = UnitStorage::new(image, options.mode);
        let queue = PrefillQueue::new(&storage, options);
        let wanted = if queue.is_empty() { 0 } else { THREAD_COUNT };
        let waits = options.must_guest_wait(queue.low_latency.unit_count(), storage.unit_bytes());
        let rests = options.mode == RestoreMode::Auto && !waits;
        let job = PrefillJob {
            storage,
            files,
            queue: Mutex::new(queue),
            pauses_after_reads: rests,
            is_over: RwLock::new(false),
            filled: Mutex::default(),
            reads: Mutex::default(),
        };
        let job = Arc::new(job);
        let threads = (0..wanted).filter_map(|_| spawn_thread(&job)).collect();
        Self { job, threads, scanned_before: anonymous_pages_scanned() }
    }

    /// Ends the prefill, wherever it is.
    pub fn finish_fill(mut self) -> PrefilledMemory {
        self.stop_writing();
        let scanned = anonymous_pages_scanned();
        let blocks = std::mem::take(&mut *self.job.lock_filled());
        let mut reads = std::mem::take(&mut *self.job.lock_reads());
        reads.sort_by_key(|read| read.ended);
        PrefilledMemory {
            blocks,
            reads,
            is_trusted: scanned.is_some() && scanned == self.scanned_before,
        }
    }

    /// From here on no thread writes. A thread that is reading or sleeping ends by itself.
    fn stop_writing(&mut self) {
        self.job.stop_writing();
        for thread in self.threads.drain(..).filter(JoinHandle::is_finished) {
            if thread.join().is_err() {
                tracing::error!("a thread that filled memory has died (this is a bug in Firn)");
                self.job.lock_filled().clear();
            }
        }
    }
}

impl Drop for PrefillThreads {
    fn drop(&mut self) {
        self.stop_writing();
    }
}

impl std::fmt::Debug for PrefillThreads {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("PrefillThreads")
            .field("queue", &self.job.lock_queue())
            .finish_non_exhaustive()
    }
}

impl PrefilledMemory {
    /// The reads of the prefill, until it ended.
    pub(crate) fn prefill_reads(&self) -> &[PrefillRead] {
        &self.reads
    }

    /// Reports the times of the reads to the page server. To be called before any other read.
    /// The hypervisor has read what it needs beside them.
    pub(crate) fn report_reads(
        &self,
        server: &mut PageServer<UnitBytes>,
        hypervisor: &Process,
        since: Instant,
    ) {
        if !self.reads.is_empty() {
            server.record_other_reads(bytes_fetched_by(hypervisor));
        }
        for read in &self.reads {
            let Some(fetched) = read.fetched else { continue };
            server.record_storage_access();
            server.record_read_time(&read.read, fetched, read.began - since, read.ended - since);
        }
    }

    /// The memory blocks that were filled, kept or not.
    pub(crate) fn filled_blocks(&self) -> &[Block] {
        &self.blocks
    }

    /// Empties the RAM files of all pages that can't be kept, and settles the others. The range
    /// must be registered already, and the vCPUs paused. Returns the number of pages kept.
    pub(crate) fn keep_untouched(
        &self,
        memory: &GuestMemory,
        settled: &mut SettledPages,
    ) -> Result<u64, RestoreError> {
        let nothing = settled.clone();
        if self.is_trusted && !self.blocks.is_empty() {
            self.settle_unmapped(memory, settled)?;
            for run in unsettled_runs(&memory.backed_runs()?, settled) {
                memory.punch_out(run)?;
            }
            if unsettled_runs(&memory.backed_runs()?, settled).is_empty() {
                return Ok(u64::from(
                    count_missing(&nothing, memory) - count_missing(settled, memory),
                ));
            }
        }
        *settled = nothing;
        memory.punch_out(Page(0)..Page(memory.region_map().total_pages()))?;
        Ok(0)
    }

    fn settle_unmapped(
        &self,
        memory: &GuestMemory,
        settled: &mut SettledPages,
    ) -> Result<(), RestoreError> {
        for &block in &self.blocks {
            settled.insert_in(block, settled.missing_in(block));
        }
        // Pages between regions stay settled, and are never mapped as RAM.
        for run in mapped_pages(memory)? {
            Page::iter_range(run).for_each(|page| settled.remove(page));
        }
        Ok(())
    }
}

/// Pages of RAM that are not settled.
fn count_missing(settled: &SettledPages, memory: &GuestMemory) -> u32 {
    let pages = memory
        .region_map()
        .regions()
        .iter()
        .flat_map(|region| Page::iter_range(region.page_range()));
    pages.filter(|&page| !settled.contains(page)).count() as u32
}

/// The pages of these runs that are not settled, in runs.
fn unsettled_runs(runs: &[Range<Page>], settled: &SettledPages) -> Vec<Range<Page>> {
    let mut out: Vec<Range<Page>> = Vec::new();
    let pages = runs.iter().flat_map(|run| Page::iter_range(run.clone()));
    for page in pages.filter(|&page| !settled.contains(page)) {
        match out.last_mut() {
            Some(last) if last.end == page => last.end = Page(page.0 + 1),
            _ => out.push(page..Page(page.0 + 1)),
        }
    }
    out
}

impl PrefillQueue {
    fn new(storage: &UnitStorage, options: &RestoreOptions) -> Self {
        let (image, longest) = (storage.image(), options.run_max(storage.unit_bytes()));
        let (units, end, mode) =
            (wanted_units(image, options), image.locality_blocks(), options.mode);
        let known_latency = options.known_latency.filter(|_| options.is_adaptive_to_storage());
        let high_latency = known_latency.map(|latency| {
            let cost = StorageCost::from_known_latency(storage.unit_bytes(), latency);
            let all = if options.may_read_all() { all_units(image) } else { Vec::new() };
            PrefetchRequests::new(&units, &all, options.expected_misses(), (end, longest), &cost)
                .into()
        });
        let (runs, covers_all_units) = (
            order_requests(&units, end, CoalescingRules::low_latency(longest)),
            mode == RestoreMode::Eager,
        );
        Self {
            low_latency: PrefetchRequests { runs, covers_all_units }.into(),
            high_latency,
            from_storage: None,
        }
    }

    /// Whether the storage has high latency, as far as is known, and reads go there.
    fn uses_high_latency(&self) -> bool {
        self.high_latency.is_some() && self.from_storage != Some(false)
    }

    fn record_read(&mut self, from_storage: bool) {
        // Data that the kernel has read ahead is in memory, too.
        if self.from_storage != Some(true) {
            self.from_storage = Some(from_storage);
        }
    }

    fn is_empty(&self) -> bool {
        self.low_latency.runs.is_empty()
            && self.high_latency.as_ref().is_none_or(|requests| requests.runs.is_empty())
    }

    fn next_read(&mut self) -> Option<UnitRead> {
        let is_high_latency = self.uses_high_latency();
        let PendingRequests { runs, covers_all_units } = match &mut self.high_latency {
            Some(requests) if is_high_latency => requests,
            _ => &mut self.low_latency,
        };
        let in_order = *covers_all_units;
        runs.pop_front().map(|units| UnitRead { units, why: ReadReason::Ahead, in_order })
    }
}

/// The units to fill at once, in order.
fn wanted_units(image: &Image, options: &RestoreOptions) -> Vec<u32> {
    match options.mode {
        RestoreMode::Lazy | RestoreMode::Locality => Vec::new(),
        RestoreMode::Eager => all_units(image),
        RestoreMode::WorkingSet | RestoreMode::Auto => {
            units_of(image, &options.expected_blocks(image))
        }
    }
}

fn all_units(image: &Image) -> Vec<u32> {
    (0..image.locality_blocks()).filter(|&unit| has_blocks(image, unit)).collect()
}

/// In an image of a chain, newer images may have other content for all memory blocks of a locality
/// block.
fn has_blocks(image: &Image, unit: u32) -> bool {
    !image.entries(LocalityBlockId(unit)).is_empty()
}

/// The locality blocks that hold these memory blocks, in the order in which they are first
/// mentioned.
fn units_of(image: &Image, blocks: &[Block]) -> Vec<u32> {
    let mut seen = vec![false; image.locality_blocks() as usize];
    let units = blocks.iter().filter_map(|&block| image.entry_of(block).map(|(id, _)| id.0));
    units.filter(|&unit| !std::mem::replace(&mut seen[unit as usize], true)).collect()
}

fn spawn_thread(job: &Arc<PrefillJob>) -> Option<JoinHandle<()>> {
    let job = Arc::clone(job);
    let named = std::thread::Builder::new().name("prefill".into());
    // Without a thread memory is restored later, with no other effect.
    named.spawn(move || job.run_thread()).ok()
}

impl PrefillJob {
    fn lock_filled(&self) -> std::sync::MutexGuard<'_, Vec<Block>> {
        self.filled.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn lock_reads(&self) -> std::sync::MutexGuard<'_, Vec<PrefillRead>> {
        self.reads.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn run_thread(&self) {
        // For this thread alone. Without it everything works the same, only less smoothly.
        let _ = rustix::process::setpriority_process(None, NICE);
        let mut raw = vec![0; self.storage.image().geometry().block_size.byte_count()];
        let mut storage = StorageReads::of_this_thread();
        while !self.is_over() {
            let next = self.lock_queue().next_read();
            let Some(next) = next else { break };
            pass_point("restore.prefill");
            if self.fill_units(next, &mut raw, &mut storage).is_none() {
                self.stop_writing();
            }
        }
    }

    fn lock_queue(&self) -> std::sync::MutexGuard<'_, PrefillQueue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn stop_writing(&self) {
        *self.is_over.write().unwrap_or_else(PoisonError::into_inner) = true;
    }

    fn is_over(&self) -> bool {
        *self.is_over.read().unwrap_or_else(PoisonError::into_inner)
    }

    /// Fills the units of one read. `None` after an error.
    fn fill_units(&self, read: UnitRead, raw: &mut [u8], storage: &mut StorageReads) -> Option<()> {
        let (image, run, began) = (self.storage.image(), read.units.clone(), Instant::now());
        let (units, took) = (self.read_units(read, storage)?, began.elapsed());
        for (unit, bytes) in run.zip(units) {
            for entry in image.entries(LocalityBlockId(unit)) {
                image.decode_block(entry, self.storage.stored_in(&bytes, entry), raw).ok()?;
                self.put_block(entry.block, raw)?;
            }
        }
        if self.pauses_after_reads && !self.lock_queue().uses_high_latency() {
            std::thread::sleep(took);
        }
        Some(())
    }

    fn read_units(&self, read: UnitRead, storage: &mut StorageReads) -> Option<Vec<UnitBytes>> {
        let began = Instant::now();
        let units = self.storage.read_units(&read.units, read.in_order).ok()?;
        let (ended, extent) = (Instant::now(), self.storage.extent_of(&read.units));
        let fetched = storage.take_fetched();
        self.lock_queue().record_read(fetched.is_some());
        self.lock_reads().push(PrefillRead { began, ended, read, fetched, extent });
        Some(units)
    }

    /// Writes one block. `None` also if the prefill is over.
    fn put_block(&self, block: Block, raw: &[u8]) -> Option<()> {
        let is_over = self.is_over.read().unwrap_or_else(PoisonError::into_inner);
        if *is_over {
            return None;
        }
        self.write_block(block, raw)?;
        self.lock_filled().push(block);
        Some(())
    }

    /// A block lies in one region, and may extend past its end.
    fn write_block(&self, block: Block, raw: &[u8]) -> Option<()> {
        let first = self.storage.image().geometry().block_size.first_page(block);
        let inside = |(region, _): &&(RamRegion, File)| region.page_range().contains(&first);
        let (region, file) = self.files.iter().find(inside)?;
        let room = Page::count_in(&(first..region.page_range().end)) * PAGE_SIZE;
        file.write_all_at(&raw[..raw.len().min(room)], region.offset_of(first)).ok()
    }
}

/// The number of pages of anonymous and shared memory that the kernel has scanned for reclaim since
/// it booted (`pgscan_anon` of `/proc/vmstat`). `None` if the kernel does not report it.
fn anonymous_pages_scanned() -> Option<u64> {
    let text = std::fs::read_to_string("/proc/vmstat").ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix("pgscan_anon "))?;
    line.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use firn_types::{BlockSize, RegionMap};

    #[test]
    fn this_kernel_reports_the_scanned_range() {
        assert!(anonymous_pages_scanned().is_some());
    }

    #[test]
    fn high_latency_storage_is_read_in_file_order_unless_cached() {
        let runs = |first: u32, covers_all_units| PendingRequests {
            runs: (0..9).map(|run| first + run..first + run + 1).collect(),
            covers_all_units,
        };
        let mut queue = PrefillQueue {
            low_latency: runs(0, false),
            high_latency: Some(runs(100, true)),
            from_storage: None,
        };
        let mut first = || queue.next_read().map(|read| (read.units.start, read.in_order));
        assert_eq!(first(), Some((100, true)));
        queue.record_read(false);
        let next = queue.next_read().unwrap();
        assert_eq!((next.units.start, next.in_order, queue.uses_high_latency()), (0, false, false));
        queue.record_read(true);
        queue.record_read(false);
        let next = queue.next_read().unwrap();
        assert_eq!((next.units.start, next.in_order, queue.uses_high_latency()), (101, true, true));
    }

    #[test]
    fn backed_and_unsettled_pages_are_reported_in_runs() {
        let ram = RegionMap::lay_out([("ram", 64 * 4096)]).unwrap();
        let mut settled = SettledPages::new(&ram, BlockSize::default());
        [3, 4, 9].into_iter().for_each(|page| settled.insert(Page(page)));
        let backed = [Page(1)..Page(6), Page(8)..Page(10)];
        let found = unsettled_runs(&backed, &settled);
        assert_eq!(found, [Page(1)..Page(3), Page(5)..Page(6), Page(8)..Page(9)]);
    }
}
