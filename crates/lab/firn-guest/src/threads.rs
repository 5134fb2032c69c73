//! Threads of a load: one per vCPU.

use std::thread::available_parallelism;

use anyhow::{Context as _, Result};
use rustix::thread::{CpuSet, sched_setaffinity};

/// Default number of threads of a load: one per vCPU.
pub fn vcpu_count() -> usize {
    available_parallelism().map_or(1, usize::from)
}

/// Pins the calling thread to one vCPU. Numbers beyond the last vCPU wrap around.
pub fn pin_thread(thread: usize) -> Result<()> {
    let mut only = CpuSet::new();
    only.set(thread % vcpus_of_machine());
    sched_setaffinity(None, &only).with_context(|| format!("cannot pin thread {thread} to a vCPU"))
}

/// The number of vCPUs, whatever this process may use: a pinned thread would count only its own.
fn vcpus_of_machine() -> usize {
    use std::sync::OnceLock;
    static VCPUS: OnceLock<usize> = OnceLock::new();
    *VCPUS.get_or_init(vcpu_count)
}
