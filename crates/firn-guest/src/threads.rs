//! One thread per vCPU.

use std::thread::available_parallelism;

use anyhow::{Context as _, Result};
use rustix::thread::{CpuSet, sched_setaffinity};

/// Threads a load uses unless told otherwise: one per vCPU.
pub fn vcpus() -> usize {
    available_parallelism().map_or(1, usize::from)
}

/// Keeps the calling thread on one vCPU. Numbers beyond the last vCPU wrap around.
pub fn pin(thread: usize) -> Result<()> {
    let mut only = CpuSet::new();
    only.set(thread % vcpus_of_machine());
    sched_setaffinity(None, &only).with_context(|| format!("cannot pin thread {thread} to a vCPU"))
}

/// vCPUs whatever this process is allowed to use: a pinned thread must not count itself.
fn vcpus_of_machine() -> usize {
    use std::sync::OnceLock;
    static VCPUS: OnceLock<usize> = OnceLock::new();
    *VCPUS.get_or_init(vcpus)
}
