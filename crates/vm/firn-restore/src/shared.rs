//! Shared state of the threads of a restore, and the steps that several of them take.
//!
//! ```text
//!               +--------------------------- Shared --------------------------+
//!   handler --->|  Mutex: page server + recorder (never held in a system call)|---> userfaultfd
//!   readers --->|  Storage: the image                                         |---> image file
//!   workers --->|  PresenceFile: settled pages, for a successor               |---> presence file
//!               +-------------------------------------------------------------+
//! ```

use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use firn_fault::pass_point;
use firn_memory::{PageFaults, VcpuWaits};
use firn_types::{Block, Page};

use crate::error::RestoreError;
use crate::failures::{CurrentFailures, MemoryOutage};
use crate::image_bytes::UnitBytes;
use crate::install_lock::InstallLock;
use crate::options::{BackgroundFill, ReadFailurePolicy, RestoreOptions};
use crate::presence::PresenceFile;
use crate::record::{FaultRecord, RunRecorder};
use crate::server::{BlockInstall, PageMask, PageServer, ThreadWakeups, UnitSource};
use crate::storage::UnitStorage;

/// The pause before a presence file that can't be written is tried again.
const PRESENCE_PAUSE: Duration = Duration::from_millis(100);

/// Called once, on a thread of its own, when memory can't be restored: stop the VM.
pub type OnFatal = Box<dyn Fn(&RestoreError) + Send + Sync>;

pub(crate) struct SharedRestore {
    pub(crate) storage: UnitStorage,
    pub(crate) faults: PageFaults,
    pub(crate) options: RestoreOptions,
    pub(crate) install_lock: InstallLock,
    presence: PresenceFile,
    vcpu_waits: VcpuWaits,
    inner: Mutex<LockedState>,
    demand: Condvar,
    fill: Condvar,
    work: Condvar,
    progress: Condvar,
    version: AtomicU32,
    stop: AtomicBool,
    finishing: AtomicBool,
    /// The guest may run: what fails is tried again, unless the options say otherwise.
    may_run: AtomicBool,
    /// The holder of the template has ended: this clone fills its memory by itself.
    is_orphaned: AtomicBool,
    fatal: OnceLock<Arc<RestoreError>>,
    on_fatal: Arc<OnFatal>,
}

/// The state that the lock protects.
pub(crate) struct LockedState {
    pub(crate) server: PageServer<UnitBytes>,
    pub(crate) recorder: RunRecorder,
    pub(crate) failures: CurrentFailures,
    /// The bytes of the image that threads have read.
    pub(crate) read_bytes: u64,
    pub(crate) ended: bool,
    idle_workers: u32,
    idle_readers: u32,
}

/// Whether a worker should be woken.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum WakeWorker {
    /// There is nothing to do, or a worker is awake.
    #[default]
    No,
    /// As soon as the guest has run for a moment without a fault.
    AfterPause,
    /// At once.
    Now,
}

/// The thread that waits.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum ThreadRole {
    Reader,
    Filler,
    Worker,
}

impl SharedRestore {
    pub(crate) fn new(
        storage: UnitStorage,
        faults: PageFaults,
        options: RestoreOptions,
        presence: PresenceFile,
        vcpu_waits: VcpuWaits,
        server: PageServer<UnitBytes>,
        on_fatal: OnFatal,
    ) -> Self {
        let recorder = RunRecorder::new(options.vcpus.iter().map(|&(tid, _)| tid).collect());
        let failures = CurrentFailures::default();
        let inner = LockedState {
            server,
            recorder,
            failures,
            read_bytes: 0,
            ended: false,
            idle_workers: 0,
            idle_readers: 0,
        };
        Self {
            storage,
            faults,
            options,
            install_lock: InstallLock::default(),
            presence,
            vcpu_waits,
            inner: Mutex::new(inner),
            demand: Condvar::new(),
            fill: Condvar::new(),
            work: Condvar::new(),
            progress: Condvar::new(),
            version: AtomicU32::new(0),
            stop: AtomicBool::new(false),
            finishing: AtomicBool::new(false),
            may_run: AtomicBool::new(false),
            is_orphaned: AtomicBool::new(false),
            fatal: OnceLock::new(),
            on_fatal: Arc::new(on_fatal),
        }
    }

    /// Time since the user requested the restore.
    pub(crate) fn now(&self) -> Duration {
        self.options.since.elapsed()
    }

    /// Whether background work leaves processors to the guest after each piece: the guest has just
    /// begun to run, and its vCPUs wait for processors.
    pub(crate) fn must_pause(&self, inner: &LockedState) -> bool {
        let now = self.now();
        inner.recorder.is_new(now) && self.vcpu_waits.is_waiting(now)
    }

    pub(crate) fn lock_state(&self) -> MutexGuard<'_, LockedState> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether threads are to end: all memory is present, or the restore was stopped.
    pub(crate) fn is_over(&self) -> bool {
        self.stop.load(Ordering::Acquire)
    }

    /// Ends all threads.
    pub(crate) fn stop_threads(&self) {
        self.stop.store(true, Ordering::Release);
        // A thread that holds the lock has not checked `stop` yet, or is about to wait and must be
        // woken.
        drop(self.lock_state());
        for bell in [&self.demand, &self.fill, &self.work, &self.progress] {
            bell.notify_all();
        }
    }

    /// Waits until there may be something to do, or until `then`.
    pub(crate) fn wait_for_work<'a>(
        &self,
        mut inner: MutexGuard<'a, LockedState>,
        role: ThreadRole,
        then: Option<Duration>,
    ) -> MutexGuard<'a, LockedState> {
        if self.is_over() {
            return inner;
        }
        inner.count_idle(role, 1);
        let wait = then.map(|then| then.saturating_sub(self.now()));
        let bell = match role {
            ThreadRole::Reader => &self.demand,
            ThreadRole::Filler => &self.fill,
            ThreadRole::Worker => &self.work,
        };
        let mut inner = match wait {
            None => bell.wait(inner).unwrap_or_else(PoisonError::into_inner),
            Some(wait) => bell.wait_timeout(inner, wait).unwrap_or_else(PoisonError::into_inner).0,
        };
        inner.count_idle(role, -1);
        inner
    }

    /// Wakes the threads that an event gives something to do.
    pub(crate) fn wake_threads(&self, inner: MutexGuard<'_, LockedState>, stir: ThreadWakeups) {
        let readers = inner.idle_readers;
        drop(inner);
        if stir.demand {
            match readers {
                0 => self.fill.notify_one(),
                _ => self.demand.notify_one(),
            }
        }
        if stir.background {
            self.demand.notify_all();
            self.fill.notify_one();
        }
        if stir.workers {
            self.work.notify_one();
        }
        if stir.ahead {
            self.progress.notify_all();
        }
        if stir.finished {
            self.finish_restore();
        }
    }

    /// All memory is present: unregisters it.
    pub(crate) fn finish_restore(&self) {
        if self.finishing.swap(true, Ordering::AcqRel) {
            return;
        }
        pass_point("restore.filled");
        if let Err(error) = self.storage.image().prefetch_rest() {
            tracing::debug!("the rest of the image is not requested: {error}");
        }
        let let_go =
            self.write_presence_in_time().and_then(|()| Ok(self.faults.unregister_all()?));
        match let_go {
            Err(error) => self.fail_restore(error),
            Ok(()) => {
                pass_point("restore.unregistered");
                let now = self.now();
                let mut inner = self.lock_state();
                inner.recorder.record_finish(now);
                inner.ended = true;
                drop(inner);
                self.stop_threads();
            }
        }
    }

    /// Whether all memory is present and nothing is registered, or is about to be.
    pub(crate) fn is_finishing(&self) -> bool {
        self.finishing.load(Ordering::Acquire)
    }

    /// From now on the guest may run.
    pub(crate) fn guest_may_run(&self) {
        self.may_run.store(true, Ordering::Release);
    }

    /// Whether what failed with this error is tried again, for as long as it takes.
    pub(crate) fn can_retry(&self, error: &RestoreError) -> bool {
        let waits = self.options.on_error == ReadFailurePolicy::Stop;
        waits && self.may_run.load(Ordering::Acquire) && error.may_pass()
    }

    /// The outage because of which something can't be read or installed at present.
    pub(crate) fn outage(&self) -> Option<MemoryOutage> {
        let inner = &mut *self.lock_state();
        inner.failures.current_outage(&inner.server)
    }

    /// Memory can't be restored. The first error counts; the guest keeps waiting for missing pages.
    pub(crate) fn fail_restore(&self, error: RestoreError) {
        let error = Arc::new(error);
        if self.fatal.set(error.clone()).is_err() {
            return;
        }
        tracing::error!(error = &*error as &dyn std::error::Error, "restore failed");
        // Demand reads continue as far as possible: to be stopped, a VM must answer.
        self.lock_state().server.stop_background();
        self.progress.notify_all();
        // On a thread of its own: stopping the VM may need answers from the thread that found the
        // error.
        let on_fatal = self.on_fatal.clone();
        let call = std::thread::Builder::new().name("firn-fatal".into());
        if call.spawn(move || on_fatal(&error)).is_err() {
            tracing::error!("cannot start a thread to stop the VM");
        }
    }

    /// The error because of which memory can't be restored.
    pub(crate) fn fatal(&self) -> Option<Arc<RestoreError>> {
        self.fatal.get().cloned()
    }

    /// Waits until `is_done`, an error, or the end.
    pub(crate) fn wait_until(
        &self,
        is_done: impl Fn(&mut LockedState) -> bool,
        deadline: Option<Instant>,
    ) -> Result<bool, Arc<RestoreError>> {
        let mut inner = self.lock_state();
        loop {
            if let Some(error) = self.fatal() {
                return Err(error);
            }
            if is_done(&mut inner) {
                return Ok(true);
            }
            if self.is_over() {
                return Err(Arc::new(RestoreError::Stopped));
            }
            let left = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
            inner = match left {
                Some(Duration::ZERO) => return Ok(false),
                Some(left) => {
                    let waited = self.progress.wait_timeout(inner, left);
                    waited.unwrap_or_else(PoisonError::into_inner).0
                }
                None => self.progress.wait(inner).unwrap_or_else(PoisonError::into_inner),
            };
        }
    }

    /// The guest gave pages back: records that in the presence file before anything else happens.
    pub(crate) fn record_removal(&self, pages: Range<Page>) -> Result<(), RestoreError> {
        let mut inner = self.lock_state();
        let stir = inner.server.record_removal(pages);
        self.version.store(inner.server.version(), Ordering::Release);
        inner.settle_waiting(self.now());
        drop(inner);
        self.write_presence_in_time()?;
        self.wake_threads(self.lock_state(), stir);
        Ok(())
    }

    /// Whether the guest's memory is a private mapping of a template.
    pub(crate) fn is_clone(&self) -> bool {
        self.faults.memory().has_template()
    }

    /// Turns the background fill on or off. For a clone without a holder it stays on.
    pub(crate) fn set_fill(&self, fill: BackgroundFill) {
        let mut inner = self.lock_state();
        let is_alone = self.is_orphaned.load(Ordering::Acquire);
        let stir = inner.server.set_fill(is_alone || fill != BackgroundFill::Off);
        self.wake_threads(inner, stir);
    }

    /// The holder of the template has ended, maybe before the vCPUs run. From now on nothing turns
    /// the background fill off: no other process fills the template.
    pub(crate) fn begin_own_fill(&self) {
        self.is_orphaned.store(true, Ordering::Release);
        self.set_fill(BackgroundFill::AtOnce);
    }

    /// These pages are filled in the template: no vCPU waits for storage because of them any more.
    pub(crate) fn record_present(&self, pages: Range<Page>) {
        let mut inner = self.lock_state();
        let stir = inner.server.record_present(pages);
        inner.settle_waiting(self.now());
        self.wake_threads(inner, stir);
    }

    /// Settles a page that another process has put into the template.
    pub(crate) fn settle_filled(&self, page: Page) {
        if self.faults.template().is_some_and(|template| template.is_filled(page)) {
            self.record_present(page..Page(page.0 + 1));
        }
    }

    /// A block was installed that no vCPU is known to have waited for.
    pub(crate) fn record_install<B>(&self, install: &BlockInstall<B>) {
        let now = self.now();
        let mut inner = self.lock_state();
        let stir = inner.server.record_install(install);
        inner.settle_waiting(now);
        self.wake_threads(inner, stir);
    }

    /// The handler installed a block in answer to a fault. If its unit was found in the page cache
    /// for that, `fetched` is the source of the other blocks of the unit.
    pub(crate) fn record_answer<B>(
        &self,
        install: &BlockInstall<B>,
        fetched: Option<UnitSource<UnitBytes>>,
        fault: FaultRecord,
    ) -> WakeWorker {
        let now = fault.answered_at();
        let mut inner = self.lock_state();
        let mut stir = ThreadWakeups::default();
        if let Some(source) = fetched {
            stir = inner.server.record_cache_hit(install.unit, source);
        }
        stir = stir.merge_with(inner.server.record_install(install));
        inner.server.record_answer(now);
        inner.recorder.record_fault(fault);
        inner.settle_waiting(now);
        let wanted = self.wants_worker(&inner, now);
        self.wake_threads(inner, ThreadWakeups { workers: false, ..stir });
        wanted
    }

    /// Whether a worker should be woken: there is something to do and all workers sleep.
    fn wants_worker(&self, inner: &LockedState, now: Duration) -> WakeWorker {
        let all_sleep = inner.idle_workers >= self.options.workers.max(1) as u32;
        match inner.server.has_installs() && all_sleep {
            true if inner.server.may_install(now) => WakeWorker::Now,
            true => WakeWorker::AfterPause,
            false => WakeWorker::No,
        }
    }

    /// Wakes a worker.
    pub(crate) fn wake_worker(&self) {
        self.work.notify_one();
    }

    /// The source from which installs take the bytes of a unit that was read. If use is counted,
    /// units wait for long before they are installed, and do not stay in memory.
    pub(crate) fn unit_source(&self, bytes: UnitBytes) -> UnitSource<UnitBytes> {
        match self.options.account_use {
            true => UnitSource::PageCache,
            false => UnitSource::Held(bytes),
        }
    }

    /// The first page of a memory block.
    pub(crate) fn first_page(&self, block: Block) -> Page {
        self.storage.image().geometry().block_size.first_page(block)
    }

    /// The pages of an install that may still be installed: all, unless the guest gave some back
    /// since it was decided.
    pub(crate) fn still_missing<B>(&self, install: &BlockInstall<B>) -> PageMask {
        if self.version.load(Ordering::Acquire) == install.version {
            return install.pages;
        }
        install.pages.and(self.lock_state().server.missing_in(install.block))
    }

    /// Writes the settled pages to the presence file before anything else happens, however long a
    /// full disk delays that.
    fn write_presence_in_time(&self) -> Result<(), RestoreError> {
        loop {
            match self.write_presence() {
                Err(error) if self.can_retry(&error) && !self.is_over() => {
                    tracing::debug!("{error}, trying again");
                    std::thread::sleep(PRESENCE_PAUSE);
                }
                written => return written,
            }
        }
    }

    /// Writes the settled pages to the presence file.
    pub(crate) fn write_presence(&self) -> Result<(), RestoreError> {
        self.presence.write_words(|out| {
            PresenceFile::take_changes(self.lock_state().server.settled_pages(), out)
        })
    }

    /// The parts that remain when all threads have ended.
    pub(crate) fn into_parts(self) -> (PageFaults, PresenceFile) {
        (self.faults, self.presence)
    }
}

impl LockedState {
    fn count_idle(&mut self, role: ThreadRole, change: i32) {
        let count = match role {
            ThreadRole::Worker => &mut self.idle_workers,
            ThreadRole::Reader => &mut self.idle_readers,
            ThreadRole::Filler => return,
        };
        *count = count.saturating_add_signed(change);
    }

    /// Records the faults that have been answered by now.
    pub(crate) fn settle_waiting(&mut self, now: Duration) {
        if self.recorder.has_waiting() {
            let settled = self.server.settled_pages();
            self.recorder.record_settled(now, |page| settled.contains(page));
        }
    }
}
