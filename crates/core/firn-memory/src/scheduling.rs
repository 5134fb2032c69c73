//! Scheduling of Firn's threads where processors are scarce.
//!
//! ```text
//!   the thread that answers page faults      before all others          a vCPU waits for it, for microseconds of work
//!   the thread that pauses a VM for an epoch before all others          the VM is paused, for a millisecond of work
//!   vCPUs, and all else on the host          as usual
//!   copying, compressing, writing            behind                     no other thread waits for them
//! ```
//!
//! A thread that wakes after a sleep waits for a processor: milliseconds where other threads keep
//! all processors busy. A guest that touches a hundred pages one after another would wait that long
//! for each.

use std::io;
use std::marker::PhantomData;

use crate::sys::sched;

/// The niceness of background work (nice(2)).
const NICENESS: i32 = 10;

/// Makes the calling thread a real-time thread: from now on it runs as soon as it has work
/// (`SCHED_FIFO`, sched(7)). It must not wait for other threads by spinning: they may have no
/// processor.
///
/// # Errors
/// If this process may not (`CAP_SYS_NICE`, or `RLIMIT_RTPRIO`). Firn works without, less promptly.
pub fn set_realtime() -> io::Result<()> {
    sched::set_real_time()
}

/// The calling thread is a real-time thread, where the process may do that, until this guard is
/// dropped.
#[derive(Debug)]
#[must_use = "the thread has real-time priority until this is dropped"]
pub struct RealtimeGuard {
    /// The previous policy, unless the thread was a real-time thread already.
    before: Option<i32>,
    /// The guard concerns the thread that made it.
    not_send: PhantomData<*const ()>,
}

impl RealtimeGuard {
    /// Makes the calling thread a real-time thread from now on. It must not wait for other threads
    /// by spinning.
    pub fn enter() -> Option<Self> {
        let before = sched::ordinary_policy().ok()?;
        if before.is_some() {
            set_realtime().ok()?;
        }
        Some(Self { before, not_send: PhantomData })
    }
}

impl Drop for RealtimeGuard {
    fn drop(&mut self) {
        // The kernel refuses this to no thread that was allowed to become real-time.
        let _ = self.before.map(sched::set_ordinary);
    }
}

/// Lowers the priority of the calling thread, and of no other, for background work (nice(2)).
pub fn set_background() {
    let myself = Some(rustix::thread::gettid());
    // A failure is ignored: then the work only takes more of the processors.
    let _ = rustix::process::setpriority_process(myself, NICENESS);
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stat(field: usize) -> i64 {
        let stat = std::fs::read_to_string("/proc/thread-self/stat").unwrap();
        let behind_name = stat.rsplit(')').next().unwrap();
        behind_name.split_whitespace().nth(field - 3).unwrap().parse().unwrap()
    }

    /// Fields of proc_pid_stat(5).
    const NICE: usize = 19;
    const POLICY: usize = 41;

    #[test]
    fn priority_is_raised_if_permitted_and_not_inherited_by_children() {
        std::thread::spawn(|| {
            let Err(why) = set_realtime() else {
                assert_eq!(stat(POLICY), 1);
                let started = std::thread::spawn(|| stat(POLICY)).join().unwrap();
                return assert_eq!(started, 0);
            };
            assert_eq!((why.kind(), stat(POLICY)), (io::ErrorKind::PermissionDenied, 0));
        })
        .join()
        .unwrap();
    }

    #[test]
    fn coming_first_ends_and_niceness_stays() {
        std::thread::spawn(|| {
            set_background();
            let first = RealtimeGuard::enter();
            assert_eq!(stat(POLICY), i64::from(first.is_some()));
            drop(first);
            assert_eq!((stat(POLICY), stat(NICE)), (0, 10));
            if set_realtime().is_ok() {
                drop(RealtimeGuard::enter());
                assert_eq!(stat(POLICY), 1, "it was so before");
            }
        })
        .join()
        .unwrap();
    }

    #[test]
    fn stepping_back_is_for_one_thread() {
        let before = stat(NICE);
        assert_eq!(std::thread::spawn(|| (set_background(), stat(NICE)).1).join().unwrap(), 10);
        assert_eq!(stat(NICE), before);
    }
}
