//! Duty cycle: when the background work of a save pauses, so that vCPUs get processor time.
//!
//! Sweep, compressors and writer run with low priority ([`firn_memory::urgency`]), and yet a vCPU
//! that shares a processor with them can wait for a tenth of a second. The kernel does not schedule
//! a thread that had more than its share on another processor before the others on its new
//! processor have caught up, and multiplies this debt by how much lighter they are (`place_entity`
//! in `kernel/sched/fair.c`: EEVDF, Linux 6.6). Once no other thread is there, nothing is owed. So
//! all of them leave the processors together, as long as the guest runs, and for longer if the
//! vCPUs are busy:
//!
//! ```text
//!   sweep        ############......############......######      # may work
//!   compressors  ############......############......######      . sleeps
//!   writer       ############......############......######
//!                <---- CYCLE ----->
//! ```

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use crate::vcpu_load::VcpuLoad;

/// One cycle of work and pause.
const CYCLE: Duration = Duration::from_millis(7);
/// The working part of a cycle, where vCPUs are idle and where they are busy.
const WORK_IDLE: Duration = Duration::from_millis(5);
const WORK_BUSY: Duration = Duration::from_millis(3);
/// vCPUs are busy if together they use this share of a processor.
const BUSY_LOAD: f64 = 0.25;
/// How long they count as busy then: the kernel reports the wait of a vCPU late.
const BUSY_TIME: Duration = Duration::from_millis(250);

/// The clock of a save, and the activity of the guest.
#[derive(Debug)]
pub(crate) struct DutyCycle {
    started: Instant,
    last_fault_us: AtomicU64,
    is_guest_paused: AtomicBool,
    /// Until when vCPUs count as busy.
    busy_until_us: AtomicU64,
    /// The last cycle in which the load was checked.
    last_cycle: AtomicU64,
    load: Mutex<Option<VcpuLoad>>,
}

impl DutyCycle {
    /// The guest runs, and has not faulted; it counts as busy until [`Self::watch_load`].
    pub(crate) fn new() -> Self {
        Self {
            started: Instant::now(),
            last_fault_us: AtomicU64::new(u64::MAX),
            is_guest_paused: AtomicBool::new(false),
            busy_until_us: AtomicU64::new(u64::MAX),
            last_cycle: AtomicU64::new(0),
            load: Mutex::new(None),
        }
    }

    /// Time since the save began.
    pub(crate) fn now(&self) -> Duration {
        self.started.elapsed()
    }

    /// The guest faults now.
    pub(crate) fn record_fault(&self) {
        self.last_fault_us.store(self.now().as_micros() as u64, Ordering::Relaxed);
    }

    /// When the last fault came, on the clock of [`Self::now`].
    pub(crate) fn last_fault(&self) -> Option<Duration> {
        let us = self.last_fault_us.load(Ordering::Relaxed);
        (us != u64::MAX).then(|| Duration::from_micros(us))
    }

    /// Does work for which the guest is paused: no thread pauses in this time.
    pub(crate) fn without_pauses<T>(&self, work: impl FnOnce() -> T) -> T {
        self.is_guest_paused.store(true, Ordering::Relaxed);
        let done = work();
        self.is_guest_paused.store(false, Ordering::Relaxed);
        done
    }

    /// From now on the load of the vCPUs is measured.
    pub(crate) fn watch_load(&self, demand: VcpuLoad) {
        *self.load.lock().unwrap_or_else(PoisonError::into_inner) = Some(demand);
    }

    /// Called between two pieces of background work: sleeps if it is time to.
    pub(crate) fn pause_if_due(&self) {
        if self.is_guest_paused.load(Ordering::Relaxed) {
            return;
        }
        let now = self.now();
        self.update_load(now);
        let is_busy = now.as_micros() < u128::from(self.busy_until_us.load(Ordering::Relaxed));
        let rest = pause_at(now, if is_busy { WORK_BUSY } else { WORK_IDLE });
        rest.into_iter().for_each(thread::sleep);
    }

    /// Once in a cycle one thread measures the load of the vCPUs.
    fn update_load(&self, now: Duration) {
        let turn = (now.as_nanos() / CYCLE.as_nanos()) as u64;
        if self.last_cycle.swap(turn, Ordering::Relaxed) == turn {
            return;
        }
        // While another thread measures, this one need not.
        let Ok(mut demand) = self.load.try_lock() else { return };
        let Some(wanted) = demand.as_mut().and_then(|demand| demand.load_since_last(now)) else {
            return;
        };
        let until = busy_until(now, wanted, self.busy_until_us.load(Ordering::Relaxed));
        self.busy_until_us.store(until, Ordering::Relaxed);
    }
}

/// Until when vCPUs count as busy that use `wanted` processors. The state before the first
/// measurement ends.
fn busy_until(now: Duration, wanted: f64, before_us: u64) -> u64 {
    match (wanted >= BUSY_LOAD, before_us) {
        (true, _) | (false, u64::MAX) => (now + BUSY_TIME).as_micros() as u64,
        (false, before) => before,
    }
}

/// How long to sleep, if at all: all threads sleep until the same time.
fn pause_at(now: Duration, work: Duration) -> Option<Duration> {
    let into_turn = Duration::from_nanos((now.as_nanos() % CYCLE.as_nanos()) as u64);
    (into_turn >= work).then(|| CYCLE - into_turn)
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);

    #[test]
    fn all_rest_until_the_same_time() {
        for now in [10 * CYCLE + WORK_IDLE, 10 * CYCLE + WORK_IDLE + MS] {
            assert_eq!(now + pause_at(now, WORK_IDLE).unwrap(), 11 * CYCLE);
            assert_eq!(now + pause_at(now, WORK_BUSY).unwrap(), 11 * CYCLE);
        }
        let between = 10 * CYCLE + WORK_BUSY + MS;
        assert_eq!(pause_at(between, WORK_IDLE), None);
        assert_eq!(between + pause_at(between, WORK_BUSY).unwrap(), 11 * CYCLE);
        assert_eq!(pause_at(10 * CYCLE, WORK_BUSY), None);
    }

    #[test]
    fn vcpus_count_as_busy_for_a_while() {
        let until = |now, wanted, before: Duration| {
            Duration::from_micros(busy_until(now, wanted, before.as_micros() as u64))
        };
        assert_eq!(until(10 * MS, 1.0, Duration::ZERO), 10 * MS + BUSY_TIME);
        assert_eq!(until(20 * MS, 0.0, 10 * MS + BUSY_TIME), 10 * MS + BUSY_TIME);
        assert_eq!(busy_until(MS, 0.0, u64::MAX), (MS + BUSY_TIME).as_micros() as u64);
    }

    #[test]
    fn an_unobserved_guest_counts_as_busy() {
        let turns = DutyCycle::new();
        turns.pause_if_due();
        assert_eq!(turns.busy_until_us.load(Ordering::Relaxed), u64::MAX);
    }

    #[test]
    fn no_throttle_applies_while_the_guest_waits() {
        let turns = DutyCycle::new();
        let look = |turns: &DutyCycle| turns.is_guest_paused.load(Ordering::Relaxed);
        assert!(turns.without_pauses(|| look(&turns)));
        assert!(!look(&turns));
    }

    #[test]
    fn the_last_fault_is_on_the_same_clock() {
        let turns = DutyCycle::new();
        assert_eq!(turns.last_fault(), None);
        turns.record_fault();
        assert!(turns.last_fault().unwrap() <= turns.now());
    }
}
