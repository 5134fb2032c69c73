//! Kernel workers: finds the vCPU for which a kernel worker took a fault.
//!
//! KVM does not let a vCPU wait for a page: it queues the work of reading it and lets the guest do
//! something else (asynchronous page faults). Nearly all faults of user-mode code in the guest
//! happen that way, and carry the worker's thread id. But the work is queued on the processor the
//! vCPU runs on, for one of the workers bound to it:
//!
//! ```text
//!   vCPU thread on processor 3 --- fault ---> work queue of processor 3 ---> kworker/3:1+events --- userfaultfd
//! ```
//!
//! So the vCPU is the one that ran last on the worker's processor, which the kernel reports for
//! every thread (proc(5), `/proc/PID/task/TID/stat`, field 39). Where none or several did (they
//! move), the fault is attributed to none.

use std::collections::HashMap;
use std::fs::{self, File};
use std::os::unix::fs::FileExt as _;
use std::path::Path;

use firn_types::{ThreadId, VcpuId};

/// More bytes than any `stat` line needs.
const STAT_BYTES: usize = 1024;
/// Fields between the thread's state (field 3, the first after its name) and its last processor
/// (field 39).
const STATE_TO_PROCESSOR: usize = 36;

/// The vCPU threads, and the processors of kernel workers.
pub(crate) struct KernelWorkers {
    vcpus: Vec<(VcpuId, File)>,
    bound: HashMap<ThreadId, Option<u32>>,
}

impl KernelWorkers {
    /// The workers of a hypervisor with these vCPU threads. A vCPU whose `stat` can't be read is
    /// left out.
    pub(crate) fn for_vcpus(pid: i32, vcpus: impl IntoIterator<Item = (ThreadId, VcpuId)>) -> Self {
        let stat = |tid: ThreadId| File::open(format!("/proc/{pid}/task/{}/stat", tid.0)).ok();
        let vcpus = vcpus.into_iter().filter_map(|(tid, vcpu)| Some((vcpu, stat(tid)?))).collect();
        Self { vcpus, bound: HashMap::new() }
    }

    /// The vCPU for which this thread works, if it is a kernel worker bound to a processor. Must be
    /// called at once, because vCPUs move.
    pub(crate) fn vcpu_of(&mut self, worker: ThreadId) -> Option<VcpuId> {
        let processor =
            (*self.bound.entry(worker).or_insert_with(|| find_bound_processor(worker)))?;
        let mut there =
            self.vcpus.iter().filter(|(_, stat)| last_processor(stat) == Some(processor));
        let (vcpu, _) = there.next()?;
        there.next().is_none().then_some(*vcpu)
    }
}

/// Whether a thread is a kernel worker, of whatever kind.
pub(crate) fn is_worker(tid: ThreadId) -> bool {
    let name = stat_of(tid).and_then(|stat| name_in(&stat).map(str::to_owned));
    name.is_some_and(|name| name.starts_with("kworker/"))
}

fn stat_of(tid: ThreadId) -> Option<Vec<u8>> {
    fs::read(Path::new("/proc").join(tid.0.to_string()).join("stat")).ok()
}

/// The processor a kernel worker is bound to. The kernel names workers `kworker/PROCESSOR:NUMBER`,
/// unbound ones `kworker/uPOOL:NUMBER` (`kernel/workqueue.c`), and binds each for life.
fn find_bound_processor(worker: ThreadId) -> Option<u32> {
    processor_in_name(name_in(&stat_of(worker)?)?)
}

fn processor_in_name(name: &str) -> Option<u32> {
    name.strip_prefix("kworker/")?.split(':').next()?.parse().ok()
}

fn name_in(stat: &[u8]) -> Option<&str> {
    let stat = std::str::from_utf8(stat).ok()?;
    Some(stat.split_once('(')?.1.rsplit_once(')')?.0)
}

fn last_processor(stat: &File) -> Option<u32> {
    let mut line = [0; STAT_BYTES];
    let bytes = stat.read_at(&mut line, 0).ok()?;
    processor_in_stat(&line[..bytes])
}

/// A thread's name may hold anything, so fields are counted from its closing bracket.
fn processor_in_stat(stat: &[u8]) -> Option<u32> {
    let after_name = stat.iter().rposition(|&byte| byte == b')')? + 2;
    let mut fields = stat.get(after_name..)?.split(|&byte| byte == b' ');
    std::str::from_utf8(fields.nth(STATE_TO_PROCESSOR)?).ok()?.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    const STAT: &str = "164 (CPU 0) (KVM) R 1 124 0 0 -1 138412096 0 0 0 0 7 3 0 0 20 0 4 0 8423 0 \
        0 18446744073709551615 0 0 0 0 0 0 0 4096 0 0 0 0 -1 5 0 0 0 0 0 0 0 0 0 0 0 0 0\n";

    #[test]
    fn the_last_processor_is_field_39() {
        assert_eq!(processor_in_stat(STAT.as_bytes()), Some(5));
        assert_eq!(name_in(STAT.as_bytes()), Some("CPU 0) (KVM"));
        for cut in 0..STAT.rfind(" 5 ").unwrap() {
            assert_eq!(processor_in_stat(&STAT.as_bytes()[..cut]), None, "cut at {cut}");
        }
    }

    #[test]
    fn only_bound_workers_have_a_processor() {
        assert_eq!(processor_in_name("kworker/3:1-events"), Some(3));
        assert_eq!(processor_in_name("kworker/11:0H"), Some(11));
        assert_eq!(processor_in_name("kworker/u8:3"), None);
        assert_eq!(processor_in_name("qemu-system-x86"), None);
    }

    #[test]
    fn this_thread_ran_on_some_processor() {
        let tid = ThreadId(rustix::thread::gettid().as_raw_nonzero().get());
        let pid = std::process::id() as i32;
        let mut workers = KernelWorkers::for_vcpus(pid, [(tid, VcpuId(0))]);
        assert!(last_processor(&workers.vcpus[0].1).is_some());
        assert_eq!(workers.vcpu_of(tid), None, "no kernel worker");
        assert!(!is_worker(tid));
    }

    #[test]
    fn one_vcpu_on_the_processor_is_it_two_are_none() {
        let pid = std::process::id() as i32;
        let worker = ThreadId(i32::MAX);
        let processor = |workers: &KernelWorkers| last_processor(&workers.vcpus[0].1);
        let tid = ThreadId(rustix::thread::gettid().as_raw_nonzero().get());
        for (vcpus, expected) in [(1, Some(VcpuId(0))), (2, None)] {
            let all = (0..vcpus).map(|number| (tid, VcpuId(number)));
            let mut workers = KernelWorkers::for_vcpus(pid, all);
            // A thread may be moved between two reads of its processor.
            let found = (0..100).any(|_| {
                let bound = processor(&workers);
                workers.bound.insert(worker, bound);
                workers.vcpu_of(worker) == expected
            });
            assert!(found, "{vcpus} vCPUs");
        }
    }
}
