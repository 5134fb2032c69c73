//! `ws-overhead`: the overhead of continuous access scans in a running guest.
//!
//! Answers the question of Tables 4 to 6 of Zhang et al. (VEE 2011) for access-bit scans, which run
//! all the time. The cost of tracing is the cost of a save (`halite-save`).
//!
//! **What varies**: whether the guest's memory is scanned (`firn attach --working-set access-bits`,
//! 100 MB/s) or Firn is detached, and its work: `synthetic`, `writers`, `sha`, `redis` as in
//! `halite-save`.
//!
//! **What is held equal**: everything. The guest works without an end, and Firn attaches and
//! detaches alternately:
//!
//! ```text
//!   the guest works   ------------------------------------------------------------------>
//!                     alone |attach| scanned |detach| alone |attach| scanned |detach| alone
//! ```
//!
//! Shared machines are faster in one minute than in the next, by more than the effect to be
//! measured. So samples are short and many, and each one with a scan is compared with the mean of
//! the two beside it. A sample begins a moment after attaching or detaching, whose cost is not that
//! of scanning. The scan of each sample is a new one, which begins at the bottom of RAM like the
//! one before: every sample scans the pages at the bottom, and none those at the top. A new scan
//! knows no page as used, so it visits its first chunks faster than it would later.
//!
//! **What is measured**, as a reduction while the guest is scanned:
//!
//! - `overhead_percent`: the share of time in which the host runs the code of the guest's vCPUs
//!   (user time of the hypervisor). The work leaves no vCPU idle, so every effect of a scan on the
//!   guest is missing there: page faults, the hypervisor's threads stopped or waiting for its
//!   memory map, processors used by Firn. It does not show how much a vCPU does in that time.
//! - `rate_percent`: the rate of the guest's work, by its own clock. It includes everything, but
//!   caches, memory and the clock frequency are shared with others, so that it takes hours of
//!   samples to resolve a percent.
//!
//! `.low` and `.high` are the 95 % confidence interval of the median, by order statistics (Conover,
//! "Practical Nonparametric Statistics", section 3.2), from six samples on. Neighbours share a
//! sample without a scan, so that the interval is really a little wider. `firn_cpu_percent` is the
//! processor time that the supervisor uses meanwhile, as a share of one processor.

use std::path::PathBuf;
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use procfs::process::Process;
use serde::Serialize;
use serde_json::json;

use crate::experiments::workload::{self, GuestWorkload, WorkloadProgress};
use crate::guest::{GuestControl, GuestImage, QemuArgs, accel};
use crate::lab::{Lab, wait_for};
use crate::report::Report;
use crate::stats::Sample;

const VM: &str = "scanned";
const JOB: &str = "work";
/// How long a guest may take to boot, and to fill memory.
const BOOT: Duration = Duration::from_secs(120);
/// How long after attaching and detaching a sample begins.
const SETTLE_TIME: Duration = Duration::from_millis(300);
/// Duration of a sample.
const SAMPLE_TIME: (Duration, Duration) = (Duration::from_secs(2), Duration::from_secs(8));
/// Maximum memory that the work uses, in MiB.
const MIB: (u32, u32) = (256, 1024);
/// Samples with a scan; there is one more without.
const ROUNDS: (usize, usize) = (4, 24);

/// Runs the experiment.
pub fn run(lab: &Lab) -> Result<Report> {
    let mut report = lab.vm_report("ws-overhead");
    let bench = ScanBench::boot_detached(lab)?;
    let rounds = lab.extent.runs(ROUNDS.0, ROUNDS.1);
    for workload in
        lab.extent.select_wanted(&GuestWorkload::ALL, |workload| workload.name().to_owned())
    {
        bench.start_work(workload)?;
        bench.measure_alternately(workload, rounds, &mut report)?;
        bench.stop_work()?;
    }
    Ok(report)
}

/// One sample of the guest's work.
#[derive(Clone, Copy, Debug, Serialize)]
struct WorkSample {
    /// The rate of the guest's work, in units of the workload per second.
    rate: f64,
    /// The share of the time in which the guest's code ran: 2 if two vCPUs ran all the time.
    running: f64,
}

struct ScanBench<'a> {
    lab: &'a Lab,
    hypervisor: Process,
    agent: PathBuf,
    mib: u32,
}

impl<'a> ScanBench<'a> {
    /// Boots the guest, and detaches from it.
    fn boot_detached(lab: &'a Lab) -> Result<Self> {
        let (agent, mib) = (lab.file("agent"), lab.extent.pick(MIB.0, MIB.1));
        let args = QemuArgs::new(&GuestImage::small()?, accel::choose_accel().accel)
            .memory_mib(mib + 384)
            .vcpus(workload::VCPUS)
            .with_console(&lab.file("console"))
            .with_agent_socket(&agent);
        lab.firn().run_vm(VM, &args)?;
        GuestControl::connect(&agent, BOOT)?;
        let hypervisor = status_process(lab, "pid")?;
        lab.firn().detach(VM)?;
        Ok(Self { lab, hypervisor, agent, mib })
    }

    fn connect_control(&self) -> Result<GuestControl> {
        Ok(GuestControl::connect(&self.agent, BOOT)?)
    }

    /// Starts the guest's work, and waits until it runs.
    fn start_work(&self, workload: GuestWorkload) -> Result<()> {
        let mut control = self.connect_control()?;
        // The output of earlier work must not be taken for this one's.
        control.run_program(&["rm", "-f", workload::OUTPUT_PATH])?;
        let command = workload.endless_command(self.mib);
        control.spawn_job(JOB, &as_argv(&command))?;
        let mut works = || Ok(read_progress(&mut control, workload).ok());
        wait_for(workload.name(), BOOT, &mut works)?;
        // The work behaves differently at its start.
        sleep(SETTLE_TIME);
        Ok(())
    }

    fn stop_work(&self) -> Result<()> {
        let mut control = self.connect_control()?;
        control.signal_job(JOB, rustix::process::Signal::KILL.as_raw())?;
        control.wait_job(JOB, BOOT)?;
        Ok(())
    }

    /// Measures alternately without and with scans, first and last without.
    fn measure_alternately(
        &self,
        workload: GuestWorkload,
        rounds: usize,
        report: &mut Report,
    ) -> Result<()> {
        let (mut alone, mut scanned, mut firn) =
            (vec![self.measure_sample(workload)?], vec![], vec![]);
        for round in 0..rounds {
            self.lab.firn().attach(VM, &["--working-set", "access-bits"])?;
            let supervisor = status_process(self.lab, "supervisor_pid")?;
            let (since, before) = (Instant::now(), cpu_seconds(&supervisor)?);
            scanned.push(self.measure_sample(workload)?);
            firn.push(100.0 * (cpu_seconds(&supervisor)? - before) / since.elapsed().as_secs_f64());
            self.lab.firn().detach(VM)?;
            alone.push(self.measure_sample(workload)?);
            let lost =
                |of: fn(&WorkSample) -> f64| lost_percent(&alone[round..], &scanned[round], of);
            let (running, rate) = (lost(|turn| turn.running), lost(|turn| turn.rate));
            self.lab
                .log_progress(&format!("{}: {running:.2} %, rate {rate:.2} %", workload.name()));
            report.add_repetition(json!({ "workload": workload.name(), "round": round,
                "alone": alone[round..], "scanned": scanned[round],
                "firn_cpu_percent": firn[round] }));
        }
        let key = |figure: &str| format!("{figure}.access_bits.{}", workload.name());
        add_figure(&key("overhead_percent"), &alone, &scanned, |turn| turn.running, report);
        add_figure(&key("rate_percent"), &alone, &scanned, |turn| turn.rate, report);
        report.add_sample(key("firn_cpu_percent"), firn);
        Ok(())
    }

    /// Measures the guest's work in the next few seconds.
    fn measure_sample(&self, workload: GuestWorkload) -> Result<WorkSample> {
        let mut control = self.connect_control()?;
        sleep(SETTLE_TIME);
        let from = read_progress(&mut control, workload)?;
        let (since, before) = (Instant::now(), self.user_seconds()?);
        sleep(self.lab.extent.pick(SAMPLE_TIME.0, SAMPLE_TIME.1));
        let running = (self.user_seconds()? - before) / since.elapsed().as_secs_f64();
        Ok(WorkSample { rate: read_progress(&mut control, workload)?.rate_since(from), running })
    }

    /// User time of the hypervisor so far. Under KVM a guest's own time counts as such
    /// (proc_pid_stat(5), `utime`).
    fn user_seconds(&self) -> Result<f64> {
        Ok(self.hypervisor.stat()?.utime as f64 / procfs::ticks_per_second() as f64)
    }
}

impl Drop for ScanBench<'_> {
    /// Attaches first, because no supervisor can stop a detached VM.
    fn drop(&mut self) {
        let _ = self.lab.firn().attach(VM, &[]);
        self.lab.firn().stop(VM);
    }
}

/// A process of the VM's status.
fn status_process(lab: &Lab, which: &str) -> Result<Process> {
    let pid = lab.firn().status(VM)?[which].as_i64().with_context(|| format!("no {which}"))?;
    Ok(Process::new(i32::try_from(pid)?)?)
}

fn as_argv(command: &[String]) -> Vec<&str> {
    command.iter().map(String::as_str).collect()
}

fn read_progress(control: &mut GuestControl, workload: GuestWorkload) -> Result<WorkloadProgress> {
    let said = control.run_program(&as_argv(&workload.progress_command()))?;
    let progress = WorkloadProgress::from_output(&said);
    let progress = progress.with_context(|| format!("{}: {said:?}", workload.name()))?;
    ensure!(!progress.is_wrong(), "{}: wrong memory: {said}", workload.name());
    Ok(progress)
}

/// Processor time of a process so far (proc_pid_stat(5): `utime` and `stime`).
fn cpu_seconds(process: &Process) -> Result<f64> {
    let stat = process.stat()?;
    Ok((stat.utime + stat.stime) as f64 / procfs::ticks_per_second() as f64)
}

/// The loss in a sample with a scan, in percent, against the two beside it.
fn lost_percent(alone: &[WorkSample], scanned: &WorkSample, of: fn(&WorkSample) -> f64) -> f64 {
    100.0 * (1.0 - of(scanned) / f64::midpoint(of(&alone[0]), of(&alone[1])))
}

fn add_figure(
    key: &str,
    alone: &[WorkSample],
    scanned: &[WorkSample],
    of: fn(&WorkSample) -> f64,
    report: &mut Report,
) {
    let pairs = alone.windows(2).zip(scanned);
    let lost: Vec<f64> = pairs.map(|(alone, scanned)| lost_percent(alone, scanned, of)).collect();
    let sample = Sample::new(lost.iter().copied());
    if let Some((low, high)) = sample.and_then(|sample| sample.median_interval()) {
        report.add_number(format!("{key}.low"), low);
        report.add_number(format!("{key}.high"), high);
    }
    report.add_sample(key, lost);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_machine_that_gets_slower_all_the_time_is_no_overhead() {
        let turn = |rate| WorkSample { rate, running: 2.0 };
        let lost = |before, scanned, after| {
            lost_percent(&[turn(before), turn(after)], &turn(scanned), |turn| turn.rate)
        };
        assert_eq!(lost(100.0, 90.0, 80.0), 0.0);
        assert_eq!(lost(100.0, 75.0, 100.0), 25.0);
    }
}
