//! vCPU load: how much of the processors the vCPUs of a guest would use.
//!
//! The kernel reports for every thread for how long it ran, and for how long it waited for a
//! processor: the first two numbers of `/proc/PID/task/TID/schedstat`, in nanoseconds
//! (`Documentation/scheduler/sched-stats.rst`). It adds a wait only when the wait is over.

use std::fs::File;
use std::os::unix::fs::FileExt as _;
use std::time::Duration;

use firn_types::ThreadId;

/// More bytes than three numbers need.
const LINE_BYTES: usize = 128;

/// The processor time that vCPUs have demanded until now.
#[derive(Debug)]
pub(crate) struct VcpuLoad {
    vcpus: Vec<File>,
    last_call: Duration,
    wanted: Duration,
}

impl VcpuLoad {
    /// The load of these threads of a hypervisor. A thread whose `schedstat` can't be opened is
    /// left out.
    pub(crate) fn from_threads(pid: i32, vcpus: &[ThreadId]) -> Self {
        let open =
            |tid: &ThreadId| File::open(format!("/proc/{pid}/task/{}/schedstat", tid.0)).ok();
        let vcpus = vcpus.iter().filter_map(open).collect();
        Self { vcpus, last_call: Duration::ZERO, wanted: Duration::MAX }
    }

    /// The average number of processors that they ran on or waited for since the last call. `None`
    /// the first time, and where the kernel does not report it.
    pub(crate) fn load_since_last(&mut self, now: Duration) -> Option<f64> {
        let wanted: Option<Duration> = self.vcpus.iter().map(read_demand).sum();
        let wanted = wanted.filter(|_| !self.vcpus.is_empty())?;
        let more = wanted.checked_sub(self.wanted);
        let time = now.checked_sub(self.last_call);
        (self.last_call, self.wanted) = (now, wanted);
        let time = time.filter(|time| !time.is_zero())?;
        Some(more?.as_secs_f64() / time.as_secs_f64())
    }
}

fn read_demand(schedstat: &File) -> Option<Duration> {
    let mut line = [0; LINE_BYTES];
    let bytes = schedstat.read_at(&mut line, 0).ok()?;
    parse_schedstat(std::str::from_utf8(&line[..bytes]).ok()?)
}

fn parse_schedstat(schedstat: &str) -> Option<Duration> {
    let mut numbers = schedstat.split_whitespace().map(str::parse);
    let (ran, waited): (u64, u64) = (numbers.next()?.ok()?, numbers.next()?.ok()?);
    ran.checked_add(waited).map(Duration::from_nanos)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Instant;

    #[test]
    fn running_and_waiting_are_demand() {
        assert_eq!(parse_schedstat("300 40 7\n"), Some(Duration::from_nanos(340)));
        for line in ["", "300", "300 x 7", "18446744073709551615 1 1"] {
            assert_eq!(parse_schedstat(line), None, "{line:?}");
        }
    }

    #[test]
    fn a_computing_thread_counts_as_load() {
        let myself = ThreadId(rustix::thread::gettid().as_raw_nonzero().get());
        let mut demand = VcpuLoad::from_threads(std::process::id() as i32, &[myself]);
        let started = Instant::now();
        assert_eq!(demand.load_since_last(started.elapsed()), None);
        while started.elapsed() < Duration::from_millis(50) {
            std::hint::spin_loop();
        }
        let wanted = demand.load_since_last(started.elapsed()).unwrap();
        assert!((0.5..1.5).contains(&wanted), "{wanted}");
        std::thread::sleep(Duration::from_millis(50));
        let wanted = demand.load_since_last(started.elapsed()).unwrap();
        assert!(wanted < 0.5, "{wanted}");
    }

    #[test]
    fn missing_threads_give_no_load() {
        let mut demand = VcpuLoad::from_threads(std::process::id() as i32, &[ThreadId(i32::MAX)]);
        assert_eq!(
            (demand.load_since_last(Duration::ZERO), demand.load_since_last(Duration::MAX)),
            (None, None)
        );
    }
}
