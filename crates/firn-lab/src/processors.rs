//! Which processors guests run on, and which all else.
//!
//! Where clusters are, a host has processors that no VM uses; the hosts of a lab share the few of one machine, and what Firn does beside a
//! guest would be taken from the guest. So that it is seen by itself, hypervisors get processors that nothing else of the lab runs on, with
//! and without Firn.
//!
//! ```text
//!   processor   0 .. guests     hypervisors, all their threads
//!               guests ..       the lab, agents, supervisors, standbys
//! ```
//!
//! Source: sched_setaffinity(2): threads and processes begin where who makes them may run.

use std::io;

use procfs::process::Process;
use rustix::thread::{CpuSet, Pid, sched_getaffinity, sched_setaffinity};

/// Processors of this machine that were split, until this is dropped.
#[derive(Debug)]
pub struct Split {
    before: CpuSet,
    guests: CpuSet,
    /// How many guests have.
    pub for_guests: usize,
    /// How many all else has.
    pub for_others: usize,
}

impl Split {
    /// Has this thread, and what it starts from now on, leave half of its processors to guests, `most` at most. `None` if it has but one.
    pub fn new(most: usize) -> io::Result<Option<Self>> {
        let before = sched_getaffinity(None)?;
        let all: Vec<usize> = (0..CpuSet::MAX_CPU).filter(|&cpu| before.is_set(cpu)).collect();
        let for_guests = (all.len() / 2).min(most);
        if for_guests == 0 {
            return Ok(None);
        }
        let (guests, others) = all.split_at(for_guests);
        sched_setaffinity(None, &set(others))?;
        Ok(Some(Self { before, guests: set(guests), for_guests, for_others: others.len() }))
    }

    /// Has a hypervisor run on the guests' processors.
    pub fn give(&self, pid: i32) -> io::Result<()> {
        let threads = Process::new(pid).and_then(|process| process.tasks());
        for thread in threads.map_err(io::Error::other)? {
            let tid = thread.map_err(io::Error::other)?.tid;
            // It may have ended.
            match sched_setaffinity(Pid::from_raw(tid), &self.guests) {
                Ok(()) | Err(rustix::io::Errno::SRCH) => {}
                Err(errno) => return Err(errno.into()),
            }
        }
        Ok(())
    }
}

impl Drop for Split {
    fn drop(&mut self) {
        // Should this fail, what comes next has fewer processors: nothing to do about it.
        sched_setaffinity(None, &self.before).unwrap_or_default();
    }
}

fn set(cpus: &[usize]) -> CpuSet {
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
        let Some(split) = Split::new(1).unwrap() else {
            eprintln!("skipped: this machine has one processor");
            return;
        };
        let mut child = std::process::Command::new("sleep").arg("60").spawn().unwrap();
        let pid = child.id() as i32;
        let of_child = || sched_getaffinity(Pid::from_raw(pid)).unwrap();
        assert_eq!(of_child(), mine(), "it began where the lab runs");
        split.give(pid).unwrap();
        assert_eq!(of_child().count(), 1);
        assert!((0..CpuSet::MAX_CPU).all(|cpu| !(of_child().is_set(cpu) && mine().is_set(cpu))));
        assert_eq!(mine().count() as usize, split.for_others);
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(split.give(pid).is_err(), "it is gone");
        drop(split);
        assert_eq!(mine(), before);
    }
}
