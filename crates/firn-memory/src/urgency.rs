//! Who runs first where processors are scarce.
//!
//! ```text
//!   the thread that answers page faults      before everybody           a vCPU waits for it, for microseconds of work
//!   who pauses a VM for an epoch             before everybody           the VM stands still, for a millisecond of work
//!   vCPUs, and all else on the host          as always
//!   copying, compressing, writing            behind                     nobody waits for them
//! ```
//!
//! A thread that has slept waits for its turn when it wakes: milliseconds where others keep all processors busy. A guest that
//! touches a hundred pages one after another would wait that long for each.

use std::io;
use std::marker::PhantomData;

use crate::sys::sched;

/// How far background work steps back, in nice(2) units.
const NICENESS: i32 = 10;

/// From now on the calling thread runs as soon as it has something to do (`SCHED_FIFO`, sched(7)). It must not wait for others by
/// spinning: they may have no processor.
///
/// # Errors
/// If this process may not (`CAP_SYS_NICE`, or `RLIMIT_RTPRIO`). It works without, less promptly.
pub fn come_first() -> io::Result<()> {
    sched::real_time()
}

/// The calling thread comes first, where it may, until this is dropped.
#[derive(Debug)]
#[must_use = "it comes first until this is dropped"]
pub struct First {
    /// How it was scheduled before, unless it came first as it is.
    before: Option<i32>,
    /// It is about the thread that made it.
    not_send: PhantomData<*const ()>,
}

impl First {
    /// From now on. It must not wait for others by spinning.
    pub fn now() -> Option<Self> {
        let before = sched::ordinary().ok()?;
        if before.is_some() {
            come_first().ok()?;
        }
        Some(Self { before, not_send: PhantomData })
    }
}

impl Drop for First {
    fn drop(&mut self) {
        // Nobody is refused that who was allowed the other.
        let _ = self.before.map(sched::set_ordinary);
    }
}

/// From now on the calling thread, and no other, leaves the processors to others (nice(2)).
pub fn step_back() {
    let myself = Some(rustix::thread::gettid());
    // Only a courtesy: a host that refuses it gets work that is less polite.
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
    fn whoever_may_comes_first_and_whom_it_starts_does_not() {
        std::thread::spawn(|| {
            let Err(why) = come_first() else {
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
            step_back();
            let first = First::now();
            assert_eq!(stat(POLICY), i64::from(first.is_some()));
            drop(first);
            assert_eq!((stat(POLICY), stat(NICE)), (0, 10));
            if come_first().is_ok() {
                drop(First::now());
                assert_eq!(stat(POLICY), 1, "it was so before");
            }
        })
        .join()
        .unwrap();
    }

    #[test]
    fn stepping_back_is_for_one_thread() {
        let before = stat(NICE);
        assert_eq!(std::thread::spawn(|| (step_back(), stat(NICE)).1).join().unwrap(), 10);
        assert_eq!(stat(NICE), before);
    }
}
