//! Ranges that will be needed, in the order in which they will be: several are fetched at a time, and
//! none is begun while a guest waits for the store.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use firn_cache::{UNIT_BYTES, units_of};
use tokio::sync::Notify;

use super::object::{CachedObject, ProvidedBytes, RUN_UNITS_MAX, ReadKind};

/// Requests at a time.
const WORKERS: usize = 16;

/// How long a request of a guest may keep the next prefetch from beginning.
const YIELD_MAX: Duration = Duration::from_millis(50);

/// Ranges to fetch.
#[derive(Default)]
pub(crate) struct PrefetchQueue {
    /// Units of objects.
    waiting: Mutex<VecDeque<(Arc<CachedObject>, Range<u64>)>>,
    added: Notify,
}

impl PrefetchQueue {
    /// Starts the tasks that fetch.
    pub(crate) fn start_workers(self: &Arc<Self>) {
        for _ in 0..WORKERS {
            tokio::spawn(Arc::clone(self).run_worker());
        }
    }

    /// Adds ranges of an object.
    pub(crate) fn add(&self, object: &Arc<CachedObject>, ranges: &[(u64, u64)]) {
        let end = object.name.len;
        let clip = |&(offset, len): &(u64, u64)| {
            units_of(offset.min(end), len.min(end.saturating_sub(offset)))
        };
        let mut waiting = self.waiting.lock().unwrap_or_else(PoisonError::into_inner);
        waiting.extend(ranges.iter().map(clip).map(|units| (Arc::clone(object), units)));
        self.added.notify_waiters();
    }

    /// The next units that nothing has requested.
    fn take_run(&self) -> Option<(Arc<CachedObject>, Range<u64>)> {
        let mut waiting = self.waiting.lock().unwrap_or_else(PoisonError::into_inner);
        while let Some((object, mut units)) = waiting.pop_front() {
            while units.start < units.end && object.is_requested(units.start) {
                units.start += 1;
            }
            if units.is_empty() {
                continue;
            }
            let end = units.end.min(units.start + RUN_UNITS_MAX);
            if end < units.end {
                waiting.push_front((Arc::clone(&object), end..units.end));
            }
            return Some((object, units.start..end));
        }
        None
    }

    /// Forgets what is waiting for an object.
    fn forget(&self, object: &Arc<CachedObject>) {
        let mut waiting = self.waiting.lock().unwrap_or_else(PoisonError::into_inner);
        waiting.retain(|(it, _)| !Arc::ptr_eq(it, object));
    }

    async fn run_worker(self: Arc<Self>) {
        loop {
            let added = self.added.notified();
            let Some((object, units)) = self.take_run() else {
                // What was added before `notified` was polled is found in the next round.
                let _ = tokio::time::timeout(Duration::from_millis(100), added).await;
                continue;
            };
            object.yield_to_demands(YIELD_MAX).await;
            let range = units.start * UNIT_BYTES..units.end * UNIT_BYTES;
            match object.provide(range, ReadKind::Prefetch).await {
                Ok(ProvidedBytes::InFile { .. }) => {}
                // There is no room, or the store is away: those who need the bytes see that.
                Ok(ProvidedBytes::InMemory(_)) | Err(_) => self.forget(&object),
            }
        }
    }
}
