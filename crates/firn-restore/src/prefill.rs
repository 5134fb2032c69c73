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

use firn_fault::point;
use firn_image::{Image, LocalityBlockId};
use firn_memory::{GuestMemory, mapped_pages};
use firn_types::{Block, PAGE_SIZE, Page, RamRegion};

use crate::bytes::Bytes;
use crate::error::RestoreError;
use crate::options::{Mode, RestoreOptions};
use crate::server::{Cost, Reach, Read, Requests, Server, Settled, Why, sequence};
use crate::storage::Storage;
use crate::storage_reads::StorageReads;

/// Threads that fill. One processor is left to the hypervisor, which is starting.
const THREADS: usize = 2;

/// Their nice value: the hypervisor has priority.
const NICE: i32 = 10;

/// A running prefill. Dropping it ends its threads.
pub struct Prefill {
    job: Arc<Job>,
    threads: Vec<JoinHandle<()>>,
    scanned_before: Option<u64>,
}

/// The result of a prefill.
#[derive(Debug, Default)]
pub struct Prefilled {
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
    pub(crate) read: Read,
    /// Whether the page cache did not have them.
    pub(crate) from_storage: bool,
    /// Offset and length in the image, in bytes.
    pub(crate) place: (u64, u32),
}

/// The state that the threads share.
struct Job {
    storage: Storage,
    files: Vec<(RamRegion, File)>,
    queue: Mutex<Queue>,
    /// Whether each read of low-latency storage is followed by a pause.
    rests: bool,
    /// A thread that writes to memory holds the read lock; once the value is true, no thread
    /// writes.
    is_over: RwLock<bool>,
    filled: Mutex<Vec<Block>>,
    reads: Mutex<Vec<PrefillRead>>,
}

/// The units that are still to be read.
#[derive(Debug)]
struct Queue {
    near: Runs,
    /// The requests to make instead if earlier restores have found that the storage has high
    /// latency, unless the image is cached.
    far: Option<Runs>,
    /// Whether reads go to storage: true if one did; `None` before the first read.
    from_storage: Option<bool>,
}

/// Requests that are not made yet.
#[derive(Debug)]
struct Runs {
    runs: VecDeque<Range<u32>>,
    in_order: bool,
}

impl Runs {
    fn units(&self) -> usize {
        self.runs.iter().map(ExactSizeIterator::len).sum()
    }
}

impl From<Requests> for Runs {
    fn from(Requests { runs, in_order }: Requests) -> Self {
        Self { runs: runs.into(), in_order }
    }
}

impl Prefill {
    /// Begins to fill RAM files with the pages that these options want early. There must be one
    /// file for each region of the image, in order, and nothing else may write to them before the
    /// hypervisor does.
    pub fn start(image: Arc<Image>, options: &RestoreOptions, files: Vec<File>) -> Self {
        let files = image.regions().regions().iter().cloned().zip(files).collect();
        let storage = Storage::new(image, options.mode);
        let queue = Queue::new(&storage, options);
        let wanted = if queue.is_empty() { 0 } else { THREADS };
        let waits = options.guest_waits(queue.near.units(), storage.unit_bytes());
        let rests = options.mode == Mode::Auto && !waits;
        let job = Job {
            storage,
            files,
            queue: Mutex::new(queue),
            rests,
            is_over: RwLock::new(false),
            filled: Mutex::default(),
            reads: Mutex::default(),
        };
        let job = Arc::new(job);
        let threads = (0..wanted).filter_map(|_| spawn(&job)).collect();
        Self { job, threads, scanned_before: anonymous_pages_scanned() }
    }

    /// Ends the prefill, wherever it is.
    pub fn finish(mut self) -> Prefilled {
        self.end();
        let scanned = anonymous_pages_scanned();
        let blocks = std::mem::take(&mut *self.job.filled());
        let mut reads = std::mem::take(&mut *self.job.reads());
        reads.sort_by_key(|read| read.ended);
        Prefilled { blocks, reads, is_trusted: scanned.is_some() && scanned == self.scanned_before }
    }

    /// From here on no thread writes. A thread that is reading or sleeping ends by itself.
    fn end(&mut self) {
        self.job.end();
        for thread in self.threads.drain(..).filter(JoinHandle::is_finished) {
            if thread.join().is_err() {
                tracing::error!("a thread that filled memory has died (this is a bug in Firn)");
                self.job.filled().clear();
            }
        }
    }
}

impl Drop for Prefill {
    fn drop(&mut self) {
        self.end();
    }
}

impl std::fmt::Debug for Prefill {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("PrefillThreads").field("queue", &self.job.queue()).finish_non_exhaustive()
    }
}

impl Prefilled {
    /// The reads of the prefill, until it ended.
    pub(crate) fn reads(&self) -> &[PrefillRead] {
        &self.reads
    }

    /// Reports the times of the reads to the page server. To be called before any other read.
    pub(crate) fn tell(&self, server: &mut Server<Bytes>, since: Instant) {
        for read in self.reads.iter().filter(|read| read.from_storage) {
            server.went_to_storage();
            server.read_took(&read.read, read.began - since, read.ended - since);
        }
    }

    /// The memory blocks that were filled, kept or not.
    pub(crate) fn blocks(&self) -> &[Block] {
        &self.blocks
    }

    /// Empties the RAM files of all pages that can't be kept, and settles the others. The range
    /// must be registered already, and the vCPUs paused. Returns the number of pages kept.
    pub(crate) fn keep(
        &self,
        memory: &GuestMemory,
        settled: &mut Settled,
    ) -> Result<u64, RestoreError> {
        let nothing = settled.clone();
        if self.is_trusted && !self.blocks.is_empty() {
            self.settle(memory, settled)?;
            for run in unsettled(&memory.backed_runs()?, settled) {
                memory.punch_out(run)?;
            }
            if unsettled(&memory.backed_runs()?, settled).is_empty() {
                return Ok(u64::from(count(&nothing, memory) - count(settled, memory)));
            }
        }
        *settled = nothing;
        memory.punch_out(Page(0)..Page(memory.map().total_pages()))?;
        Ok(0)
    }

    fn settle(&self, memory: &GuestMemory, settled: &mut Settled) -> Result<(), RestoreError> {
        for &block in &self.blocks {
            settled.insert_in(block, settled.missing(block));
        }
        // Pages between regions stay settled, and are never mapped as RAM.
        for run in mapped_pages(memory)? {
            Page::each(run).for_each(|page| settled.remove(page));
        }
        Ok(())
    }
}

/// Pages of RAM that are not settled.
fn count(settled: &Settled, memory: &GuestMemory) -> u32 {
    let pages = memory.map().regions().iter().flat_map(|region| Page::each(region.range()));
    pages.filter(|&page| !settled.contains(page)).count() as u32
}

/// The pages of these runs that are not settled, in runs.
fn unsettled(runs: &[Range<Page>], settled: &Settled) -> Vec<Range<Page>> {
    let mut out: Vec<Range<Page>> = Vec::new();
    let pages = runs.iter().flat_map(|run| Page::each(run.clone()));
    for page in pages.filter(|&page| !settled.contains(page)) {
        match out.last_mut() {
            Some(last) if last.end == page => last.end = Page(page.0 + 1),
            _ => out.push(page..Page(page.0 + 1)),
        }
    }
    out
}

impl Queue {
    fn new(storage: &Storage, options: &RestoreOptions) -> Self {
        let (image, longest) = (storage.image(), options.run_max(storage.unit_bytes()));
        let (units, end, mode) = (units(image, options), image.locality_blocks(), options.mode);
        let far = options.way.filter(|_| options.adapts());
        let far = far.map(|way| {
            let cost = Cost::told(storage.unit_bytes(), way);
            let all = if options.may_read_all() { all_units(image) } else { Vec::new() };
            Requests::new(&units, &all, options.missed(), (end, longest), &cost).into()
        });
        let (runs, in_order) = (sequence(&units, end, Reach::near(longest)), mode == Mode::Eager);
        Self { near: Requests { runs, in_order }.into(), far, from_storage: None }
    }

    /// Whether the storage has high latency, as far as is known, and reads go there.
    fn is_far(&self) -> bool {
        self.far.is_some() && self.from_storage != Some(false)
    }

    fn was_read(&mut self, from_storage: bool) {
        // Data that the kernel has read ahead is in memory, too.
        if self.from_storage != Some(true) {
            self.from_storage = Some(from_storage);
        }
    }

    fn is_empty(&self) -> bool {
        self.near.runs.is_empty() && self.far.as_ref().is_none_or(|far| far.runs.is_empty())
    }

    fn next(&mut self) -> Option<Read> {
        let is_far = self.is_far();
        let Runs { runs, in_order } = match &mut self.far {
            Some(far) if is_far => far,
            _ => &mut self.near,
        };
        let in_order = *in_order;
        runs.pop_front().map(|units| Read { units, why: Why::Ahead, in_order })
    }
}

/// The units to fill at once, in order.
fn units(image: &Image, options: &RestoreOptions) -> Vec<u32> {
    match options.mode {
        Mode::Lazy | Mode::Locality => Vec::new(),
        Mode::Eager => all_units(image),
        Mode::WorkingSet | Mode::Auto => units_of(image, &options.expected(image)),
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

fn spawn(job: &Arc<Job>) -> Option<JoinHandle<()>> {
    let job = Arc::clone(job);
    let named = std::thread::Builder::new().name("prefill".into());
    // Without a thread memory is restored later, with no other effect.
    named.spawn(move || job.run()).ok()
}

impl Job {
    fn filled(&self) -> std::sync::MutexGuard<'_, Vec<Block>> {
        self.filled.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn reads(&self) -> std::sync::MutexGuard<'_, Vec<PrefillRead>> {
        self.reads.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn run(&self) {
        // For this thread alone. Without it everything works the same, only less smoothly.
        let _ = rustix::process::setpriority_process(None, NICE);
        let mut raw = vec![0; self.storage.image().geometry().block_size.bytes()];
        let mut storage = StorageReads::of_this_thread();
        while !self.is_over() {
            let next = self.queue().next();
            let Some(next) = next else { break };
            point("restore.prefill");
            if self.fill(next, &mut raw, &mut storage).is_none() {
                self.end();
            }
        }
    }

    fn queue(&self) -> std::sync::MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn end(&self) {
        *self.is_over.write().unwrap_or_else(PoisonError::into_inner) = true;
    }

    fn is_over(&self) -> bool {
        *self.is_over.read().unwrap_or_else(PoisonError::into_inner)
    }

    /// Fills the units of one read. `None` after an error.
    fn fill(&self, read: Read, raw: &mut [u8], storage: &mut StorageReads) -> Option<()> {
        let (image, run, began) = (self.storage.image(), read.units.clone(), Instant::now());
        let (units, took) = (self.read(read, storage)?, began.elapsed());
        for (unit, bytes) in run.zip(units) {
            for entry in image.entries(LocalityBlockId(unit)) {
                image.decode(entry, self.storage.stored_in(&bytes, entry), raw).ok()?;
                self.put(entry.block, raw)?;
            }
        }
        if self.rests && !self.queue().is_far() {
            std::thread::sleep(took);
        }
        Some(())
    }

    fn read(&self, read: Read, storage: &mut StorageReads) -> Option<Vec<Bytes>> {
        let began = Instant::now();
        let units = self.storage.read(&read.units, read.in_order).ok()?;
        let (ended, place) = (Instant::now(), self.storage.place_of(&read.units));
        let from_storage = storage.any();
        self.queue().was_read(from_storage);
        self.reads().push(PrefillRead { began, ended, read, from_storage, place });
        Some(units)
    }

    /// Writes one block. `None` also if the prefill is over.
    fn put(&self, block: Block, raw: &[u8]) -> Option<()> {
        let is_over = self.is_over.read().unwrap_or_else(PoisonError::into_inner);
        if *is_over {
            return None;
        }
        self.write(block, raw)?;
        self.filled().push(block);
        Some(())
    }

    /// A block lies in one region, and may extend past its end.
    fn write(&self, block: Block, raw: &[u8]) -> Option<()> {
        let first = self.storage.image().geometry().block_size.first_page(block);
        let inside = |(region, _): &&(RamRegion, File)| region.range().contains(&first);
        let (region, file) = self.files.iter().find(inside)?;
        let room = Page::count(&(first..region.range().end)) * PAGE_SIZE;
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
    fn this_kernel_tells_what_it_has_scanned() {
        assert!(anonymous_pages_scanned().is_some());
    }

    #[test]
    fn far_storage_is_read_by_place_unless_the_image_is_cached() {
        let runs = |first: u32, in_order| Runs {
            runs: (0..9).map(|run| first + run..first + run + 1).collect(),
            in_order,
        };
        let mut queue =
            Queue { near: runs(0, false), far: Some(runs(100, true)), from_storage: None };
        let mut first = || queue.next().map(|read| (read.units.start, read.in_order));
        assert_eq!(first(), Some((100, true)));
        queue.was_read(false);
        let next = queue.next().unwrap();
        assert_eq!((next.units.start, next.in_order, queue.is_far()), (0, false, false));
        queue.was_read(true);
        queue.was_read(false);
        let next = queue.next().unwrap();
        assert_eq!((next.units.start, next.in_order, queue.is_far()), (101, true, true));
    }

    #[test]
    fn what_is_backed_and_not_settled_is_told_in_runs() {
        let ram = RegionMap::lay_out([("ram", 64 * 4096)]).unwrap();
        let mut settled = Settled::new(&ram, BlockSize::default());
        [3, 4, 9].into_iter().for_each(|page| settled.insert(Page(page)));
        let backed = [Page(1)..Page(6), Page(8)..Page(10)];
        let found = unsettled(&backed, &settled);
        assert_eq!(found, [Page(1)..Page(3), Page(5)..Page(6), Page(8)..Page(9)]);
    }
}
