//! The fill of a template by its holder: what the image's guest used last first, then the rest.
//!
//! Clones put what their guests request into the same template, at the same time. A page that is
//! filled is not written again, and a unit of which all pages are filled is not read.
//!
//! An error ends one pass, and the next pass begins after a pause: a clone whose guest needs the
//! page meets the error too, and reports it.

use std::ops::Range;
use std::sync::Arc;
use std::sync::Mutex;
use std::sync::PoisonError;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use firn_fault::pass_point;
use firn_image::{BlockEntry, Image, LocalityBlockId};
use firn_memory::template::{TemplateError, TemplateWriter};
use firn_types::BandwidthLimit;

use crate::error::RestoreError;
use crate::options::{RestoreMode, RestoreOptions};
use crate::server::{CoalescingRules, order_requests};
use crate::storage::UnitStorage;

/// Threads that fill.
const THREAD_COUNT: usize = 2;

/// Their nice value: the hypervisors have priority.
const NICE: i32 = 10;

/// The pause before the next pass.
const PASS_PAUSE: Duration = Duration::from_millis(500);

/// From object storage, what the guests are not expected to use is filled this long after the beginning:
/// the holder does not know whether the guests are responsive.
const LATE_FILL_PAUSE: Duration = Duration::from_secs(10);

/// How often a pausing thread checks whether it is to end.
const CHECK_INTERVAL: Duration = Duration::from_millis(10);

/// A fill of a template. Dropping it ends its threads.
pub struct TemplateFill {
    job: Arc<FillJob>,
    threads: Vec<JoinHandle<()>>,
}

struct FillJob {
    storage: UnitStorage,
    template: Arc<TemplateWriter>,
    /// Neighbouring units to read at once, in the order in which they are read.
    requests: Vec<Range<u32>>,
    /// The number of requests, from the first, for what the guests are expected to use.
    expected: usize,
    /// When the others begin, if they wait. Each of them is followed by a pause of the same length.
    late_at: Option<Instant>,
    began: Instant,
    next: Mutex<NextRequest>,
    must_end: AtomicBool,
}

/// The request that a thread takes next.
struct NextRequest {
    index: usize,
    limit: BandwidthLimit,
    /// The bytes of the requests before it.
    read_bytes: u64,
}

impl TemplateFill {
    /// Begins to fill a template with the memory of an image.
    pub fn start(
        image: Arc<Image>,
        options: &RestoreOptions,
        template: Arc<TemplateWriter>,
    ) -> Self {
        let storage = UnitStorage::new(Arc::clone(&image), RestoreMode::Locality);
        let is_late = options.fill.is_late();
        let (requests, expected) = list_requests(&image, &storage, options, is_late);
        let late_at = is_late.then(|| Instant::now() + LATE_FILL_PAUSE);
        let limit = BandwidthLimit::new(options.bandwidth, Duration::ZERO, 0);
        let next = Mutex::new(NextRequest { index: 0, limit, read_bytes: 0 });
        let job = Arc::new(FillJob {
            storage,
            template,
            requests,
            expected,
            late_at,
            began: Instant::now(),
            next,
            must_end: AtomicBool::new(false),
        });
        let threads = (0..THREAD_COUNT).filter_map(|_| spawn_thread(&job)).collect();
        Self { job, threads }
    }
}

impl NextRequest {
    fn must_wait(&mut self, since_start: Duration) -> bool {
        !self.limit.next_wait(self.read_bytes, since_start).is_zero()
    }
}

impl Drop for TemplateFill {
    fn drop(&mut self) {
        self.job.must_end.store(true, Ordering::Release);
        // A thread that panicked leaves the rest to the clones.
        self.threads.drain(..).for_each(|thread| drop(thread.join()));
    }
}

impl std::fmt::Debug for TemplateFill {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("TemplateFill").field("requests", &self.job.requests.len()).finish()
    }
}

/// All units of the image, those of the expected blocks first; and the number of requests for these, if
/// the others come late.
fn list_requests(
    image: &Image,
    storage: &UnitStorage,
    options: &RestoreOptions,
    is_late: bool,
) -> (Vec<Range<u32>>, usize) {
    let units = image.locality_blocks();
    let expected = options.expected_blocks(image);
    let expected = expected.iter().filter_map(|&block| image.entry_of(block).map(|(id, _)| id.0));
    let all = (0..units).filter(|&unit| !image.entries(LocalityBlockId(unit)).is_empty());
    let rules = CoalescingRules::low_latency(options.run_max(storage.unit_bytes()));
    let mut order: Vec<u32> = expected.collect();
    let first = if is_late { order_requests(&order, units, rules) } else { Vec::new() };
    order.extend(all);
    let rest = order_requests(&order, units, rules);
    let count = first.len();
    (first.into_iter().chain(rest).collect(), count)
}

fn spawn_thread(job: &Arc<FillJob>) -> Option<JoinHandle<()>> {
    let job = Arc::clone(job);
    let named = std::thread::Builder::new().name("firn-template".into());
    // Without a thread the clones load what they need.
    named.spawn(move || job.run_thread()).ok()
}

impl FillJob {
    fn run_thread(&self) {
        // For this thread alone. Without it everything works the same, only less smoothly.
        let _ = rustix::process::setpriority_process(None, NICE);
        let mut raw = vec![0; self.storage.image().geometry().block_size.byte_count()];
        while let Some(request) = self.next_request() {
            let began = Instant::now();
            if let Err(error) = self.fill_units(&request, &mut raw) {
                tracing::debug!("the template is not filled at units {request:?}: {error}");
                self.return_later();
            }
            if self.late_at.is_some_and(|at| began >= at) {
                self.pause(began.elapsed());
            }
        }
    }

    fn must_end(&self) -> bool {
        self.must_end.load(Ordering::Acquire) || self.template.is_holder_gone()
    }

    fn next_request(&self) -> Option<Range<u32>> {
        loop {
            let mut next = self.next.lock().unwrap_or_else(PoisonError::into_inner);
            let request = self.requests.get(next.index).filter(|_| !self.must_end())?.clone();
            let is_early = self.late_at.is_some_and(|at| Instant::now() < at);
            if (next.index >= self.expected && is_early) || next.must_wait(self.began.elapsed()) {
                drop(next);
                std::thread::sleep(CHECK_INTERVAL);
                continue;
            }
            next.index += 1;
            next.read_bytes += u64::from(self.storage.extent_of(&request).1);
            // Under the lock: where a test waits, no thread fills.
            pass_point("template.fill");
            return Some(request);
        }
    }

    /// After a pause all units are checked again.
    fn return_later(&self) {
        self.pause(PASS_PAUSE);
        self.storage.reopen_image();
        self.next.lock().unwrap_or_else(PoisonError::into_inner).index = 0;
    }

    fn pause(&self, time: Duration) {
        let until = Instant::now() + time;
        while !self.must_end() && Instant::now() < until {
            std::thread::sleep(CHECK_INTERVAL.min(time));
        }
    }

    fn fill_units(&self, units: &Range<u32>, raw: &mut [u8]) -> Result<(), FillError> {
        if units.clone().all(|unit| self.entries(unit).iter().all(|entry| self.has_block(entry))) {
            return Ok(());
        }
        let image = self.storage.image();
        let bytes = self.storage.read_units(units, false)?;
        for (unit, bytes) in units.clone().zip(bytes) {
            for entry in self.entries(unit).iter().filter(|entry| !self.has_block(entry)) {
                image
                    .decode_block(entry, self.storage.stored_in(&bytes, entry), raw)
                    .map_err(RestoreError::from)?;
                let first = image.geometry().block_size.first_page(entry.block);
                self.template.fill_pages(first, raw)?;
            }
        }
        Ok(())
    }

    fn entries(&self, unit: u32) -> &[BlockEntry] {
        self.storage.image().entries(LocalityBlockId(unit))
    }

    fn has_block(&self, entry: &BlockEntry) -> bool {
        let block_size = self.storage.image().geometry().block_size;
        self.template.has_pages(block_size.pages_of(entry.block))
    }
}

/// Why units could not be filled.
#[derive(Debug, thiserror::Error)]
enum FillError {
    #[error(transparent)]
    Read(#[from] RestoreError),
    #[error(transparent)]
    Write(#[from] TemplateError),
}
