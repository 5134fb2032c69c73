//! Helper threads, beside the fault handler: readers wait for storage, workers use the processor.
//!
//! ```text
//!   reader:  take a read -> wait for storage -> report to the page server -> install what the guest waits for
//!   filler:  the same, and the background fill when there is nothing else; writes the presence file, wakes workers
//!   worker:  take an install -> decode, install
//! ```

use std::time::{Duration, Instant};

use firn_fault::pass_point;
use firn_types::BandwidthLimit;

use crate::error::RestoreError;
use crate::image_bytes::UnitBytes;
use crate::installer::{BlockInstaller, InstallerRole};
use crate::server::{ReadDecision, ReadReason, ReadUnit, ThreadWakeups, UnitRead, UnitSource};
use crate::shared::{SharedRestore, ThreadRole};
use crate::storage_reads::StorageReads;

/// How often a read that fails is tried again before the guest may run, or where errors end the VM,
/// and after which pause: storage over a network may return. In all other cases the page server
/// schedules the next attempt.
const RETRIES: u32 = 3;
const RETRY_PAUSE: Duration = Duration::from_millis(100);

/// A read that takes this long does not come from memory.
const STORAGE_READ_MIN: Duration = Duration::from_millis(2);

/// A memory block, or a read from memory, does not take more work than this. If it takes more time,
/// something else has the processor or the thread waited for storage, and the throttle does not
/// count that.
const WORK_MAX: Duration = Duration::from_millis(1);

/// The longest time for which settled pages stay unwritten while the filler has nothing to read.
const PRESENCE_WRITE_INTERVAL: Duration = Duration::from_millis(20);

/// Nice value of workers: their priority is below that of vCPUs and of the fault handler, which
/// must run at once when they wake up, but enough for about a tenth of a processor each if those
/// never sleep. (Where sessions are scheduled as groups, "autogroup" of sched(7), it orders only
/// Firn's own threads.)
const WORKER_NICE: i32 = 10;

/// A guest that was just restored has much to do at once: caches of all kinds are cold, clients
/// wait. While its vCPUs are found waiting for processors, background work leaves them this many
/// moments for each one that it takes.
const PAUSE_FACTOR: u32 = 7;

/// How long to sleep after work of this duration. The guest may begin to wait for the sleeping
/// thread, so it is short.
fn pause_after(worked: Duration) -> Duration {
    worked.min(WORK_MAX) * PAUSE_FACTOR
}

/// Installs blocks that no other thread installs, until the restore is over.
pub(crate) fn run_worker(shared: &SharedRestore) {
    // For this thread alone. Without it everything works the same, only less smoothly.
    let _ = rustix::process::setpriority_process(None, WORKER_NICE);
    let mut hands = BlockInstaller::new(shared, InstallerRole::Helper);
    let mut inner = shared.lock_state();
    while !shared.is_over() {
        let must_pause = shared.must_pause(&inner);
        inner = match inner.server.take_install(shared.now()) {
            None => shared.wait_for_work(inner, ThreadRole::Worker, None),
            Some(work) => {
                drop(inner);
                let (began, is_wanted) = (Instant::now(), work.is_wanted());
                hands.do_work(work);
                if must_pause && !is_wanted {
                    std::thread::sleep(pause_after(began.elapsed()));
                }
                shared.lock_state()
            }
        };
    }
}

/// Reads the units that the page server returns, until the restore is over.
pub(crate) fn run_reader(shared: &SharedRestore, role: ThreadRole) {
    let (hands, storage) =
        (BlockInstaller::new(shared, InstallerRole::Helper), StorageReads::of_this_thread());
    let mut reader =
        ReaderThread { shared, hands, storage, is_cached: false, written: Duration::ZERO };
    let mut limit = BandwidthLimit::new(shared.options.bandwidth, shared.now(), 0);
    let mut inner = shared.lock_state();
    while !shared.is_over() {
        let now = shared.now();
        if let Some(work) = inner.server.take_retry(now) {
            drop(inner);
            reader.hands.do_work(work);
            inner = shared.lock_state();
            continue;
        }
        let limited = limit.next_wait(inner.read_bytes, now);
        let may_fill = role == ThreadRole::Filler && limited.is_zero();
        let take = inner.server.take_read(now, may_fill);
        if inner.server.has_installs() && take == ReadDecision::Idle {
            shared.wake_threads(inner, ThreadWakeups { workers: true, ..ThreadWakeups::default() });
            inner = shared.lock_state();
        }
        let then = match take {
            ReadDecision::Read(read) => {
                drop(inner);
                reader.read_units(&read);
                reader.serve_urgent();
                reader.pause_if_due(&read, now);
                inner = shared.lock_state();
                inner.server.finish_read(read.why, shared.now());
                continue;
            }
            ReadDecision::At(then) => Some(then),
            ReadDecision::Idle if !limited.is_zero() => Some(now + limited),
            ReadDecision::Idle => None,
        };
        inner = match role {
            ThreadRole::Filler => reader.sleep_as_filler(inner, then.unwrap_or(Duration::MAX)),
            _ => shared.wait_for_work(inner, role, then),
        };
    }
}

struct ReaderThread<'a> {
    shared: &'a SharedRestore,
    hands: BlockInstaller<'a>,
    storage: StorageReads,
    /// Whether the last read used nothing but a processor.
    is_cached: bool,
    /// When the presence file was last written.
    written: Duration,
}

impl<'a> ReaderThread<'a> {
    fn read_units(&mut self, read: &UnitRead) {
        if read.why == ReadReason::Fill {
            pass_point("restore.fill");
        }
        let began = self.shared.now();
        self.storage.take_fetched();
        match self.read_with_retries(read) {
            Ok(units) => self.report_arrival(read, units, began),
            Err(error) if read.units.len() == 1 => self.report_failure(read, error),
            // One of the units caused the error, and the others can be read.
            Err(_) => read.units_with_reasons().for_each(|(unit, why)| {
                if why == ReadReason::Demand || self.shared.lock_state().server.is_wanted(unit) {
                    self.read_units(&UnitRead { units: unit.0..unit.0 + 1, why, in_order: false });
                }
            }),
        }
    }

    fn read_with_retries(&self, read: &UnitRead) -> Result<Vec<UnitBytes>, RestoreError> {
        let mut tried = 0;
        loop {
            match self.shared.storage.read_units(&read.units, read.in_order) {
                Err(error) if self.shared.can_retry(&error) => return Err(error),
                Err(_) if tried < RETRIES && read.units.len() == 1 && !self.shared.is_over() => {
                    tried += 1;
                    std::thread::sleep(RETRY_PAUSE);
                }
                result => return result,
            }
        }
    }

    fn report_arrival(&mut self, read: &UnitRead, units: Vec<UnitBytes>, began: Duration) {
        // A demand read had to be made because the page cache did not have the unit. If it is there
        // by now, the handler's check may have started that read.
        let fetched = self.storage.take_fetched();
        let from_storage = fetched.is_some();
        let is_read = from_storage || read.why == ReadReason::Demand;
        self.is_cached = !is_read;
        let now = self.shared.now();
        let mut inner = self.shared.lock_state();
        let (mut stir, is_sparse) = (ThreadWakeups::default(), inner.server.is_sparse(&read.units));
        for ((unit, why), bytes) in read.units_with_reasons().zip(units) {
            let source =
                if is_sparse { UnitSource::PageCache } else { self.shared.unit_source(bytes) };
            stir = stir.merge_with(inner.server.record_arrival(now, unit, source, why));
        }
        let extent = self.shared.storage.extent_of(&read.units);
        inner.recorder.record_read(began, now, extent, read.why);
        inner.read_bytes += u64::from(extent.1);
        if from_storage || (is_read && now.saturating_sub(began) >= STORAGE_READ_MIN) {
            inner.server.record_storage_access();
        }
        if is_read {
            inner.server.record_read_time(read, fetched.unwrap_or_default(), began, now);
        }
        self.shared.wake_threads(inner, stir);
    }

    /// Sleeps after work that took a processor from a guest that has just begun to run, and whose
    /// vCPUs wait for processors.
    fn pause_if_due(&self, read: &UnitRead, began: Duration) {
        let is_due = || self.shared.must_pause(&self.shared.lock_state());
        if read.why != ReadReason::Demand && !read.in_order && self.is_cached && is_due() {
            std::thread::sleep(pause_after(self.shared.now().saturating_sub(began)));
        }
    }

    fn report_failure(&self, read: &UnitRead, error: RestoreError) {
        let (unit, now) = (ReadUnit(read.units.start), self.shared.now());
        let mut inner = self.shared.lock_state();
        if !inner.server.record_failed_read(now, unit, read.why) {
            return;
        }
        if !self.shared.can_retry(&error) {
            drop(inner);
            return self.shared.fail_restore(error);
        }
        inner.failures.record_unit(unit, error);
        // Another reader must schedule the next attempt.
        self.shared
            .wake_threads(inner, ThreadWakeups { background: true, ..ThreadWakeups::default() });
        self.shared.storage.reopen_image();
    }

    /// Installs the blocks that the guest waits for. Workers install the others.
    fn serve_urgent(&mut self) {
        loop {
            let mut inner = self.shared.lock_state();
            let Some(work) = inner.server.take_urgent() else {
                let workers = inner.server.has_installs();
                return self
                    .shared
                    .wake_threads(inner, ThreadWakeups { workers, ..ThreadWakeups::default() });
            };
            drop(inner);
            self.hands.do_work(work);
        }
    }

    /// Writes the presence file if it is time, and sleeps.
    fn sleep_as_filler<'b>(
        &mut self,
        inner: std::sync::MutexGuard<'b, crate::shared::LockedState>,
        then: Duration,
    ) -> std::sync::MutexGuard<'b, crate::shared::LockedState>
    where
        'a: 'b,
    {
        let shared: &'a SharedRestore = self.shared;
        let now = shared.now();
        let mut inner = inner;
        if inner.server.may_install(now) {
            shared.wake_worker();
        }
        if inner.server.settled_pages().has_changed()
            && now >= self.written + PRESENCE_WRITE_INTERVAL
        {
            drop(inner);
            self.written = now;
            match shared.write_presence() {
                // Pages that it lacks can be found in the RAM file, and are written the next time.
                Err(error) if shared.can_retry(&error) => tracing::debug!("{error}, trying again"),
                Err(error) => shared.fail_restore(error),
                Ok(()) => {}
            }
            inner = shared.lock_state();
        }
        let next_write = now + PRESENCE_WRITE_INTERVAL;
        shared.wait_for_work(inner, ThreadRole::Filler, Some(then.min(next_write)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn throttled_threads_wake_soon() {
        assert_eq!(pause_after(Duration::from_micros(50)), Duration::from_micros(350));
        assert_eq!(pause_after(Duration::from_secs(60)), Duration::from_millis(7));
    }
}
