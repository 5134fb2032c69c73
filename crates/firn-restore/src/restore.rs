//! One restore, from the first fault to the last page.

use std::sync::Arc;
use std::time::{Duration, Instant};

use firn_fault::point;
use firn_image::Image;
use firn_memory::{GuestMemory, PageFaults};
use firn_types::{Page, RegionMap};

use crate::crew::Crew;
use crate::error::RestoreError;
use crate::failures::Outage;
use crate::options::{Fill, Mode, RestoreOptions};
use crate::prefill::Prefilled;
use crate::presence::Presence;
use crate::record::{RUN_RECORD_VERSION, RunCounts, RunRecord, VcpuThread};
use crate::server::{Server, Settled, Stir, Why};
use crate::shared::{OnFatal, Shared};
use crate::storage::Storage;

/// The progress of a restore.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Progress {
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
struct Before<'a> {
    /// Pages that are installed.
    settled: Settled,
    prefilled: &'a Prefilled,
    /// Of the prefilled pages, the number that were kept.
    kept: u64,
}

/// The longest time for which a guest is kept from running so that it does not wait for each page.
const PREFIX: Duration = Duration::from_secs(5);

/// The parts of a restore that remain when its threads have ended.
#[derive(Debug)]
pub struct Stopped {
    /// The descriptor. If all memory is present nothing is registered any more: close it. Otherwise
    /// the missing pages stay missing, and a guest that touches one waits for another
    /// [`RunningRestore::resume`].
    pub faults: PageFaults,
    /// The settled pages.
    pub presence: Presence,
    /// The record of the restore.
    pub record: RunRecord,
}

/// A restore in progress. Dropping it ends its threads; missing pages stay missing.
pub struct Restore {
    // Dropped first: the threads hold references to the other fields.
    crew: Crew,
    shared: Arc<Shared>,
    ram_pages: u32,
    stored_pages: u32,
}

impl Restore {
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
        presence: Presence,
        on_fatal: OnFatal,
    ) -> Result<Self, RestoreError> {
        let nothing = Prefilled::default();
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
        presence: Presence,
        prefilled: &Prefilled,
        on_fatal: OnFatal,
    ) -> Result<Self, RestoreError> {
        check_regions(&image, memory.map())?;
        point("restore.begin");
        faults.register()?;
        point("restore.registered");
        let mut settled = Settled::new(memory.map(), image.geometry().block_size);
        let kept = prefilled.keep(&memory, &mut settled)?;
        point("restore.punched");
        let before = Before { settled, prefilled, kept };
        let restore = Self::start(image, &memory, faults, options, presence, before, on_fatal)?;
        restore.record_reads(prefilled);
        // Until the vCPUs run, only the hypervisor itself faults, and it waits for each of these
        // pages.
        restore.fill(Fill::Off);
        Ok(restore)
    }

    /// Records the reads of the prefill.
    fn record_reads(&self, prefilled: &Prefilled) {
        let since = self.shared.options.since;
        let mut inner = self.shared.lock();
        for read in prefilled.reads() {
            inner.recorder.read(read.began - since, read.ended - since, read.place, Why::Ahead);
        }
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
        presence: Presence,
        on_fatal: OnFatal,
    ) -> Result<Self, RestoreError> {
        check_regions(&image, memory.map())?;
        let mut settled = Settled::new(memory.map(), image.geometry().block_size);
        settled.merge(presence.words());
        for run in memory.backed_runs()? {
            Page::each(run).for_each(|page| settled.insert(page));
        }
        let before = Before { settled, prefilled: &Prefilled::default(), kept: 0 };
        let restore = Self::start(image, &memory, faults, options, presence, before, on_fatal)?;
        restore.guest_may_run();
        Ok(restore)
    }

    fn start(
        image: Arc<Image>,
        memory: &GuestMemory,
        faults: PageFaults,
        options: RestoreOptions,
        presence: Presence,
        before: Before<'_>,
        on_fatal: OnFatal,
    ) -> Result<Self, RestoreError> {
        let storage = Storage::new(image.clone(), options.mode);
        let rules = options.rules(storage.unit_bytes());
        let now = options.since.elapsed();
        let block_size = image.geometry().block_size;
        let plan = storage.plan();
        let stored_pages = plan.pages(&Settled::new(memory.map(), block_size));
        let mut server = Server::new(block_size, plan, before.settled, rules, now);
        before.prefilled.tell(&mut server, options.since);
        server.count_prefilled(before.kept, before.prefilled.blocks());
        // No thread exists yet that could be woken.
        let _ = match options.mode {
            Mode::Lazy | Mode::Locality => Stir::default(),
            Mode::Eager => server.read_all(),
            Mode::WorkingSet | Mode::Auto => {
                let units = server.units_of(&options.expected(&image));
                if options.guest_waits(units.len(), rules.unit_bytes) {
                    server.await_ahead();
                }
                server.read_ahead(units)
            }
        };
        let is_finished = server.is_finished();
        let shared = Shared::new(storage, faults, options, presence, server, on_fatal);
        let shared = Arc::new(shared);
        let crew = Crew::start(shared.clone())?;
        if is_finished {
            shared.finish();
        }
        Ok(Self { crew, shared, ram_pages: memory.map().total_pages(), stored_pages })
    }

    /// Waits until all that the mode reads before the guest runs is installed. The guest may run
    /// then, and the background fill reads what it does not request.
    ///
    /// # Errors
    /// The error because of which memory can't be restored.
    pub fn prefill(&self) -> Result<(), Arc<RestoreError>> {
        let adapts = self.shared.options.mode == Mode::Auto;
        if !adapts || self.shared.lock().server.guest_waits() {
            let deadline = adapts.then(|| Instant::now() + PREFIX);
            self.shared.wait_until(|inner| inner.server.is_ahead_done(), deadline)?;
        }
        self.shared.lock().recorder.prefilled(self.shared.now());
        self.fill(self.shared.options.fill);
        Ok(())
    }

    /// The vCPUs are about to run: from now on a failure makes the guest wait, unless the options
    /// say otherwise.
    pub fn guest_may_run(&self) {
        self.shared.guest_may_run();
    }

    /// The outage because of which something can't be read or installed at present, and is tried
    /// again.
    pub fn outage(&self) -> Option<Outage> {
        self.shared.outage()
    }

    /// The vCPUs have begun to run.
    pub fn resumed(&self) {
        let mut inner = self.shared.lock();
        inner.recorder.resumed(self.shared.now());
        inner.server.resumed(self.shared.options.mode == Mode::Auto);
    }

    /// Turns the background fill on or off.
    pub fn fill(&self, fill: Fill) {
        let mut inner = self.shared.lock();
        let stir = inner.server.set_fill(fill == Fill::Quiet);
        self.shared.act(inner, stir);
    }

    /// The storage latency, if reads of this restore have shown that it is high.
    pub fn way(&self) -> Option<Duration> {
        self.shared.lock().server.way()
    }

    /// Whether everything was prefetched, expected or not: that the guest did not wait for a page
    /// means nothing then.
    pub fn has_read_all(&self) -> bool {
        self.shared.lock().server.has_read_all()
    }

    /// Whether the restore adapts to the storage, and to what earlier restores have found.
    pub fn adapts(&self) -> bool {
        self.shared.options.adapts()
    }

    /// The number of virtual CPUs.
    pub fn vcpus(&self) -> u32 {
        self.shared.options.vcpus.len() as u32
    }

    /// The progress until now.
    pub fn progress(&self) -> Progress {
        let inner = self.shared.lock();
        let counts = RunCounts::new(inner.server.counts(), self.shared.options.account_use);
        let missing = u64::from(inner.server.missing_pages());
        Progress {
            total: u64::from(self.stored_pages),
            present: u64::from(self.stored_pages).saturating_sub(missing),
            finished: inner.ended,
            demand_faults: counts.faults,
            disk_reads: counts.demand_reads,
            prefetched: counts.beside_pages + counts.ahead_pages,
            waited: inner.recorder.waited(),
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
        record(&self.shared, self.ram_pages, self.stored_pages)
    }

    /// Ends all threads, at the latest when the reads in progress end.
    ///
    /// # Errors
    /// If the presence file can't be written: without it, this restore could not be resumed.
    pub fn stop(self) -> Result<Stopped, RestoreError> {
        let Self { crew, shared, ram_pages, stored_pages } = self;
        drop(crew);
        let record = record(&shared, ram_pages, stored_pages);
        if record.finished_us.is_none() {
            shared.write_presence()?;
        }
        let shared = Arc::try_unwrap(shared).map_err(|_| RestoreError::Stopped)?;
        let (faults, presence) = shared.into_parts();
        Ok(Stopped { faults, presence, record })
    }
}

impl std::fmt::Debug for Restore {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("RunningRestore").field("progress", &self.progress()).finish_non_exhaustive()
    }
}

fn record(shared: &Shared, ram_pages: u32, stored_pages: u32) -> RunRecord {
    let options = &shared.options;
    let vcpus = options.vcpus.iter().map(|&(tid, vcpu)| VcpuThread { tid, vcpu }).collect();
    let inner = shared.lock();
    inner.recorder.record(RunRecord {
        version: RUN_RECORD_VERSION,
        mode: options.mode,
        ram_pages,
        stored_pages,
        vcpus,
        prefilled_us: None,
        resumed_us: None,
        finished_us: None,
        recorded_us: shared.now().as_micros() as u64,
        way_us: inner.server.way().map(|way| way.as_micros() as u64),
        prefetched: inner.server.prefetched(),
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
    Err(RestoreError::Regions { image: describe(image.regions()), vm: describe(vm) })
}

fn describe(map: &RegionMap) -> String {
    let regions = map.regions().iter();
    let words = regions.map(|region| format!("{} ({} KiB)", region.id, region.bytes() >> 10));
    words.collect::<Vec<_>>().join(", ")
}
