//! The processor of a thread that others wait for.
//!
//! A thread that is woken on another processor, which sleeps, begins after 30 to 80 us in a virtual
//! machine; on the processor of the thread that wakes it and then waits for it, after 2 us. So the
//! thread that answers writes follows the thread that commits, as long as that one writes. If others
//! write, it runs where the kernel finds a free processor.
//!
//! A thread and its processor are one word, to be read as one: the thread's number, times 2^32, plus
//! the processor's number.

use rustix::thread::{CpuSet, gettid, sched_getaffinity, sched_getcpu, sched_setaffinity};

/// How long the thread may run before another has its turn, in ns. The kernel lets a thread with a
/// shorter slice begin earlier (Linux 6.12).
const SLICE: u64 = 100_000;

thread_local! {
    /// The number of this thread: a system call less in each commit.
    static NUMBER: u64 = u64::from(gettid().as_raw_nonzero().get().unsigned_abs());
}

/// This thread and its processor.
pub(crate) fn this_thread() -> u64 {
    // A thread that is ending has no number any more, and writes nothing.
    (NUMBER.try_with(|number| *number).unwrap_or(0) << 32) | sched_getcpu() as u64
}

/// Where the calling thread runs.
#[derive(Debug)]
pub(super) struct FollowedProcessor {
    /// The processors that the process may use. `None` if the kernel does not report them.
    all: Option<CpuSet>,
    /// The only processor where this thread runs now.
    only: Option<usize>,
}

impl FollowedProcessor {
    pub(super) fn new() -> Self {
        shorten_slice();
        Self { all: sched_getaffinity(None).ok(), only: None }
    }

    /// Moves to the processor of `committer` if `writer` is that thread.
    pub(super) fn follow(&mut self, writer: u32, committer: u64) {
        let Some(all) = &self.all else { return };
        let is_same = u64::from(writer) == committer >> 32;
        let processor = is_same.then_some((committer & u64::from(u32::MAX)) as usize);
        if processor == self.only {
            return;
        }
        let mut set = CpuSet::new();
        match processor {
            Some(number) if number < CpuSet::MAX_CPU => set.set(number),
            _ => set = *all,
        }
        // If the kernel refuses, the thread runs where it ran before.
        let _ = sched_setaffinity(None, &set);
        self.only = processor;
    }
}

fn shorten_slice() {
    // SAFETY: a structure of the size that it names, whose other fields are those that the kernel has
    // for the calling thread. The number of this thread is 0.
    unsafe {
        let mut attributes: libc::sched_attr = std::mem::zeroed();
        let size = size_of::<libc::sched_attr>() as u32;
        let got = libc::syscall(libc::SYS_sched_getattr, 0, &raw mut attributes, size, 0);
        if got == 0 && attributes.sched_policy == libc::SCHED_OTHER as u32 {
            attributes.sched_runtime = SLICE;
            libc::syscall(libc::SYS_sched_setattr, 0, &raw const attributes, 0);
        }
    }
}
