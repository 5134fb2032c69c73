//! Processor split: separate processors for guests and for everything else.
//!
//! A real host of a cluster has processors that no VM uses. The hosts of a lab share the few
//! processors of one machine, so Firn's work beside a guest would slow the guest. To measure Firn's
//! other effects alone, hypervisors get processors that nothing else of the lab runs on, with and
//! without Firn.
//!
//! ```text
//!   processor   0 .. guests     hypervisors, all their threads
//!               guests ..       the lab, agents, supervisors, standbys
//! ```
//!
//! Source: sched_setaffinity(2): threads and processes inherit the processors of their creator.

use std::io;

use procfs::process::Process;
use rustix::thread::{CpuSet, Pid, sched_getaffinity, sched_setaffinity};

/// A split of this machine's processors, until this is dropped.
#[derive(Debug)]
pub struct ProcessorSplit {
    before: CpuSet,
    guests: CpuSet,
    /// Number of processors for guests.
    pub for_guests: usize,
    /// Number of processors for everything else.
    pub for_others: usize,
}

impl ProcessorSplit {
    /// Leaves half of this thread's processors to guests, `most` at most. This thread, and those
    /// that it starts from now on, run on the others. `None` if the thread has only one processor.
    pub fn new(most: usize) -> io::Result<Option<Self>> {
        let before = sched_getaffinity(None)?;
        let all: Vec<usize> = (0..CpuSet::MAX_CPU).filter(|&cpu| before.is_set(cpu)).collect();
        let for_guests = (all.len() / 2).min(most);
        if for_guests == 0 {
            return Ok(None);
        }
        let (guests, others) = all.split_at(for_guests);
        sched_setaffinity(None, &cpu_set(others))?;
        Ok(Some(Self { before, guests: cpu_set(guests), for_guests, for_others: others.len() }))
    }

    /// Moves a hypervisor to the guests' processors.
    pub fn move_hypervisor(&self, pid: i32) -> io::Result<()> {
        let threads = Process::new(pid).and_then(|process| process.tasks());
        for thread in threads.map_err(io::Error::other)? {
            let tid = thread.map_err(io::Error::other)?.tid;
            // The thread may have ended.
            match sched_setaffinity(Pid::from_raw(tid), &self.guests) {
                Ok(()) | Err(rustix::io::Errno::SRCH) => {}
                Err(errno) => return Err(errno.into()),
            }
        }
        Ok(())
    }
}

impl Drop for ProcessorSplit {
    fn drop(&mut self) {
        // If this fails, later work has fewer processors; there is no remedy.
        sched_setaffinity(None, &self.before).unwrap_or_default();
    }
}

fn cpu_set(cpus: &[usize]) -> CpuSet {
    let mut set = CpuSet::new();
    cpus.iter().for_each(|&cpu| set.set(cpu));
    set
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn guests_and_all_else_share_no_processor() {
        let mine = || sched_getaffinity(None).unwrap();
        let before = mine();
        let Some(split) = ProcessorSplit::new(1).unwrap() else {
            firn_skip::skip_test("this machine has one processor");
            return;
        };
        let mut child = std::process::Command::new("sleep").arg("60").spawn().unwrap();
        let pid = child.id() as i32;
        let of_child = || sched_getaffinity(Pid::from_raw(pid)).unwrap();
        assert_eq!(of_child(), mine(), "it began where the lab runs");
        split.move_hypervisor(pid).unwrap();
        assert_eq!(of_child().count(), 1);
        assert!((0..CpuSet::MAX_CPU).all(|cpu| !(of_child().is_set(cpu) && mine().is_set(cpu))));
        assert_eq!(mine().count() as usize, split.for_others);
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(split.move_hypervisor(pid).is_err(), "it is gone");
        drop(split);
        assert_eq!(mine(), before);
    }
}
