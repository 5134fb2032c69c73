//! Access scanner: the thread that scans round after round, and a single short round.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crossbeam_channel::{RecvTimeoutError, Sender, bounded};
use firn_memory::{GuestMemory, PageFaultError, PageScan, Process, ScanError, Tracee, union};
use firn_types::{PAGE_SIZE, Page, Tid};

use super::clock::Clock;

/// Pages scanned together: dropping their entries stops an idle thread of the hypervisor for about
/// a millisecond.
const CHUNK_PAGES: u32 = (64 << 20) / PAGE_SIZE as u32;

/// A guest whose vCPUs ran for less than this between two visits is idle. A scan would show
/// nothing, and the result of the last one stays valid.
const STANDS_STILL: Duration = Duration::from_millis(1);

/// Number of visited chunks that are checked for their cost to the guest since: in the first round
/// there is no other measure.
const RECENT: usize = 8;
/// The cost for the guest of a page whose entry was dropped and that it uses again: a short fault
/// inside the kernel.
const FAULT: Duration = Duration::from_nanos(2500);
/// Share of the guest's time that the scan may take: a guest that uses all its memory all the time
/// is scanned less often.
const SHARE_MAX: f64 = 0.005;

/// How often a watch checks whether it is to end early.
const LOOK: Duration = Duration::from_millis(20);

/// The hypervisor that is scanned or watched.
#[derive(Clone)]
struct Target {
    process: Arc<Process>,
    memory: Arc<GuestMemory>,
    vcpus: Vec<Tid>,
}

impl Target {
    fn seize(&self) -> Result<Tracee<'_>, ScanError> {
        Tracee::seize(&self.process, &self.vcpus).map_err(|error| ScanError::Drop(error.into()))
    }

    fn create(&self) -> Result<PageScan, ScanError> {
        if !self.memory.is_shared() {
            return Err(PageFaultError::Private.into());
        }
        PageScan::create(&mut self.seize()?, Arc::clone(&self.memory))
    }

    fn close(&self, scan: PageScan) -> Result<(), ScanError> {
        scan.close(&mut self.seize()?)
    }

    /// The total time for which the vCPUs have run.
    fn ran(&self) -> Duration {
        self.vcpus.iter().map(|&tid| self.process.ran(tid).unwrap_or_default()).sum()
    }
}

/// Scans the memory of a running guest, round after round, until it is asked for the result. Costs
/// the guest a short fault inside the kernel for each page that it uses, once in a round;
/// [`AccessScanner::finish_scan`] leaves nothing behind.
pub struct Scanner {
    end: Sender<()>,
    thread: JoinHandle<Result<Option<Vec<Range<Page>>>, ScanError>>,
}

impl Scanner {
    /// Starts to scan `bytes_per_s` of RAM: as fast as memory is restored, so that a round takes as
    /// long as a restore; or more slowly, where the guest uses so much of its memory that this
    /// would cost it more than half a percent of its time.
    ///
    /// # Errors
    /// If the hypervisor can't be attached to, or its memory is private or registered with another
    /// userfaultfd.
    pub fn start(
        process: Arc<Process>,
        memory: Arc<GuestMemory>,
        vcpus: Vec<Tid>,
        bytes_per_s: u64,
    ) -> Result<Self, ScanError> {
        let target = Target { process, memory, vcpus };
        let scan = target.create()?;
        firn_fault::point("scan.begun");
        let (end, ended) = bounded(0);
        let every = interval(bytes_per_s);
        let thread = std::thread::spawn(move || {
            let mut round = Round::new(&target, &scan);
            let mut result = Ok(());
            while result.is_ok() && ended.recv_timeout(every) == Err(RecvTimeoutError::Timeout) {
                result = round.visit_if_earned(every);
            }
            // After an error as well, waits until the caller asks for the result.
            let _ = ended.recv();
            let found = result.and_then(|()| round.found());
            target.close(scan)?;
            found
        });
        Ok(Self { end, thread })
    }

    /// Ends the scan. Returns the pages that the guest used in the last round and since, in order;
    /// `None` if the first round is not complete.
    ///
    /// # Errors
    /// The error that ended the scan before.
    pub fn finish(self) -> Result<Option<Vec<Range<Page>>>, ScanError> {
        drop(self.end);
        match self.thread.join() {
            Ok(found) => found,
            Err(panic) => std::panic::resume_unwind(panic),
        }
    }
}

/// The time from one chunk to the next.
fn interval(bytes_per_s: u64) -> Duration {
    let chunk = f64::from(CHUNK_PAGES) * PAGE_SIZE as f64;
    Duration::from_secs_f64(chunk / bytes_per_s.max(1) as f64)
}

/// How long a guest has to run to make up for faults on this many pages.
fn earned(pages: usize) -> Duration {
    (FAULT * pages as u32).div_f64(SHARE_MAX)
}

/// A chunk whose entries were dropped not long ago: the entries it has now are pages on which the
/// guest faulted again.
struct Visited {
    chunk: Range<Page>,
    at: Instant,
}

/// The state of a scanner.
struct Round<'a> {
    target: &'a Target,
    scan: &'a PageScan,
    clock: Clock,
    ran: Duration,
    /// The oldest visit first.
    recent: VecDeque<Visited>,
    /// Until when the guest makes up for the pages that were found at the last visit.
    due: Option<Instant>,
}

impl<'a> Round<'a> {
    fn new(target: &'a Target, scan: &'a PageScan) -> Self {
        let regions = target.memory.map().regions().iter().map(|region| region.range());
        let clock = Clock::new(regions, CHUNK_PAGES);
        Self { target, scan, clock, ran: Duration::ZERO, recent: VecDeque::new(), due: None }
    }

    /// Scans the next chunk, unless the guest has still to make up for the last ones.
    fn visit_if_earned(&mut self, every: Duration) -> Result<(), ScanError> {
        let Some(oldest) = self.recent.front() else { return self.visit() };
        let since = oldest.at.elapsed() + every;
        let is_due = self.due.is_none_or(|due| Instant::now() >= due);
        match is_due && earned(self.found_again()?) <= since {
            true => self.visit(),
            false => Ok(()),
        }
    }

    /// The number of pages in recently visited chunks that the guest has used since.
    fn found_again(&self) -> Result<usize, ScanError> {
        let mut used = Vec::new();
        for visited in &self.recent {
            self.scan.touched(visited.chunk.clone(), &mut used)?;
        }
        Ok(used.iter().map(Page::count).sum())
    }

    fn note(&mut self, chunk: Range<Page>) {
        self.recent.retain(|visited| visited.chunk != chunk);
        if self.recent.len() == RECENT {
            self.recent.pop_front();
        }
        self.recent.push_back(Visited { chunk, at: Instant::now() });
    }

    fn visit(&mut self) -> Result<(), ScanError> {
        let ran = self.target.ran();
        let since = ran.saturating_sub(std::mem::replace(&mut self.ran, ran));
        let Some(chunk) = self.clock.hand().filter(|_| since >= STANDS_STILL) else {
            return Ok(());
        };
        let mut touched = Vec::new();
        self.scan.touched(chunk.clone(), &mut touched)?;
        self.scan.forget_touches(&mut self.target.seize()?, chunk.clone())?;
        firn_fault::point("scan.visited");
        // In the first round the time of the use is not known.
        if self.clock.was_visited() {
            let found = touched.iter().map(Page::count).sum();
            self.due = Some(Instant::now() + earned(found));
        }
        self.note(chunk);
        self.clock.visited(touched);
        Ok(())
    }

    fn found(&self) -> Result<Option<Vec<Range<Page>>>, ScanError> {
        if !self.clock.has_gone_round() {
            return Ok(None);
        }
        let mut found: Vec<_> = self.clock.used().collect();
        self.scan.touched(self.target.memory.all(), &mut found)?;
        Ok(Some(union(found)))
    }
}

/// The pages that a running guest uses in the next `time`, in order. Ends early when `cancelled`
/// returns true.
///
/// # Errors
/// As [`AccessScanner::start_scan`].
pub fn watch(
    process: Arc<Process>,
    memory: Arc<GuestMemory>,
    vcpus: Vec<Tid>,
    time: Duration,
    cancelled: &dyn Fn() -> bool,
) -> Result<Vec<Range<Page>>, ScanError> {
    let target = Target { process, memory, vcpus };
    let scan = target.create()?;
    firn_fault::point("watch.begun");
    let found = watch_with(&target, &scan, time, cancelled);
    target.close(scan)?;
    found
}

fn watch_with(
    target: &Target,
    scan: &PageScan,
    time: Duration,
    cancelled: &dyn Fn() -> bool,
) -> Result<Vec<Range<Page>>, ScanError> {
    scan.forget_touches(&mut target.seize()?, target.memory.all())?;
    firn_fault::point("watch.forgotten");
    let until = Instant::now() + time;
    while Instant::now() < until && !cancelled() {
        std::thread::sleep(LOOK.min(until.saturating_duration_since(Instant::now())));
    }
    let mut found = Vec::new();
    scan.touched(target.memory.all(), &mut found)?;
    Ok(union(found))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_round_takes_as_long_as_a_restore() {
        assert_eq!(interval(64 << 20), Duration::from_secs(1));
        assert_eq!(interval(640 << 20), Duration::from_millis(100));
    }

    #[test]
    fn a_guest_that_uses_everything_is_left_alone_for_longer() {
        assert_eq!(earned(0), Duration::ZERO);
        assert_eq!(earned(2000), Duration::from_secs(1));
    }
}
