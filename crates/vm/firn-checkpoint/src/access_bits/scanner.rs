//! Access scanner: the thread that scans round after round, and a single short round.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crossbeam_channel::{RecvTimeoutError, Sender, bounded};
use firn_memory::{GuestMemory, PageFaultError, PageScan, Process, ScanError, Tracee, merge_runs};
use firn_types::{PAGE_SIZE, Page, ThreadId};

use super::clock::ScanClock;

/// Pages scanned together: dropping their entries stops an idle thread of the hypervisor for about
/// a millisecond.
const CHUNK_PAGES: u32 = (64 << 20) / PAGE_SIZE as u32;

/// A guest whose vCPUs ran for less than this between two visits is idle. A scan would show
/// nothing, and the result of the last one stays valid.
const IDLE_TIME_MAX: Duration = Duration::from_millis(1);

/// Number of visited chunks that are checked for their cost to the guest since: in the first round
/// there is no other measure.
const RECENT_CHUNKS: usize = 8;
/// The cost for the guest of a page whose entry was dropped and that it uses again: a short fault
/// inside the kernel.
const FAULT_COST: Duration = Duration::from_nanos(2500);
/// Share of the guest's time that the scan may take: a guest that uses all its memory all the time
/// is scanned less often.
const SHARE_MAX: f64 = 0.005;

/// How often a watch checks whether it is to end early.
const CANCEL_POLL_INTERVAL: Duration = Duration::from_millis(20);

/// The hypervisor that is scanned or watched.
#[derive(Clone)]
struct ScanTarget {
    process: Arc<Process>,
    memory: Arc<GuestMemory>,
    vcpus: Vec<ThreadId>,
}

impl ScanTarget {
    fn seize_hypervisor(&self) -> Result<Tracee<'_>, ScanError> {
        Tracee::seize(&self.process, &self.vcpus).map_err(|error| ScanError::Drop(error.into()))
    }

    fn create_scan(&self) -> Result<PageScan, ScanError> {
        if !self.memory.is_shared() {
            return Err(PageFaultError::Private.into());
        }
        PageScan::create(&mut self.seize_hypervisor()?, Arc::clone(&self.memory))
    }

    fn close_scan(&self, scan: PageScan) -> Result<(), ScanError> {
        scan.close(&mut self.seize_hypervisor()?)
    }

    /// The total time for which the vCPUs have run.
    fn vcpu_time(&self) -> Duration {
        self.vcpus.iter().map(|&tid| self.process.thread_run_time(tid).unwrap_or_default()).sum()
    }
}

/// Scans the memory of a running guest, round after round, until it is asked for the result. Costs
/// the guest a short fault inside the kernel for each page that it uses, once in a round;
/// [`AccessScanner::finish_scan`] leaves nothing behind.
pub struct AccessScanner {
    end: Sender<()>,
    thread: JoinHandle<Result<Option<Vec<Range<Page>>>, ScanError>>,
}

impl AccessScanner {
    /// Starts to scan `bytes_per_s` of RAM: as fast as memory is restored, so that a round takes as
    /// long as a restore; or more slowly, where the guest uses so much of its memory that this
    /// would cost it more than half a percent of its time.
    ///
    /// # Errors
    /// If the hypervisor can't be attached to, or its memory is private or registered with another
    /// userfaultfd.
    pub fn start_scan(
        process: Arc<Process>,
        memory: Arc<GuestMemory>,
        vcpus: Vec<ThreadId>,
        bytes_per_s: u64,
    ) -> Result<Self, ScanError> {
        let target = ScanTarget { process, memory, vcpus };
        let scan = target.create_scan()?;
        firn_fault::pass_point("scan.begun");
        let (end, ended) = bounded(0);
        let every = chunk_interval(bytes_per_s);
        let thread = std::thread::spawn(move || {
            let mut round = ScanRound::new(&target, &scan);
            let mut result = Ok(());
            while result.is_ok() && ended.recv_timeout(every) == Err(RecvTimeoutError::Timeout) {
                result = round.visit_if_earned(every);
            }
            // After an error as well, waits until the caller asks for the result.
            let _ = ended.recv();
            let found = result.and_then(|()| round.used_pages());
            target.close_scan(scan)?;
            found
        });
        Ok(Self { end, thread })
    }

    /// Ends the scan. Returns the pages that the guest used in the last round and since, in order;
    /// `None` if the first round is not complete.
    ///
    /// # Errors
    /// The error that ended the scan before.
    pub fn finish_scan(self) -> Result<Option<Vec<Range<Page>>>, ScanError> {
        drop(self.end);
        match self.thread.join() {
            Ok(found) => found,
            Err(panic) => std::panic::resume_unwind(panic),
        }
    }
}

/// The time from one chunk to the next.
fn chunk_interval(bytes_per_s: u64) -> Duration {
    let chunk = f64::from(CHUNK_PAGES) * PAGE_SIZE as f64;
    Duration::from_secs_f64(chunk / bytes_per_s.max(1) as f64)
}

/// How long a guest has to run to make up for faults on this many pages.
fn required_run_time(pages: usize) -> Duration {
    (FAULT_COST * pages as u32).div_f64(SHARE_MAX)
}

/// A chunk whose entries were dropped not long ago: the entries it has now are pages on which the
/// guest faulted again.
struct RecentVisit {
    chunk: Range<Page>,
    at: Instant,
}

/// The state of a scanner.
struct ScanRound<'a> {
    target: &'a ScanTarget,
    scan: &'a PageScan,
    clock: ScanClock,
    ran: Duration,
    /// The oldest visit first.
    recent: VecDeque<RecentVisit>,
    /// Until when the guest makes up for the pages that were found at the last visit.
    due: Option<Instant>,
}

impl<'a> ScanRound<'a> {
    fn new(target: &'a ScanTarget, scan: &'a PageScan) -> Self {
        let regions = target.memory.region_map().regions().iter().map(|region| region.page_range());
        let clock = ScanClock::new(regions, CHUNK_PAGES);
        Self { target, scan, clock, ran: Duration::ZERO, recent: VecDeque::new(), due: None }
    }

    /// Scans the next chunk, unless the guest has still to make up for the last ones.
    fn visit_if_earned(&mut self, every: Duration) -> Result<(), ScanError> {
        let Some(oldest) = self.recent.front() else { return self.visit_chunk() };
        let since = oldest.at.elapsed() + every;
        let is_due = self.due.is_none_or(|due| Instant::now() >= due);
        match is_due && required_run_time(self.found_again()?) <= since {
            true => self.visit_chunk(),
            false => Ok(()),
        }
    }

    /// The number of pages in recently visited chunks that the guest has used since.
    fn found_again(&self) -> Result<usize, ScanError> {
        let mut used = Vec::new();
        for visited in &self.recent {
            self.scan.collect_touched(visited.chunk.clone(), &mut used)?;
        }
        Ok(used.iter().map(Page::count_in).sum())
    }

    fn add_recent(&mut self, chunk: Range<Page>) {
        self.recent.retain(|visited| visited.chunk != chunk);
        if self.recent.len() == RECENT_CHUNKS {
            self.recent.pop_front();
        }
        self.recent.push_back(RecentVisit { chunk, at: Instant::now() });
    }

    fn visit_chunk(&mut self) -> Result<(), ScanError> {
        let ran = self.target.vcpu_time();
        let since = ran.saturating_sub(std::mem::replace(&mut self.ran, ran));
        let Some(chunk) = self.clock.current_chunk().filter(|_| since >= IDLE_TIME_MAX) else {
            return Ok(());
        };
        let mut touched = Vec::new();
        self.scan.collect_touched(chunk.clone(), &mut touched)?;
        self.scan.forget_touches(&mut self.target.seize_hypervisor()?, chunk.clone())?;
        firn_fault::pass_point("scan.visited");
        // In the first round the time of the use is not known.
        if self.clock.was_visited() {
            let found = touched.iter().map(Page::count_in).sum();
            self.due = Some(Instant::now() + required_run_time(found));
        }
        self.add_recent(chunk);
        self.clock.record_visit(touched);
        Ok(())
    }

    fn used_pages(&self) -> Result<Option<Vec<Range<Page>>>, ScanError> {
        if !self.clock.is_round_complete() {
            return Ok(None);
        }
        let mut found: Vec<_> = self.clock.used_pages().collect();
        self.scan.collect_touched(self.target.memory.all_pages(), &mut found)?;
        Ok(Some(merge_runs(found)))
    }
}

/// The pages that a running guest uses in the next `time`, in order. Ends early when `cancelled`
/// returns true.
///
/// # Errors
/// As [`AccessScanner::start_scan`].
pub fn watch_accesses(
    process: Arc<Process>,
    memory: Arc<GuestMemory>,
    vcpus: Vec<ThreadId>,
    time: Duration,
    cancelled: &dyn Fn() -> bool,
) -> Result<Vec<Range<Page>>, ScanError> {
    let target = ScanTarget { process, memory, vcpus };
    let scan = target.create_scan()?;
    firn_fault::pass_point("single-scan.begun");
    let found = watch_with(&target, &scan, time, cancelled);
    target.close_scan(scan)?;
    found
}

fn watch_with(
    target: &ScanTarget,
    scan: &PageScan,
    time: Duration,
    cancelled: &dyn Fn() -> bool,
) -> Result<Vec<Range<Page>>, ScanError> {
    scan.forget_touches(&mut target.seize_hypervisor()?, target.memory.all_pages())?;
    firn_fault::pass_point("single-scan.unmapped");
    let until = Instant::now() + time;
    while Instant::now() < until && !cancelled() {
        std::thread::sleep(
            CANCEL_POLL_INTERVAL.min(until.saturating_duration_since(Instant::now())),
        );
    }
    let mut found = Vec::new();
    scan.collect_touched(target.memory.all_pages(), &mut found)?;
    Ok(merge_runs(found))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_round_takes_as_long_as_a_restore() {
        assert_eq!(chunk_interval(64 << 20), Duration::from_secs(1));
        assert_eq!(chunk_interval(640 << 20), Duration::from_millis(100));
    }

    #[test]
    fn a_guest_that_uses_everything_is_left_alone_for_longer() {
        assert_eq!(required_run_time(0), Duration::ZERO);
        assert_eq!(required_run_time(2000), Duration::from_secs(1));
    }
}
