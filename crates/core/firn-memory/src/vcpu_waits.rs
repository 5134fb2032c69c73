//! vCPU waits: whether the vCPUs of a guest wait for processors.
//!
//! Background work rests only where that is so: on a host with idle processors, a vCPU that
//! computes without end loses nothing to work on another processor.
//!
//! The kernel reports for every thread for how long it ran, and for how long it waited for a
//! processor: the first two numbers of `/proc/PID/task/TID/schedstat`, in nanoseconds
//! (`Documentation/scheduler/sched-stats.rst`). It adds a wait only when the wait is over. So a
//! thread that is runnable (state `R` in `stat`, proc_pid_stat(5)) at two checks, and has not run
//! between them, counts as waiting, too: the kernel counts a running thread at every tick.
//!
//! ```text
//!   check         |          |          |          |          |
//!   vCPU      #####..........................######                 # runs   . waits
//!   schedstat  ran           -          -          ran, waited
//!   stat                     R          R
//!   result               not known    waits      waited
//! ```

use std::fs::File;
use std::os::unix::fs::FileExt as _;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use firn_types::ThreadId;

/// More bytes than the numbers of `schedstat` need, and than any `stat` line has before its state.
const LINE_BYTES: usize = 128;
/// The time between two checks. It is longer than a tick of the kernel's clock.
const CHECK_INTERVAL: Duration = Duration::from_millis(7);
/// vCPUs wait if all of them together wait for this share of the time. A vCPU that wakes up waits
/// for some microseconds on every host.
const WAIT_SHARE: f64 = 0.05;
/// For how long they count as waiting after that.
const WAIT_TIME: Duration = Duration::from_millis(250);

/// Checks now and then whether the vCPUs of a guest wait for processors. Threads share it.
#[derive(Debug)]
pub struct VcpuWaits {
    /// Until when vCPUs count as waiting, in microseconds.
    until_us: AtomicU64,
    /// The number of the interval in which the last check was made.
    last_check: AtomicU64,
    vcpus: Mutex<VcpuTimes>,
}

impl VcpuWaits {
    /// No vCPUs are known. They count as waiting until there is a measurement.
    pub fn unknown() -> Self {
        Self {
            until_us: AtomicU64::new(u64::MAX),
            last_check: AtomicU64::new(u64::MAX),
            vcpus: Mutex::default(),
        }
    }

    /// The waits of these threads of a hypervisor.
    pub fn of_threads(pid: i32, vcpus: &[ThreadId]) -> Self {
        let waits = Self::unknown();
        waits.watch_threads(pid, vcpus);
        waits
    }

    /// From now on these threads of a hypervisor are watched. A thread whose files can't be opened
    /// is left out.
    pub fn watch_threads(&self, pid: i32, vcpus: &[ThreadId]) {
        let open = |tid: &ThreadId| VcpuFiles::open(pid, *tid);
        let files = vcpus.iter().filter_map(open).collect();
        let times = VcpuTimes { files, ..VcpuTimes::default() };
        *self.vcpus.lock().unwrap_or_else(PoisonError::into_inner) = times;
    }

    /// Whether vCPUs wait for processors. `now` counts from any fixed instant. Most calls take a
    /// few nanoseconds: only one in an interval reads files.
    pub fn is_waiting(&self, now: Duration) -> bool {
        let number = (now.as_nanos() / CHECK_INTERVAL.as_nanos()) as u64;
        if self.last_check.swap(number, Ordering::Relaxed) != number {
            self.check_vcpus(now);
        }
        now.as_micros() < u128::from(self.until_us.load(Ordering::Relaxed))
    }

    fn check_vcpus(&self, now: Duration) {
        // While another thread checks, this one need not.
        let Ok(mut vcpus) = self.vcpus.try_lock() else { return };
        let Some(share) = vcpus.share_since_last(now) else { return };
        let until = waiting_until(now, share, self.until_us.load(Ordering::Relaxed));
        self.until_us.store(until, Ordering::Relaxed);
    }
}

/// Until when vCPUs count as waiting that waited for this share of the time. The state before the
/// first measurement ends with it.
fn waiting_until(now: Duration, share: f64, before_us: u64) -> u64 {
    match (share >= WAIT_SHARE, before_us) {
        (true, _) => (now + WAIT_TIME).as_micros() as u64,
        (false, u64::MAX) => now.as_micros() as u64,
        (false, before) => before,
    }
}

/// The files that describe a vCPU's thread, and what they contained last.
#[derive(Debug)]
struct VcpuFiles {
    schedstat: File,
    stat: File,
    last: Option<ProcessorTimes>,
    /// It was runnable at the last check, and had not run since the check before.
    was_stuck: bool,
}

/// How long a thread ran, and how long it waited for a processor, in nanoseconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct ProcessorTimes {
    ran: u64,
    waited: u64,
}

impl VcpuFiles {
    fn open(pid: i32, tid: ThreadId) -> Option<Self> {
        let open = |name| File::open(format!("/proc/{pid}/task/{}/{name}", tid.0)).ok();
        let (schedstat, stat) = (open("schedstat")?, open("stat")?);
        Some(Self { schedstat, stat, last: None, was_stuck: false })
    }

    /// For how long it waited since the last call, which was `interval` ago. `None` the first time,
    /// and where the kernel does not report it.
    fn wait_since_last(&mut self, interval: Duration) -> Option<Duration> {
        let now = read_line(&self.schedstat, parse_schedstat)?;
        let last = self.last.replace(now)?;
        let is_stuck = now.ran == last.ran && read_line(&self.stat, parse_runnable)?;
        let was_stuck = std::mem::replace(&mut self.was_stuck, is_stuck);
        match is_stuck && was_stuck {
            true => Some(interval),
            // The wait may have begun long before.
            false => Some(Duration::from_nanos(now.waited.saturating_sub(last.waited))),
        }
    }
}

/// All vCPUs of a guest.
#[derive(Debug, Default)]
struct VcpuTimes {
    files: Vec<VcpuFiles>,
    last_call: Duration,
}

impl VcpuTimes {
    /// The average number of vCPUs that waited for a processor since the last call.
    fn share_since_last(&mut self, now: Duration) -> Option<f64> {
        let interval = now.saturating_sub(self.last_call);
        self.last_call = now;
        let waits: Vec<Option<Duration>> =
            self.files.iter_mut().map(|vcpu| vcpu.wait_since_last(interval)).collect();
        let total: Duration = waits.into_iter().sum::<Option<Duration>>()?;
        let is_known = !self.files.is_empty() && !interval.is_zero();
        is_known.then(|| total.as_secs_f64() / interval.as_secs_f64())
    }
}

fn read_line<T>(file: &File, parse: impl FnOnce(&str) -> Option<T>) -> Option<T> {
    let mut line = [0; LINE_BYTES];
    let bytes = file.read_at(&mut line, 0).ok()?;
    parse(&String::from_utf8_lossy(&line[..bytes]))
}

fn parse_schedstat(line: &str) -> Option<ProcessorTimes> {
    let mut numbers = line.split_whitespace().map(str::parse);
    Some(ProcessorTimes { ran: numbers.next()?.ok()?, waited: numbers.next()?.ok()? })
}

/// Whether a thread is runnable. Its name may hold anything, so the state is found behind the last
/// bracket; the numbers that follow have none.
fn parse_runnable(line: &str) -> Option<bool> {
    Some(line.rsplit_once(')')?.1.trim_start().starts_with('R'))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;
    use std::sync::atomic::AtomicBool;
    use std::time::Instant;

    const MS: Duration = Duration::from_millis(1);

    #[test]
    fn lines_of_the_kernel_are_parsed() {
        let times = ProcessorTimes { ran: 300, waited: 40 };
        assert_eq!(parse_schedstat("300 40 7\n"), Some(times));
        for line in ["", "300", "300 x 7"] {
            assert_eq!(parse_schedstat(line), None, "{line:?}");
        }
        assert_eq!(parse_runnable("164 (CPU 0) (KVM) R 1 124 0 0 -1"), Some(true));
        assert_eq!(parse_runnable("164 (CPU R) S 1 124 0 0 -1"), Some(false));
        assert_eq!(parse_runnable("164 (CPU"), None);
    }

    #[test]
    fn a_wait_counts_for_a_while_and_the_first_measurement_ends_not_knowing() {
        let until = |now, share, before: Duration| {
            Duration::from_micros(waiting_until(now, share, before.as_micros() as u64))
        };
        assert_eq!(until(10 * MS, 1.0, Duration::ZERO), 10 * MS + WAIT_TIME);
        assert_eq!(until(20 * MS, 0.01, 10 * MS + WAIT_TIME), 10 * MS + WAIT_TIME);
        assert_eq!(waiting_until(MS, 0.0, u64::MAX), MS.as_micros() as u64);
    }

    #[test]
    fn vcpus_that_are_not_known_count_as_waiting() {
        let waits = VcpuWaits::of_threads(std::process::id() as i32, &[ThreadId(i32::MAX)]);
        assert!((0..100).all(|ms| waits.is_waiting(ms * MS)));
    }

    #[test]
    fn a_thread_that_sleeps_does_not_wait_for_a_processor() {
        let myself = ThreadId(rustix::thread::gettid().as_raw_nonzero().get());
        let (ended, tid) = (Arc::new(AtomicBool::new(false)), std::sync::mpsc::channel());
        let sleeper = {
            let ended = Arc::clone(&ended);
            std::thread::spawn(move || {
                let own = rustix::thread::gettid().as_raw_nonzero().get();
                tid.0.send(ThreadId(own)).unwrap();
                while !ended.load(Ordering::Relaxed) {
                    std::thread::park_timeout(Duration::from_secs(1));
                }
            })
        };
        let sleeping = tid.1.recv().unwrap();
        assert_ne!(sleeping, myself);
        std::thread::sleep(20 * MS);
        let waits = VcpuWaits::of_threads(std::process::id() as i32, &[sleeping]);
        let started = Instant::now();
        while waits.is_waiting(started.elapsed()) {
            assert!(started.elapsed() < Duration::from_secs(5), "it counts as waiting");
            std::thread::sleep(CHECK_INTERVAL);
        }
        ended.store(true, Ordering::Relaxed);
        sleeper.thread().unpark();
        sleeper.join().unwrap();
    }

    /// Two threads on one processor: one of them always waits.
    #[test]
    fn a_thread_that_shares_a_processor_waits() {
        use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};
        let mut one = CpuSet::new();
        let all = sched_getaffinity(None).unwrap();
        one.set((0..CpuSet::MAX_CPU).find(|&cpu| all.is_set(cpu)).unwrap());
        let (ended, ids) = (Arc::new(AtomicBool::new(false)), std::sync::mpsc::channel());
        let spinners: Vec<_> = (0..2)
            .map(|_| {
                let (ended, ids) = (Arc::clone(&ended), ids.0.clone());
                std::thread::spawn(move || {
                    sched_setaffinity(None, &one).unwrap();
                    let own = rustix::thread::gettid().as_raw_nonzero().get();
                    ids.send(ThreadId(own)).unwrap();
                    while !ended.load(Ordering::Relaxed) {
                        std::hint::spin_loop();
                    }
                })
            })
            .collect();
        let tids = [ids.1.recv().unwrap(), ids.1.recv().unwrap()];
        let waits = VcpuWaits::of_threads(std::process::id() as i32, &tids);
        let started = Instant::now();
        let mut waiting = 0;
        while started.elapsed() < Duration::from_secs(1) {
            std::thread::sleep(CHECK_INTERVAL);
            let is_new = started.elapsed() < Duration::from_millis(500);
            waiting += u32::from(waits.is_waiting(started.elapsed()) && !is_new);
        }
        ended.store(true, Ordering::Relaxed);
        spinners.into_iter().for_each(|spinner| spinner.join().unwrap());
        assert!(waiting > 10, "{waiting}");
    }
}
