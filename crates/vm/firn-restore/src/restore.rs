//! One restore, from the first fault to the last page.

use std::sync::Arc;
use std::time::{Duration, Instant};

use firn_fault::pass_point;
use firn_image::Image;
use firn_memory::{GuestMemory, PageFaults, VcpuWaits};
use firn_types::{Page, RegionMap, ThreadId};

use crate::error::RestoreError;
use crate::failures::MemoryOutage;
use crate::options::{BackgroundFill, RestoreMode, RestoreOptions};
use crate::prefill::PrefilledMemory;
use crate::presence::PresenceFile;
use crate::record::{RUN_RECORD_VERSION, RunCounts, RunRecord, VcpuThread};
use crate::server::{PageServer, ReadReason, SettledPages, ThreadWakeups};
use crate::shared::{OnFatal, SharedRestore};
use crate::storage::UnitStorage;
use crate::thread_group::RestoreThreads;

/// The progress of a restore.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct MemoryProgress {
    /// Pages of RAM whose contents the image stores.
    pub total: u64,
    /// Of these, installed, or given back by the guest.
    pub present: u64,
    /// Whether all are.
    pub finished: bool,
    /// Page faults so far.
    pub demand_faults: u64,
    /// Reads from storage that the guest waited for.
    pub disk_reads: u64,
    /// Pages installed without the guest waiting for them, but not by the background fill.
    pub prefetched: u64,
    /// The time that the vCPUs waited for pages, summed over them.
    pub waited: Duration,
    /// Share of prefetched pages that the guest used later, if use is counted.
    pub prefetched_used: Option<f64>,
}

/// The state when a restore begins.
struct InitialState<'a> {
    /// Pages that are installed.
    settled: SettledPages,
    prefilled: &'a PrefilledMemory,
    /// Of the prefilled pages, the number that were kept.
    kept: u64,
}

/// The longest time for which a guest is kept from running so that it does not wait for each page.
const PREFILL_WAIT_MAX: Duration = Duration::from_secs(5);

/// The parts of a restore that remain when its threads have ended.
#[derive(Debug)]
pub struct StoppedRestore {
    /// The descriptor. If all memory is present nothing is registered any more: close it. Otherwise
    /// the missing pages stay missing, and a guest that touches one waits for another
    /// [`RunningRestore::resume`].
    pub faults: PageFaults,
    /// The settled pages.
    pub presence: PresenceFile,
    /// The record of the restore.
    pub record: RunRecord,
}

/// A restore in progress. Dropping it ends its threads; missing pages stay missing.
pub struct RunningRestore {
    // Dropped first: the threads hold references to the other fields.
    threads: RestoreThreads,
    shared: Arc<SharedRestore>,
    ram_pages: u32,
    stored_pages: u32,
}

impl RunningRestore {
    /// Begins a restore: registers all of RAM, discards its contents, and answers faults from now
    /// on. The vCPUs must be paused until [`Self::await_prefill`] has returned; the hypervisor
    /// itself may run, and load its device state.
    ///
    /// # Errors
    /// If the image is of a VM with other RAM, RAM can't be registered or emptied, or threads can't
    /// be started. The only thing left to do is then to end the hypervisor.
    pub fn begin(
        image: Arc<Image>,
        memory: Arc<GuestMemory>,
        faults: PageFaults,
        options: RestoreOptions,
        presence: PresenceFile,
        on_fatal: OnFatal,
    ) -> Result<Self, RestoreError> {
        let nothing = PrefilledMemory::default();
        Self::begin_prefilled(image, memory, faults, options, presence, &nothing, on_fatal)
    }

    /// As [`Self::begin`], but keeps pages that are there already.
    ///
    /// # Errors
    /// As [`Self::begin`].
    pub fn begin_prefilled(
        image: Arc<Image>,
        memory: Arc<GuestMemory>,
        faults: PageFaults,
        options: RestoreOptions,
        presence: PresenceFile,
        prefilled: &PrefilledMemory,
        on_fatal: OnFatal,
    ) -> Result<Self, RestoreError> {
        check_regions(&image, memory.region_map())?;
        pass_point("restore.begin");
        faults.register_all()?;
        pass_point("restore.registered");
        let mut settled = SettledPages::new(memory.region_map(), image.geometry().block_size);
        let kept = match memory.has_template() {
            true => settle_backed(&memory, &faults, &mut settled).map(|()| 0)?,
            false => prefilled.keep_untouched(&memory, &mut settled)?,
        };
        pass_point("restore.punched");
        let before = InitialState { settled, prefilled, kept };
        let restore =
            Self::start_threads(image, &memory, faults, options, presence, before, on_fatal)?;
        // Until the vCPUs run, only the hypervisor itself faults, and it waits for each of these
        // pages.
        restore.set_fill(BackgroundFill::Off);
        Ok(restore)
    }

    /// Continues where another Firn process was killed: with the descriptor it left
    /// ([`PageFaults::adopt`]), and the presence file it wrote. Only for a restore whose
    /// [`Self::begin`] had returned; before, there is nothing to save.
    ///
    /// # Errors
    /// As [`Self::begin`].
    pub fn resume(
        image: Arc<Image>,
        memory: Arc<GuestMemory>,
        faults: PageFaults,
        options: RestoreOptions,
        presence: PresenceFile,
        on_fatal: OnFatal,
    ) -> Result<Self, RestoreError> {
        check_regions(&image, memory.region_map())?;
        let mut settled = SettledPages::new(memory.region_map(), image.geometry().block_size);
        settled.merge_words(presence.words());
        settle_backed(&memory, &faults, &mut settled)?;
        let before = InitialState { settled, prefilled: &PrefilledMemory::default(), kept: 0 };
        let restore =
            Self::start_threads(image, &memory, faults, options, presence, before, on_fatal)?;
        restore.guest_may_run();
        Ok(restore)
    }

    fn start_threads(
        image: Arc<Image>,
        memory: &GuestMemory,
        faults: PageFaults,
        options: RestoreOptions,
        presence: PresenceFile,
        before: InitialState<'_>,
        on_fatal: OnFatal,
    ) -> Result<Self, RestoreError> {
        let storage = UnitStorage::new(image.clone(), options.mode);
        let rules = options.server_rules(storage.unit_bytes());
        let now = options.since.elapsed();
        let block_size = image.geometry().block_size;
        let plan = storage.read_plan();
        let stored_pages = plan.missing_pages(&SettledPages::new(memory.region_map(), block_size));
        let mut server = PageServer::new(block_size, plan, before.settled, rules, now);
        before.prefilled.report_reads(&mut server, memory.process(), options.since);
        server.count_prefilled(before.kept, before.prefilled.filled_blocks());
        // No thread exists yet that could be woken.
        let _ = match options.mode {
            // The holder of a template prefetches for all clones.
            _ if memory.has_template() => ThreadWakeups::default(),
            RestoreMode::Lazy | RestoreMode::Locality => ThreadWakeups::default(),
            RestoreMode::Eager => server.prefetch_all(),
            RestoreMode::WorkingSet | RestoreMode::Auto => {
                let units = server.units_of(&options.expected_blocks(&image));
                if options.must_guest_wait(units.len(), rules.unit_bytes) {
                    server.await_prefetch();
                }
                server.prefetch_units(units)
            }
        };
        let is_finished = server.is_finished();
        let vcpus: Vec<ThreadId> = options.vcpus.iter().map(|&(tid, _)| tid).collect();
        let waits = VcpuWaits::of_threads(memory.process().pid(), &vcpus);
        let shared =
            SharedRestore::new(storage, faults, options, presence, waits, server, on_fatal);
        record_prefill_reads(&shared, before.prefilled);
        let shared = Arc::new(shared);
        let crew = RestoreThreads::start_all(shared.clone())?;
        if is_finished {
            shared.finish_restore();
        }
        Ok(Self {
            threads: crew,
            shared,
            ram_pages: memory.region_map().total_pages(),
            stored_pages,
        })
    }

    /// Waits until all that the mode reads before the guest runs is installed. The guest may run
    /// then, and the background fill reads what it does not request.
    ///
    /// # Errors
    /// The error because of which memory can't be restored.
    pub fn await_prefill(&self) -> Result<(), Arc<RestoreError>> {
        let mode = self.shared.options.mode;
        if self.shared.is_clone() && mode == RestoreMode::Eager {
            self.shared.set_fill(self.shared.options.fill);
            return self.wait();
        }
        let is_adaptive = mode == RestoreMode::Auto;
        if !is_adaptive || self.shared.lock_state().server.must_guest_wait() {
            let deadline = is_adaptive.then(|| Instant::now() + PREFILL_WAIT_MAX);
            self.shared.wait_until(|inner| inner.server.is_prefetch_done(), deadline)?;
        }
        self.shared.lock_state().recorder.record_prefill(self.shared.now());
        self.set_fill(self.shared.options.fill);
        Ok(())
    }

    /// The vCPUs are about to run: from now on a failure makes the guest wait, unless the options
    /// say otherwise.
    pub fn guest_may_run(&self) {
        self.shared.guest_may_run();
    }

    /// The outage because of which something can't be read or installed at present, and is tried
    /// again.
    pub fn outage(&self) -> Option<MemoryOutage> {
        self.shared.outage()
    }

    /// The vCPUs have begun to run.
    pub fn record_resume(&self) {
        let mut inner = self.shared.lock_state();
        inner.recorder.record_resume(self.shared.now());
        inner.server.record_resume(self.shared.options.mode == RestoreMode::Auto);
    }

    /// Turns the background fill on or off.
    pub fn set_fill(&self, fill: BackgroundFill) {
        self.shared.set_fill(fill);
    }

    /// The storage latency, if reads of this restore have shown that it is high.
    pub fn found_latency(&self) -> Option<Duration> {
        self.shared.lock_state().server.found_latency()
    }

    /// Whether everything was prefetched, expected or not: that the guest did not wait for a page
    /// means nothing then.
    pub fn has_read_all(&self) -> bool {
        self.shared.lock_state().server.has_read_all()
    }

    /// Whether the restore adapts to the storage, and to what earlier restores have found.
    pub fn is_adaptive(&self) -> bool {
        self.shared.options.is_adaptive_to_storage()
    }

    /// The number of virtual CPUs.
    pub fn vcpu_count(&self) -> u32 {
        self.shared.options.vcpus.len() as u32
    }

    /// The progress until now.
    pub fn progress(&self) -> MemoryProgress {
        let inner = self.shared.lock_state();
        let counts = RunCounts::new(inner.server.counts(), self.shared.options.account_use);
        let missing = u64::from(inner.server.missing_pages());
        MemoryProgress {
            total: u64::from(self.stored_pages),
            present: u64::from(self.stored_pages).saturating_sub(missing),
            finished: inner.ended,
            demand_faults: counts.faults,
            disk_reads: counts.demand_reads,
            prefetched: counts.beside_pages + counts.ahead_pages,
            waited: inner.recorder.total_wait(),
            prefetched_used: counts.prefetched_used(),
        }
    }

    /// Waits until all memory is present and nothing is registered any more.
    ///
    /// # Errors
    /// The error because of which memory can't be restored.
    pub fn wait(&self) -> Result<(), Arc<RestoreError>> {
        self.wait_until(None).map(drop)
    }

    /// As [`Self::wait`], but not longer than `timeout`. `false` if the restore is not over yet.
    ///
    /// # Errors
    /// The error because of which memory can't be restored.
    pub fn wait_timeout(&self, timeout: Duration) -> Result<bool, Arc<RestoreError>> {
        self.wait_until(Some(Instant::now() + timeout))
    }

    fn wait_until(&self, deadline: Option<Instant>) -> Result<bool, Arc<RestoreError>> {
        self.shared.wait_until(|inner| inner.ended, deadline)
    }

    /// The record of the restore until now.
    pub fn record(&self) -> RunRecord {
        make_record(&self.shared, self.ram_pages, self.stored_pages)
    }

    /// Ends all threads, at the latest when the reads in progress end.
    ///
    /// # Errors
    /// If the presence file can't be written: without it, this restore could not be resumed.
    pub fn stop(self) -> Result<StoppedRestore, RestoreError> {
        let Self { threads: crew, shared, ram_pages, stored_pages } = self;
        drop(crew);
        let record = make_record(&shared, ram_pages, stored_pages);
        if record.finished_us.is_none() {
            shared.write_presence()?;
        }
        let shared = Arc::try_unwrap(shared).map_err(|_| RestoreError::Stopped)?;
        let (faults, presence) = shared.into_parts();
        Ok(StoppedRestore { faults, presence, record })
    }
}

impl std::fmt::Debug for RunningRestore {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("RunningRestore").field("progress", &self.progress()).finish_non_exhaustive()
    }
}

/// Settles the pages that memory has. A page of a template counts if it is filled or mapped.
fn settle_backed(
    memory: &GuestMemory,
    faults: &PageFaults,
    settled: &mut SettledPages,
) -> Result<(), RestoreError> {
    let mut runs = match memory.has_template() {
        true => memory.mapped_template_runs()?,
        false => memory.backed_runs()?,
    };
    let filled = faults.template().map(|it| it.take_new_runs(&mut Vec::new(), u32::MAX));
    runs.extend(filled.unwrap_or_default());
    for run in runs {
        Page::iter_range(run).for_each(|page| settled.insert(page));
    }
    Ok(())
}

/// Records the reads of the prefill. To be called before threads start: their reads are later, and
/// once the record is full, it counts the last reads only.
fn record_prefill_reads(shared: &SharedRestore, prefilled: &PrefilledMemory) {
    let since = shared.options.since;
    let recorder = &mut shared.lock_state().recorder;
    for read in prefilled.prefill_reads() {
        let (began, ended) = (read.began - since, read.ended - since);
        recorder.record_read(began, ended, read.extent, ReadReason::Ahead);
    }
}

fn make_record(shared: &SharedRestore, ram_pages: u32, stored_pages: u32) -> RunRecord {
    let options = &shared.options;
    let vcpus = options.vcpus.iter().map(|&(tid, vcpu)| VcpuThread { tid, vcpu }).collect();
    let inner = shared.lock_state();
    inner.recorder.make_record(RunRecord {
        version: RUN_RECORD_VERSION,
        mode: options.mode,
        ram_pages,
        stored_pages,
        vcpus,
        prefilled_us: None,
        resumed_us: None,
        finished_us: None,
        recorded_us: shared.now().as_micros() as u64,
        way_us: inner.server.found_latency().map(|latency| latency.as_micros() as u64),
        prefetched: inner.server.prefetched_runs(),
        counts: RunCounts::new(inner.server.counts(), options.account_use),
        faults: Vec::new(),
        faults_left_out: 0,
        reads: Vec::new(),
        reads_left_out: 0,
    })
}

/// Guest-physical addresses may differ, because the device state determines where the guest sees
/// its RAM. Pages may not.
pub(crate) fn check_regions(image: &Image, vm: &RegionMap) -> Result<(), RestoreError> {
    if image.regions().regions() == vm.regions() {
        return Ok(());
    }
    Err(RestoreError::Regions {
        image: describe_regions(image.regions()),
        vm: describe_regions(vm),
    })
}

fn describe_regions(map: &RegionMap) -> String {
    let regions = map.regions().iter();
    let words = regions.map(|region| format!("{} ({} KiB)", region.id, region.byte_len() >> 10));
    words.collect::<Vec<_>>().join(", ")
}
