//! The threads beside the fault handler: readers wait for storage, workers use the processor.
//!
//! ```text
//!   reader:  take a read -> wait for storage -> tell the page server -> install what the guest waits for
//!   filler:  the same, and the background fill when there is nothing else; writes presence down, sees that workers work
//!   worker:  take an install -> decode, install
//! ```

use std::time::Duration;

use firn_fault::point;

use crate::bytes::Bytes;
use crate::error::RestoreError;
use crate::hands::{Hands, Role};
use crate::priority::Priority;
use crate::server::{Read, Source, Stir, Take, Unit, Why};
use crate::shared::{Shared, Waiter};
use crate::storage_reads::StorageReads;

/// How often a read that fails is tried again, and after which pause: storage over a network may come back.
const RETRIES: u32 = 3;
const RETRY_PAUSE: Duration = Duration::from_millis(100);

/// The longest that settled pages stay unwritten while the filler has nothing to read.
const PRESENCE_EVERY: Duration = Duration::from_millis(20);

/// Installs what nobody else has, until it is over.
pub(crate) fn work(shared: &Shared) {
    let mut priority = Priority::of_background();
    let mut hands = Hands::new(shared, Role::Helper);
    let mut inner = shared.lock();
    while !shared.is_over() {
        let guest_runs_for = inner.recorder.guest_runs_for(shared.now());
        if !priority.is_out_of_the_way(guest_runs_for) {
            drop(inner);
            priority.out_of_the_way(guest_runs_for);
            inner = shared.lock();
        }
        inner = match inner.server.take_install(shared.now()) {
            None => shared.sleep(inner, Waiter::Worker, None),
            Some(work) => {
                drop(inner);
                hands.work(work);
                shared.lock()
            }
        };
    }
}

/// Reads what is asked for, until it is over.
pub(crate) fn read(shared: &Shared, who: Waiter) {
    let (hands, storage) = (Hands::new(shared, Role::Helper), StorageReads::of_this_thread());
    let priority = Priority::of_reader();
    let mut reader = Reader { shared, hands, storage, priority, written: Duration::ZERO };
    let mut inner = shared.lock();
    while !shared.is_over() {
        let now = shared.now();
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
    priority: Priority,
    /// When presence was last written down.
    written: Duration,
}

impl<'a> Reader<'a> {
    fn read(&mut self, read: &Read) {
        if read.why == Why::Fill {
            point("restore.fill");
        }
        let began = self.shared.now();
        self.storage.any();
        match self.in_turn(read) {
            Ok(units) => self.arrived(read, units, began),
            Err(error) if read.units.len() == 1 => self.failed(read, error),
            // One of them is to blame, and the others are not lost.
            Err(_) => read.each().for_each(|(unit, why)| {
                if why == Why::Demand || self.shared.lock().server.is_wanted(unit) {
                    self.read(&Read { units: unit.0..unit.0 + 1, why, in_order: false });
                }
            }),
        }
    }

    /// A reader that is woken for what the guest waits for is to run at once: it is in the background only while it reads what
    /// nobody waits for.
    fn in_turn(&mut self, read: &Read) -> Result<Vec<Bytes>, RestoreError> {
        if read.why != Why::Demand {
            self.priority.background();
        }
        let result = self.patiently(read);
        self.priority.urgent();
        result
    }

    fn patiently(&self, read: &Read) -> Result<Vec<Bytes>, RestoreError> {
        let mut tried = 0;
        loop {
            match self.shared.storage.read(&read.units, read.in_order) {
                Err(_) if tried < RETRIES && read.units.len() == 1 && !self.shared.is_over() => {
                    tried += 1;
                    std::thread::sleep(RETRY_PAUSE);
                }
                result => return result,
            }
        }
    }

    fn arrived(&mut self, read: &Read, units: Vec<Bytes>, began: Duration) {
        // What is read on demand was not in the page cache; that it is read there is what the handler's look may have done.
        let from_storage = self.storage.any();
        let is_read = from_storage || read.why == Why::Demand;
        let now = self.shared.now();
        let mut inner = self.shared.lock();
        let (mut stir, is_sparse) = (Stir::default(), inner.server.is_sparse(&read.units));
        for ((unit, why), bytes) in read.each().zip(units) {
            let source = if is_sparse { Source::PageCache } else { self.shared.source(bytes) };
            stir = stir.or(inner.server.arrived(now, unit, source, why));
        }
        let place = self.shared.storage.place_of(&read.units);
        inner.recorder.read(began, now, place, read.why);
        if from_storage {
            inner.server.went_to_storage();
        }
        if is_read {
            inner.server.read_took(read, began, now);
        }
        self.shared.act(inner, stir);
    }

    fn failed(&self, read: &Read, error: RestoreError) {
        let matters = self.shared.lock().server.failed(Unit(read.units.start), read.why);
        if matters {
            self.shared.fail(error);
        }
    }

    /// Installs what the guest has been waiting for. The rest is for workers.
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

    /// Writes presence down if it is time, and sleeps.
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
            if let Err(error) = shared.write_presence() {
                shared.fail(error);
            }
            inner = shared.lock();
        }
        let next_write = now + PRESENCE_EVERY;
        shared.sleep(inner, Waiter::Filler, Some(then.min(next_write)))
    }
}
