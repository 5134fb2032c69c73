//! `ws-overhead`: what it costs a running guest that somebody keeps track of what it uses.
//!
//! Answers the question of Tables 4 to 6 of Zhang et al. (VEE 2011) for access-bit scanning, which is on all the time. What
//! tracing costs is the cost of a save (`halite-save`).
//!
//! **What varies**: whether the guest's memory is scanned (`firn attach --working-set access-bits`, 100 MB/s) or nobody has
//! anything to do with it, and its work: `synthetic`, `writers`, `sha`, `redis` as in `halite-save`.
//!
//! **What is held equal**: everything. The guest works without an end, and is attached to and let go of in turns meanwhile:
//!
//! ```text
//!   the guest works   ------------------------------------------------------------------>
//!                     alone |attach| scanned |detach| alone |attach| scanned |detach| alone
//! ```
//!
//! Machines that are shared with strangers are faster in one minute than in the next, by more than is to be measured. So
//! turns are short, there are many, and each one with a scan is compared with the mean of the two beside it. A turn
//! begins a moment after attaching or detaching: that is not what scanning costs. The scan of each turn is a new one, which
//! begins at the bottom of RAM, as the one before: what is there is scanned in every turn, and what is at the top in none. A new
//! one has no page that it knows to be used, so it visits its first chunks more quickly than it would later.
//!
//! **What is measured**, each by how much lower it is while the guest is scanned:
//!
//! - `overhead_percent`: the share of time in which the host runs what the guest's vCPUs say (user time of the hypervisor). The
//!   work leaves no vCPU idle, so whatever a scan does to the guest is missing there: page faults, the hypervisor's threads
//!   stopped or waiting for its memory map, processors taken by Firn. It does not tell how far a vCPU comes in that time.
//! - `rate_percent`: the rate at which the guest works, by its own clock. That is all there is to know, but caches, memory and the
//!   clock frequency are shared with strangers, so that it takes hours of turns to see a percent.
//!
//! `.low` and `.high` are what the median lies between with 95 % confidence, by order statistics (Conover, "Practical
//! Nonparametric Statistics", section 3.2), from six turns on; neighbours share a turn without a scan, so that it is a little more
//! than that. `firn_cpu_percent` is the processor time that the supervisor takes meanwhile, as a
//! share of one processor.

use std::path::PathBuf;
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use procfs::process::Process;
use serde::Serialize;
use serde_json::json;

use crate::experiments::workload::{self, Progress, Workload};
use crate::guest::{Control, GuestImage, QemuArgs, accel};
use crate::lab::{Lab, wait_for};
use crate::report::Report;
use crate::stats::Sample;

const VM: &str = "scanned";
const JOB: &str = "work";
/// How long a guest may take to boot, and to fill memory.
const BOOT: Duration = Duration::from_secs(120);
/// How long after attaching and detaching a turn begins.
const SETTLED: Duration = Duration::from_millis(300);
/// How long a turn takes.
const TURN: (Duration, Duration) = (Duration::from_secs(2), Duration::from_secs(8));
/// Memory that the work uses at most, in MiB.
const MIB: (u32, u32) = (256, 1024);
/// Turns with a scan; there is one more without.
const ROUNDS: (usize, usize) = (4, 24);

/// Runs it.
pub fn run(lab: &Lab) -> Result<Report> {
    let mut report = lab.vm_report("ws-overhead");
    let bench = Bench::boot(lab)?;
    let rounds = lab.extent.runs(ROUNDS.0, ROUNDS.1);
    for workload in lab.extent.wanted(&Workload::ALL, |workload| workload.name().to_owned()) {
        bench.begin(workload)?;
        bench.in_turns(workload, rounds, &mut report)?;
        bench.end()?;
    }
    Ok(report)
}

/// What one turn showed.
#[derive(Clone, Copy, Debug, Serialize)]
struct Turn {
    /// How fast the guest worked, in units of the workload per second.
    rate: f64,
    /// The share of the time in which the guest's code ran: 2 if two vCPUs did all the time.
    running: f64,
}

struct Bench<'a> {
    lab: &'a Lab,
    hypervisor: Process,
    agent: PathBuf,
    mib: u32,
}

impl<'a> Bench<'a> {
    /// Boots the guest, and lets go of it.
    fn boot(lab: &'a Lab) -> Result<Self> {
        let (agent, mib) = (lab.file("agent"), lab.extent.pick(MIB.0, MIB.1));
        let args = QemuArgs::new(&GuestImage::small()?, accel::decide().accel)
            .memory_mib(mib + 384)
            .vcpus(workload::VCPUS)
            .console(&lab.file("console"))
            .agent(&agent);
        lab.firn().run(VM, &args)?;
        Control::connect(&agent, BOOT)?;
        let hypervisor = process(lab, "pid")?;
        lab.firn().detach(VM)?;
        Ok(Self { lab, hypervisor, agent, mib })
    }

    fn control(&self) -> Result<Control> {
        Ok(Control::connect(&self.agent, BOOT)?)
    }

    /// Has the guest work, and waits until it does.
    fn begin(&self, workload: Workload) -> Result<()> {
        let mut control = self.control()?;
        // What the work before said must not be taken for this one's.
        control.run(&["rm", "-f", workload::SAID])?;
        let command = workload.endless(self.mib);
        control.spawn(JOB, &argv(&command))?;
        let mut works = || Ok(how_far(&mut control, workload).ok());
        wait_for(workload.name(), BOOT, &mut works)?;
        // What it does at its start is not what it does.
        sleep(SETTLED);
        Ok(())
    }

    fn end(&self) -> Result<()> {
        let mut control = self.control()?;
        control.signal(JOB, rustix::process::Signal::KILL.as_raw())?;
        control.wait(JOB, BOOT)?;
        Ok(())
    }

    /// Alone and scanned in turns, first and last alone.
    fn in_turns(&self, workload: Workload, rounds: usize, report: &mut Report) -> Result<()> {
        let (mut alone, mut scanned, mut firn) = (vec![self.turn(workload)?], vec![], vec![]);
        for round in 0..rounds {
            self.lab.firn().attach(VM, &["--working-set", "access-bits"])?;
            let supervisor = process(self.lab, "supervisor_pid")?;
            let (since, before) = (Instant::now(), cpu_seconds(&supervisor)?);
            scanned.push(self.turn(workload)?);
            firn.push(100.0 * (cpu_seconds(&supervisor)? - before) / since.elapsed().as_secs_f64());
            self.lab.firn().detach(VM)?;
            alone.push(self.turn(workload)?);
            let lost = |of: fn(&Turn) -> f64| lost_percent(&alone[round..], &scanned[round], of);
            let (running, rate) = (lost(|turn| turn.running), lost(|turn| turn.rate));
            self.lab.say(&format!("{}: {running:.2} %, rate {rate:.2} %", workload.name()));
            report.repetition(json!({ "workload": workload.name(), "round": round,
                "alone": alone[round..], "scanned": scanned[round],
                "firn_cpu_percent": firn[round] }));
        }
        let key = |figure: &str| format!("{figure}.access_bits.{}", workload.name());
        figure(&key("overhead_percent"), &alone, &scanned, |turn| turn.running, report);
        figure(&key("rate_percent"), &alone, &scanned, |turn| turn.rate, report);
        report.sample(key("firn_cpu_percent"), firn);
        Ok(())
    }

    /// What the guest does in the next few seconds.
    fn turn(&self, workload: Workload) -> Result<Turn> {
        let mut control = self.control()?;
        sleep(SETTLED);
        let from = how_far(&mut control, workload)?;
        let (since, before) = (Instant::now(), self.user_seconds()?);
        sleep(self.lab.extent.pick(TURN.0, TURN.1));
        let running = (self.user_seconds()? - before) / since.elapsed().as_secs_f64();
        Ok(Turn { rate: how_far(&mut control, workload)?.rate_since(from), running })
    }

    /// User time of the hypervisor so far. Under KVM a guest's own time counts as such (proc_pid_stat(5), `utime`).
    fn user_seconds(&self) -> Result<f64> {
        Ok(self.hypervisor.stat()?.utime as f64 / procfs::ticks_per_second() as f64)
    }
}

impl Drop for Bench<'_> {
    /// A VM that was let go of is nobody's to stop.
    fn drop(&mut self) {
        let _ = self.lab.firn().attach(VM, &[]);
        self.lab.firn().stop(VM);
    }
}

/// A process that the VM's status names.
fn process(lab: &Lab, which: &str) -> Result<Process> {
    let pid = lab.firn().status(VM)?[which].as_i64().with_context(|| format!("no {which}"))?;
    Ok(Process::new(i32::try_from(pid)?)?)
}

fn argv(command: &[String]) -> Vec<&str> {
    command.iter().map(String::as_str).collect()
}

fn how_far(control: &mut Control, workload: Workload) -> Result<Progress> {
    let said = control.run(&argv(&workload.how_far()))?;
    let progress = Progress::parse(&said);
    let progress = progress.with_context(|| format!("{}: {said:?}", workload.name()))?;
    ensure!(!progress.is_wrong(), "{}: wrong memory: {said}", workload.name());
    Ok(progress)
}

/// Processor time of a process so far (proc_pid_stat(5): `utime` and `stime`).
fn cpu_seconds(process: &Process) -> Result<f64> {
    let stat = process.stat()?;
    Ok((stat.utime + stat.stime) as f64 / procfs::ticks_per_second() as f64)
}

/// What a turn with a scan lost of something, against the two beside it.
fn lost_percent(alone: &[Turn], scanned: &Turn, of: fn(&Turn) -> f64) -> f64 {
    100.0 * (1.0 - of(scanned) / f64::midpoint(of(&alone[0]), of(&alone[1])))
}

fn figure(key: &str, alone: &[Turn], scanned: &[Turn], of: fn(&Turn) -> f64, report: &mut Report) {
    let pairs = alone.windows(2).zip(scanned);
    let lost: Vec<f64> = pairs.map(|(alone, scanned)| lost_percent(alone, scanned, of)).collect();
    let sample = Sample::new(lost.iter().copied());
    if let Some((low, high)) = sample.and_then(|sample| sample.median_interval()) {
        report.number(format!("{key}.low"), low);
        report.number(format!("{key}.high"), high);
    }
    report.sample(key, lost);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_machine_that_gets_slower_all_the_time_is_no_overhead() {
        let turn = |rate| Turn { rate, running: 2.0 };
        let lost = |before, scanned, after| {
            lost_percent(&[turn(before), turn(after)], &turn(scanned), |turn| turn.rate)
        };
        assert_eq!(lost(100.0, 90.0, 80.0), 0.0);
        assert_eq!(lost(100.0, 75.0, 100.0), 25.0);
    }
}
