//! Helper threads, beside the fault handler: readers wait for storage, workers use the processor.
//!
//! ```text
//!   reader:  take a read -> wait for storage -> report to the page server -> install what the guest waits for
//!   filler:  the same, and the background fill when there is nothing else; writes the presence file, wakes workers
//!   worker:  take an install -> decode, install
//! ```

use std::time::{Duration, Instant};

use firn_fault::point;

use crate::bytes::Bytes;
use crate::error::RestoreError;
use crate::hands::{Hands, Role};
use crate::server::{Read, Source, Stir, Take, Unit, Why};
use crate::shared::{Shared, Waiter};
use crate::storage_reads::StorageReads;

/// How often a read that fails is tried again before the guest may run, or where errors end the VM,
/// and after which pause: storage over a network may return. In all other cases the page server
/// schedules the next attempt.
const RETRIES: u32 = 3;
const RETRY_PAUSE: Duration = Duration::from_millis(100);

/// A read that takes this long does not come from memory.
const FROM_STORAGE: Duration = Duration::from_millis(2);

/// A memory block, or a read from memory, does not take more work than this. If it takes more time,
/// something else has the processor or the thread waited for storage, and the throttle does not
/// count that.
const WORK_MAX: Duration = Duration::from_millis(1);

/// The longest time for which settled pages stay unwritten while the filler has nothing to read.
const PRESENCE_EVERY: Duration = Duration::from_millis(20);

/// Nice value of workers: their priority is below that of vCPUs and of the fault handler, which
/// must run at once when they wake up, but enough for about a tenth of a processor each if those
/// never sleep. (Where sessions are scheduled as groups, "autogroup" of sched(7), it orders only
/// Firn's own threads.)
const WORKER_NICE: i32 = 10;

/// A guest that was just restored has much to do at once: caches of all kinds are cold, clients
/// wait. For each moment of a processor that background work takes, this many moments are left to
/// the guest.
const REST: u32 = 7;

/// How long to sleep after work of this duration. The guest may begin to wait for the sleeping
/// thread, so it is short.
fn rest(worked: Duration) -> Duration {
    worked.min(WORK_MAX) * REST
}

/// Installs blocks that no other thread installs, until the restore is over.
pub(crate) fn work(shared: &Shared) {
    // For this thread alone. Without it everything works the same, only less smoothly.
    let _ = rustix::process::setpriority_process(None, WORKER_NICE);
    let mut hands = Hands::new(shared, Role::Helper);
    let mut inner = shared.lock();
    while !shared.is_over() {
        let is_new = inner.recorder.is_new(shared.now());
        inner = match inner.server.take_install(shared.now()) {
            None => shared.sleep(inner, Waiter::Worker, None),
            Some(work) => {
                drop(inner);
                let (began, is_wanted) = (Instant::now(), work.is_wanted());
                hands.work(work);
                if is_new && !is_wanted {
                    std::thread::sleep(rest(began.elapsed()));
                }
                shared.lock()
            }
        };
    }
}

/// Reads the units that the page server returns, until the restore is over.
pub(crate) fn read(shared: &Shared, who: Waiter) {
    let (hands, storage) = (Hands::new(shared, Role::Helper), StorageReads::of_this_thread());
    let mut reader = Reader { shared, hands, storage, is_cached: false, written: Duration::ZERO };
    let mut inner = shared.lock();
    while !shared.is_over() {
        let now = shared.now();
        if let Some(work) = inner.server.take_retry(now) {
            drop(inner);
            reader.hands.work(work);
            inner = shared.lock();
            continue;
        }
        let take = inner.server.take_read(now, who == Waiter::Filler);
        if inner.server.has_installs() && take == Take::Idle {
            shared.act(inner, Stir { workers: true, ..Stir::default() });
            inner = shared.lock();
        }
        let then = match take {
            Take::Read(read) => {
                drop(inner);
                reader.read(&read);
                reader.serve_urgent();
                reader.rest(&read, now);
                inner = shared.lock();
                inner.server.read_done(read.why);
                continue;
            }
            Take::At(then) => Some(then),
            Take::Idle => None,
        };
        inner = match who {
            Waiter::Filler => reader.sleep_as_filler(inner, then.unwrap_or(Duration::MAX)),
            _ => shared.sleep(inner, who, then),
        };
    }
}

struct Reader<'a> {
    shared: &'a Shared,
    hands: Hands<'a>,
    storage: StorageReads,
    /// Whether the last read used nothing but a processor.
    is_cached: bool,
    /// When the presence file was last written.
    written: Duration,
}

impl<'a> Reader<'a> {
    fn read(&mut self, read: &Read) {
        if read.why == Why::Fill {
            point("restore.fill");
        }
        let began = self.shared.now();
        self.storage.any();
        match self.patiently(read) {
            Ok(units) => self.arrived(read, units, began),
            Err(error) if read.units.len() == 1 => self.failed(read, error),
            // One of the units caused the error, and the others can be read.
            Err(_) => read.each().for_each(|(unit, why)| {
                if why == Why::Demand || self.shared.lock().server.is_wanted(unit) {
                    self.read(&Read { units: unit.0..unit.0 + 1, why, in_order: false });
                }
            }),
        }
    }

    fn patiently(&self, read: &Read) -> Result<Vec<Bytes>, RestoreError> {
        let mut tried = 0;
        loop {
            match self.shared.storage.read(&read.units, read.in_order) {
                Err(error) if self.shared.retries(&error) => return Err(error),
                Err(_) if tried < RETRIES && read.units.len() == 1 && !self.shared.is_over() => {
                    tried += 1;
                    std::thread::sleep(RETRY_PAUSE);
                }
                result => return result,
            }
        }
    }

    fn arrived(&mut self, read: &Read, units: Vec<Bytes>, began: Duration) {
        // A demand read had to be made because the page cache did not have the unit. If it is there
        // by now, the handler's check may have started that read.
        let from_storage = self.storage.any();
        let is_read = from_storage || read.why == Why::Demand;
        self.is_cached = !is_read;
        let now = self.shared.now();
        let mut inner = self.shared.lock();
        let (mut stir, is_sparse) = (Stir::default(), inner.server.is_sparse(&read.units));
        for ((unit, why), bytes) in read.each().zip(units) {
            let source = if is_sparse { Source::PageCache } else { self.shared.source(bytes) };
            stir = stir.or(inner.server.arrived(now, unit, source, why));
        }
        let place = self.shared.storage.place_of(&read.units);
        inner.recorder.read(began, now, place, read.why);
        if from_storage || (is_read && now.saturating_sub(began) >= FROM_STORAGE) {
            inner.server.went_to_storage();
        }
        if is_read {
            inner.server.read_took(read, began, now);
        }
        self.shared.act(inner, stir);
    }

    /// Sleeps after work that took a processor from a guest that has just begun to run.
    fn rest(&self, read: &Read, began: Duration) {
        let is_new = || self.shared.lock().recorder.is_new(self.shared.now());
        if read.why != Why::Demand && !read.in_order && self.is_cached && is_new() {
            std::thread::sleep(rest(self.shared.now().saturating_sub(began)));
        }
    }

    fn failed(&self, read: &Read, error: RestoreError) {
        let (unit, now) = (Unit(read.units.start), self.shared.now());
        let mut inner = self.shared.lock();
        if !inner.server.failed(now, unit, read.why) {
            return;
        }
        if !self.shared.retries(&error) {
            drop(inner);
            return self.shared.fail(error);
        }
        inner.failures.unit(unit, error);
        // Another reader must schedule the next attempt.
        self.shared.act(inner, Stir { background: true, ..Stir::default() });
        self.shared.storage.reopen();
    }

    /// Installs the blocks that the guest waits for. Workers install the others.
    fn serve_urgent(&mut self) {
        loop {
            let mut inner = self.shared.lock();
            let Some(work) = inner.server.take_urgent() else {
                let workers = inner.server.has_installs();
                return self.shared.act(inner, Stir { workers, ..Stir::default() });
            };
            drop(inner);
            self.hands.work(work);
        }
    }

    /// Writes the presence file if it is time, and sleeps.
    fn sleep_as_filler<'b>(
        &mut self,
        inner: std::sync::MutexGuard<'b, crate::shared::Inner>,
        then: Duration,
    ) -> std::sync::MutexGuard<'b, crate::shared::Inner>
    where
        'a: 'b,
    {
        let shared: &'a Shared = self.shared;
        let now = shared.now();
        let mut inner = inner;
        if inner.server.may_install(now) {
            shared.wake_worker();
        }
        if inner.server.settled().has_changed() && now >= self.written + PRESENCE_EVERY {
            drop(inner);
            self.written = now;
            match shared.write_presence() {
                // Pages that it lacks can be found in the RAM file, and are written the next time.
                Err(error) if shared.retries(&error) => tracing::debug!("{error}, trying again"),
                Err(error) => shared.fail(error),
                Ok(()) => {}
            }
            inner = shared.lock();
        }
        let next_write = now + PRESENCE_EVERY;
        shared.sleep(inner, Waiter::Filler, Some(then.min(next_write)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nobody_rests_for_long() {
        assert_eq!(rest(Duration::from_micros(50)), Duration::from_micros(350));
        assert_eq!(rest(Duration::from_secs(60)), Duration::from_millis(7));
    }
}
