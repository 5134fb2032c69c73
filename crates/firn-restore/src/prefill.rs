//! Memory that comes back while the hypervisor is still starting.
//!
//! To start QEMU takes longer than to read a working set that is cached. The RAM files are Firn's own, so it fills them
//! before anybody is there to fault:
//!
//! ```text
//!   Firn         RAM files made | read, decode, write ............. | stop | register | keep or empty | serve the rest
//!   hypervisor                  | starts, maps them, resets the machine .. | stands still
//! ```
//!
//! Resetting the machine, the hypervisor may write to guest RAM, before or after Firn wrote there. So a page is kept only
//! if its page tables do not map it: it has not been written to through them. Should the kernel have gone through
//! anonymous memory meanwhile for want of it (it unmaps pages then), nothing is kept. Whatever else the files hold is
//! emptied, and that is checked: what is missing must be missing, or the guest would see zeros.
//!
//! Starting, the hypervisor reads files too, often from the same disk; where nobody waits for the prefill it rests for as
//! long as each read took, unless the storage is known to be far. And it is ended without waiting for the reads that are under way: what they bring is thrown
//! away.
//!
//! Errors end the prefill, quietly: who serves the page faults meets them again, and tells.

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

/// Threads that fill. One processor is the hypervisor's, which is starting.
const THREADS: usize = 2;

/// Their priority: the hypervisor goes first.
const NICE: i32 = 10;

/// Memory being filled. Dropping it ends its threads.
pub struct Prefill {
    job: Arc<Job>,
    threads: Vec<JoinHandle<()>>,
    scanned_before: Option<u64>,
}

/// What was filled.
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
    /// Which locality blocks.
    pub(crate) read: Read,
    /// Whether the page cache did not have them.
    pub(crate) from_storage: bool,
    /// Where in the image, and how much: both in bytes.
    pub(crate) place: (u64, u32),
}

/// What the threads share.
struct Job {
    storage: Storage,
    files: Vec<(RamRegion, File)>,
    queue: Mutex<Queue>,
    /// Whether it rests after each read of storage that is near.
    rests: bool,
    /// Who writes to memory holds it; nobody does once it says so.
    is_over: RwLock<bool>,
    filled: Mutex<Vec<Block>>,
    reads: Mutex<Vec<PrefillRead>>,
}

/// What is still to be read.
#[derive(Debug)]
struct Queue {
    near: Runs,
    /// What is read instead where other restores have found storage far, unless the image is cached.
    far: Option<Runs>,
    /// Whether reads go to storage: some did, or none has yet been made.
    from_storage: Option<bool>,
}

/// Requests that are still to be made.
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
    /// Begins to fill RAM files with what these options want early. There must be one for each region of the image, in
    /// order, and nobody else may write to them before the hypervisor does.
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

    /// Ends the filling, wherever it is.
    pub fn finish(mut self) -> Prefilled {
        self.end();
        let scanned = anonymous_pages_scanned();
        let blocks = std::mem::take(&mut *self.job.filled());
        let mut reads = std::mem::take(&mut *self.job.reads());
        reads.sort_by_key(|read| read.ended);
        Prefilled { blocks, reads, is_trusted: scanned.is_some() && scanned == self.scanned_before }
    }

    /// From here on nobody writes. A thread that reads or rests ends by itself.
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
        f.debug_struct("Prefill").field("queue", &self.job.queue()).finish_non_exhaustive()
    }
}

impl Prefilled {
    /// What was read for it, by the time it ended.
    pub(crate) fn reads(&self) -> &[PrefillRead] {
        &self.reads
    }

    /// Lets the page server know what storage was like. Before anybody else reads.
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

    /// Empties the RAM files of all that can't be kept, and settles the rest. The range must be registered already, and
    /// the vCPUs stand still.
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
        // Pages between regions are settled for good, and never mapped as RAM.
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

    /// Whether storage is far, as far as is known, and reads go there.
    fn is_far(&self) -> bool {
        self.far.is_some() && self.from_storage != Some(false)
    }

    fn was_read(&mut self, from_storage: bool) {
        // What the kernel has read ahead is in memory, too.
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

/// What is wanted at once, in order.
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

/// Of an image in a chain, newer ones may have other content for all of a locality block's memory blocks.
fn has_blocks(image: &Image, unit: u32) -> bool {
    !image.entries(LocalityBlockId(unit)).is_empty()
}

/// The locality blocks that hold these memory blocks, in the order in which they are first mentioned.
fn units_of(image: &Image, blocks: &[Block]) -> Vec<u32> {
    let mut seen = vec![false; image.locality_blocks() as usize];
    let units = blocks.iter().filter_map(|&block| image.entry_of(block).map(|(id, _)| id.0));
    units.filter(|&unit| !std::mem::replace(&mut seen[unit as usize], true)).collect()
}

fn spawn(job: &Arc<Job>) -> Option<JoinHandle<()>> {
    let job = Arc::clone(job);
    let named = std::thread::Builder::new().name("prefill".into());
    // Without it memory comes back later, that is all.
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
        // Of this thread alone. Without it everything works the same, only less smoothly.
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

    /// `None` if something is wrong.
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

    /// `None` if it is over, too.
    fn put(&self, block: Block, raw: &[u8]) -> Option<()> {
        let is_over = self.is_over.read().unwrap_or_else(PoisonError::into_inner);
        if *is_over {
            return None;
        }
        self.write(block, raw)?;
        self.filled().push(block);
        Some(())
    }

    /// A block lies in one region, and may reach past its end.
    fn write(&self, block: Block, raw: &[u8]) -> Option<()> {
        let first = self.storage.image().geometry().block_size.first_page(block);
        let inside = |(region, _): &&(RamRegion, File)| region.range().contains(&first);
        let (region, file) = self.files.iter().find(inside)?;
        let room = Page::count(&(first..region.range().end)) * PAGE_SIZE;
        file.write_all_at(&raw[..raw.len().min(room)], region.offset_of(first)).ok()
    }
}

/// How many pages of anonymous and shared memory the kernel has looked at to take them back, since it started
/// (`pgscan_anon` of `/proc/vmstat`). `None` if it does not say.
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
