//! Duty cycle: when the background work of a save pauses, so that vCPUs get processor time.
//!
//! Sweep, compressors and writer run with low priority ([`firn_memory::scheduling`]), and yet a
//! vCPU that shares a processor with them can wait for a tenth of a second. The kernel does not
//! schedule a thread that had more than its share on another processor before the others on its new
//! processor have caught up, and multiplies this debt by how much lighter they are (`place_entity`
//! in `kernel/sched/fair.c`: EEVDF, Linux 6.6). Once no other thread is there, nothing is owed. So
//! all of them leave the processors together, as long as vCPUs are found waiting for processors
//! ([`VcpuWaits`]). Where none waits, nothing pauses; and the pauses are bounded:
//!
//! ```text
//!   vCPUs        run              ...wait...       run
//!   sweep        ################ ####......####...... ###########      # may work
//!   compressors  ################ ####......####...... ###########      . sleeps
//!   writer       ################ ####......####...... ###########
//!                                 <- CYCLE ->
//! ```

use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use firn_memory::VcpuWaits;
use firn_types::ThreadId;

/// One cycle of work and pause.
const CYCLE: Duration = Duration::from_millis(7);
/// The working part of a cycle while vCPUs wait for processors.
const WORK: Duration = Duration::from_millis(3);

/// The clock of a save, and the pauses of its background work.
#[derive(Debug)]
pub(crate) struct DutyCycle {
    started: Instant,
    is_guest_paused: AtomicBool,
    waits: VcpuWaits,
}

impl DutyCycle {
    /// The guest runs; its vCPUs count as waiting until [`Self::watch_vcpus`] and a measurement.
    pub(crate) fn new() -> Self {
        Self {
            started: Instant::now(),
            is_guest_paused: AtomicBool::new(false),
            waits: VcpuWaits::unknown(),
        }
    }

    /// Time since the save began.
    pub(crate) fn now(&self) -> Duration {
        self.started.elapsed()
    }

    /// Does work for which the guest is paused: no thread pauses in this time.
    pub(crate) fn without_pauses<T>(&self, work: impl FnOnce() -> T) -> T {
        self.is_guest_paused.store(true, Ordering::Relaxed);
        let done = work();
        self.is_guest_paused.store(false, Ordering::Relaxed);
        done
    }

    /// From now on it is measured whether these threads of a hypervisor wait for processors.
    pub(crate) fn watch_vcpus(&self, pid: i32, vcpus: &[ThreadId]) {
        self.waits.watch_threads(pid, vcpus);
    }

    /// Called between two pieces of background work: sleeps if it is time to. Returns for how long
    /// it slept.
    pub(crate) fn pause_if_due(&self) -> Duration {
        let now = self.now();
        if self.is_guest_paused.load(Ordering::Relaxed) || !self.waits.is_waiting(now) {
            return Duration::ZERO;
        }
        let Some(pause) = pause_at(now) else { return Duration::ZERO };
        thread::sleep(pause);
        self.now().saturating_sub(now)
    }
}

/// How long to sleep, if at all: all threads sleep until the same time.
fn pause_at(now: Duration) -> Option<Duration> {
    let into_cycle = Duration::from_nanos((now.as_nanos() % CYCLE.as_nanos()) as u64);
    (into_cycle >= WORK).then(|| CYCLE - into_cycle)
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);

    #[test]
    fn all_sleep_until_the_same_time() {
        for now in [10 * CYCLE + WORK, 10 * CYCLE + WORK + MS] {
            assert_eq!(now + pause_at(now).unwrap(), 11 * CYCLE);
        }
        assert_eq!(pause_at(10 * CYCLE), None);
        assert_eq!(pause_at(10 * CYCLE + WORK - MS), None);
    }

    #[test]
    fn vcpus_that_are_not_measured_count_as_waiting() {
        let cycle = DutyCycle::new();
        while cycle.pause_if_due().is_zero() {
            assert!(cycle.now() < Duration::from_secs(10), "nothing pauses");
        }
    }

    #[test]
    fn nothing_pauses_while_the_guest_is_paused() {
        let cycle = DutyCycle::new();
        let ended = cycle.now() + 3 * CYCLE;
        let pauses = || {
            let mut slept = Duration::ZERO;
            while cycle.now() < ended {
                slept += cycle.pause_if_due();
            }
            slept
        };
        assert_eq!(cycle.without_pauses(pauses), Duration::ZERO);
    }

    /// The thread sleeps, so it needs no processor.
    #[test]
    fn nothing_pauses_where_no_vcpu_waits_for_a_processor() {
        let (ids, id) = std::sync::mpsc::channel();
        let sleeper = thread::spawn(move || {
            ids.send(ThreadId(rustix::thread::gettid().as_raw_nonzero().get())).unwrap();
            thread::park();
        });
        let tid = id.recv().unwrap();
        thread::sleep(10 * MS);
        let cycle = DutyCycle::new();
        cycle.watch_vcpus(std::process::id() as i32, &[tid]);
        while cycle.now() < 400 * MS {
            cycle.pause_if_due();
        }
        let slept: Duration = (0..100_000).map(|_| cycle.pause_if_due()).sum();
        sleeper.thread().unpark();
        sleeper.join().unwrap();
        assert_eq!(slept, Duration::ZERO);
    }
}
