//! Processor times: how long processors ran a guest, and how long they ran its saver.

use std::time::Instant;

use anyhow::{Context as _, Result};
use firn_vmm::QemuVm;
use procfs::process::{Process, Task};

/// The threads and processes whose processor time is measured.
pub(super) struct CpuTimeSources {
    vcpus: Vec<Task>,
    hypervisor: Process,
    supervisor: Process,
    since: Instant,
    /// Duration of a page fault.
    fault_s: f64,
}

impl CpuTimeSources {
    pub(super) fn from_vm(vm: &mut QemuVm, pids: (i32, i32), fault_s: f64) -> Result<Self> {
        let (hypervisor, supervisor) = (Process::new(pids.0)?, Process::new(pids.1)?);
        let threads = vm.vcpus()?.into_iter().map(|vcpu| hypervisor.task_from_tid(vcpu.tid.0));
        let vcpus = threads.collect::<Result<Vec<_>, _>>()?;
        vcpus.first().context("a VM without vCPUs")?;
        Ok(Self { vcpus, hypervisor, supervisor, since: Instant::now(), fault_s })
    }

    /// Number of vCPUs.
    pub(super) fn vcpu_count(&self) -> usize {
        self.vcpus.len()
    }

    /// The times until now.
    pub(super) fn read_times(&self) -> Result<CpuTimes> {
        let mut all =
            CpuTimes { seconds: self.since.elapsed().as_secs_f64(), ..CpuTimes::default() };
        let share = |nanoseconds: u64| nanoseconds as f64 / 1e9 / self.vcpus.len() as f64;
        for vcpu in &self.vcpus {
            let (stat, times) = (vcpu.stat()?, vcpu.schedstat()?);
            let ticks = (stat.utime + stat.stime).max(1) as f64;
            all.kernel_s += share(times.sum_exec_runtime) * stat.stime as f64 / ticks;
            let faults = (stat.minflt + stat.majflt) as f64;
            all.faults_s += faults * self.fault_s / self.vcpus.len() as f64;
            all.delayed_s += share(times.run_delay);
            all.stopped_s -= share(times.sum_exec_runtime + times.run_delay);
            all.saver_s -= share(times.sum_exec_runtime);
        }
        all.stopped_s += all.seconds;
        for process in [&self.hypervisor, &self.supervisor] {
            all.saver_s += process_seconds(process)? / self.vcpus.len() as f64;
        }
        Ok(all)
    }
}

/// Processor time of a process, including threads that have ended.
fn process_seconds(process: &Process) -> Result<f64> {
    let stat = process.stat()?;
    Ok((stat.utime + stat.stime) as f64 / procfs::ticks_per_second() as f64)
}

/// Processor time of all children of this process that have ended.
pub(super) fn children_seconds() -> Result<f64> {
    let stat = Process::myself()?.stat()?;
    Ok((stat.cutime + stat.cstime) as f64 / procfs::ticks_per_second() as f64)
}

/// Seconds of each vCPU, on average.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct CpuTimes {
    pub(super) seconds: f64,
    /// It ran in the kernel.
    pub(super) kernel_s: f64,
    /// It ran in the kernel for page faults.
    pub(super) faults_s: f64,
    /// Another thread had its processor.
    pub(super) delayed_s: f64,
    /// It waited for something else, or was idle.
    pub(super) stopped_s: f64,
    /// The supervisor ran, or the hypervisor's other threads.
    pub(super) saver_s: f64,
}

impl CpuTimes {
    pub(super) fn difference_until(self, then: Self) -> Self {
        then.add_scaled(self, -1.0)
    }

    pub(super) fn add_scaled(self, other: Self, factor: f64) -> Self {
        Self {
            seconds: self.seconds + factor * other.seconds,
            kernel_s: self.kernel_s + factor * other.kernel_s,
            faults_s: self.faults_s + factor * other.faults_s,
            delayed_s: self.delayed_s + factor * other.delayed_s,
            stopped_s: self.stopped_s + factor * other.stopped_s,
            saver_s: self.saver_s + factor * other.saver_s,
        }
    }

    /// Time in which the vCPU did not run the guest.
    pub(super) fn waited_s(self) -> f64 {
        self.kernel_s + self.delayed_s + self.stopped_s
    }
}
