//! Transparent huge pages that an operation has split, and their repair while no operation runs.
//!
//! ```text
//!   before a save or a protection    note_huge_pages: which pages are mapped by huge entries
//!   the operation                    splits those of which the guest writes a page
//!   idle again                       a thread puts them together, some MiB at a time, and rests as long as that took
//!   the next operation               ends the thread; what is left is repaired after that operation
//! ```
//!
//! Without it a guest loses its huge pages for hours, and with KVM a part of its speed. It only
//! makes the guest faster: what fails is logged, and nothing depends on it.

use std::io;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use firn_memory::transparent_huge_pages::{collapse_pages, collapsible_parts, huge_mapped_runs};
use firn_memory::{GuestMemory, ScanError, merge_runs, scheduling};
use firn_types::{PAGE_SIZE, Page, RegionMap};
use rustix::io::Errno;

use crate::hypervisor::qemu;
use crate::operations::access_scan::PageRanges;
use crate::records::failure::{Failure, FailureKind};
use crate::records::journal::HypervisorRecord;

/// The rest between two parts, at least.
const REST_MIN: Duration = Duration::from_millis(5);
/// How often the parts are tried for which the kernel has no huge page at the moment, and the rest
/// between two rounds.
const ROUNDS: u32 = 3;
const ROUND_REST: Duration = Duration::from_secs(2);
/// A thread that rests notices within this time that it is to end.
const STOP_POLL: Duration = Duration::from_millis(20);

/// See the module documentation.
#[derive(Debug, Default)]
pub(crate) struct HugePageRepair {
    state: Mutex<RepairState>,
}

#[derive(Debug, Default)]
struct RepairState {
    /// What was huge before an operation, and has not been repaired since.
    split: Option<SplitRuns>,
    worker: Option<RepairWorker>,
}

/// Pages that were mapped by huge entries, in the regions that the VM had then.
#[derive(Debug)]
struct SplitRuns {
    map: RegionMap,
    runs: PageRanges,
}

#[derive(Debug)]
struct RepairWorker {
    stop: Arc<AtomicBool>,
    /// Returns what is left to repair.
    thread: JoinHandle<Option<SplitRuns>>,
}

impl HugePageRepair {
    /// Notes which pages are mapped by huge entries, before an operation that may split them. Ends
    /// a running repair.
    pub(crate) fn note_huge_pages(&self, memory: &GuestMemory) {
        let mut state = self.lock_state();
        state.end_worker();
        let huge = match huge_mapped_runs(memory) {
            Ok(huge) => huge,
            // Without PAGEMAP_SCAN nothing is known.
            Err(error) => return tracing::debug!("{error}"),
        };
        let map = memory.region_map().clone();
        let before = state.split.take().filter(|split| split.map == map);
        let runs = before.map(|split| split.runs).unwrap_or_default();
        let runs = merge_runs(runs.into_iter().chain(huge).collect());
        state.split = (!runs.is_empty()).then_some(SplitRuns { map, runs });
    }

    /// Starts the repair of what operations have split, if there is anything.
    pub(crate) fn start_repair(&self, hypervisor_record: &HypervisorRecord) {
        let mut state = self.lock_state();
        if state.worker.is_some() {
            return;
        }
        let Some(split) = state.split.take() else { return };
        match qemu::open_journaled(hypervisor_record) {
            Ok((_, memory)) if *memory.region_map() == split.map => {
                state.worker = start_worker(memory, split);
            }
            Ok(_) => tracing::debug!("the VM has other memory: its huge pages are not repaired"),
            Err(failure) => tracing::warn!("huge pages are not repaired: {failure}"),
        }
    }

    /// Ends a running repair. What is left is repaired after the next operation.
    pub(crate) fn stop_repair(&self) {
        self.lock_state().end_worker();
    }

    fn lock_state(&self) -> MutexGuard<'_, RepairState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl RepairState {
    fn end_worker(&mut self) {
        let Some(worker) = self.worker.take() else { return };
        worker.stop.store(true, Ordering::Relaxed);
        self.split = worker.thread.join().unwrap_or_default();
    }
}

fn start_worker(memory: Arc<GuestMemory>, split: SplitRuns) -> Option<RepairWorker> {
    let stop = Arc::new(AtomicBool::new(false));
    let stopped = Arc::clone(&stop);
    let work = move || {
        scheduling::set_background();
        RepairRun { memory: &memory, stop: &stopped }.repair_runs(split)
    };
    let thread = std::thread::Builder::new().name("huge-pages".to_owned()).spawn(work);
    let thread = thread
        .inspect_err(|error| tracing::warn!("huge pages are not repaired: no thread ({error})"))
        .ok()?;
    Some(RepairWorker { stop, thread })
}

/// One repair.
struct RepairRun<'a> {
    memory: &'a GuestMemory,
    stop: &'a AtomicBool,
}

impl RepairRun<'_> {
    /// Returns what is left to repair if the run is ended early.
    fn repair_runs(&self, split: SplitRuns) -> Option<SplitRuns> {
        let done = (0..ROUNDS).try_for_each(|round| {
            if round > 0 {
                self.rest_for(ROUND_REST)?;
            }
            self.repair_once(&split.runs)
        });
        let unfinished = match done {
            Ok(()) | Err(RunEnd::Complete) => false,
            Err(RunEnd::Stopped) => true,
            Err(RunEnd::Failed(failure)) => {
                tracing::warn!("huge pages that were split stay so: {failure}");
                false
            }
        };
        self.log_result(&split.runs);
        unfinished.then_some(split)
    }

    /// Tries each part that is not huge once.
    fn repair_once(&self, runs: &[Range<Page>]) -> Result<(), RunEnd> {
        let parts: Vec<_> = self.find_split(runs)?;
        if parts.is_empty() {
            return Err(RunEnd::Complete);
        }
        for part in parts {
            let begun = Instant::now();
            match collapse_pages(self.memory, part).map_err(|error| errno_of(&error)) {
                // No huge page at the moment, pages in use, or given back meanwhile.
                Ok(()) | Err(Some(Errno::NOMEM | Errno::AGAIN | Errno::INVAL | Errno::BUSY)) => {}
                Err(errno) => return Err(RunEnd::Failed(describe_refusal(errno))),
            }
            self.rest_for(begun.elapsed().max(REST_MIN))?;
        }
        Ok(())
    }

    /// The parts that can be put together, and are not.
    fn find_split(&self, runs: &[Range<Page>]) -> Result<PageRanges, RunEnd> {
        let parts = collapsible_parts(self.memory, runs)?;
        let huge = huge_mapped_runs(self.memory)?;
        let is_huge = |part: &Range<Page>| {
            let at = huge.partition_point(|run| run.end <= part.start);
            huge.get(at).is_some_and(|run| run.start <= part.start && part.end <= run.end)
        };
        Ok(parts.into_iter().filter(|part| !is_huge(part)).collect())
    }

    fn rest_for(&self, rest: Duration) -> Result<(), RunEnd> {
        let end = Instant::now() + rest;
        loop {
            if self.stop.load(Ordering::Relaxed) {
                return Err(RunEnd::Stopped);
            }
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Ok(());
            }
            std::thread::sleep(left.min(STOP_POLL));
        }
    }

    fn log_result(&self, runs: &[Range<Page>]) {
        let Ok(huge) = huge_mapped_runs(self.memory) else { return };
        let mib = |runs: &[Range<Page>]| {
            let pages: usize = runs.iter().map(Page::count_in).sum();
            (pages * PAGE_SIZE) >> 20
        };
        let (before, now) = (mib(runs), mib(&huge));
        tracing::info!("{now} MiB of the guest's RAM are in huge pages, {before} MiB were before");
    }
}

/// Why a run ended before its last round.
enum RunEnd {
    /// Nothing is left to repair.
    Complete,
    /// An operation is about to begin.
    Stopped,
    Failed(Failure),
}

impl From<ScanError> for RunEnd {
    fn from(error: ScanError) -> Self {
        Self::Failed(Failure::from_error(FailureKind::Other, &error))
    }
}

fn errno_of(error: &io::Error) -> Option<Errno> {
    error.raw_os_error().map(Errno::from_raw_os_error)
}

fn describe_refusal(errno: Option<Errno>) -> Failure {
    let text = match errno {
        Some(Errno::PERM) => {
            "CAP_SYS_NICE is needed to put another process's pages together".to_owned()
        }
        Some(errno) => format!("the kernel refuses to put pages together: {errno}"),
        None => "the kernel refuses to put pages together".to_owned(),
    };
    Failure::new(FailureKind::Host, text)
}
