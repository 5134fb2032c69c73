//! `ws-overhead`: what it costs a running guest that somebody keeps track of what it uses.
//!
//! Answers the question of Tables 4 to 6 of Zhang et al. (VEE 2011) for access-bit scanning, which is on all the time. What
//! tracing costs is the cost of a save (`halite-save`).
//!
//! **What varies**: whether the guest's memory is scanned (`firn attach --working-set access-bits`, 100 MB/s) or nobody has
//! anything to do with it, and its work: `synthetic`, `writers`, `sha`, `redis` as in `halite-save`.
//!
//! **What is held equal**: the guest, which goes on all the time and is attached to and let go of in turns; the amount of work.
//!
//! **What is measured**: `overhead_percent`: by how much the share of time shrinks in which the host runs what the guest's vCPUs
//! say (user time of the hypervisor's threads), against the turn beside it. All that a scan does to a guest comes out of
//! it: page faults, the hypervisor's threads stopped or waiting for its memory map, processors taken by Firn. It does not
//! tell how far a vCPU comes in that time: caches and memory are shared with strangers, and what the same work takes
//! differs by more than is to be measured here. `longer_percent` is that, by the guest's clock.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use procfs::process::Process;
use serde_json::{Value, json};

use crate::experiments::workload::{self, Workload};
use crate::guest::{Control, GuestImage, QemuArgs, accel};
use crate::lab::{Lab, interleaved};
use crate::report::Report;

const VM: &str = "scanned";
const JOB: &str = "work";
/// How long a guest may take to boot, and to fill memory.
const BOOT: Duration = Duration::from_secs(120);
/// How long the work may take.
const LIMIT: Duration = Duration::from_secs(600);
/// How long the work should take.
const SECONDS: (f64, f64) = (3.0, 10.0);
/// Memory that the work uses at most, in MiB.
const MIB: (u32, u32) = (256, 1024);
/// Rounds of both systems.
const ROUNDS: (usize, usize) = (3, 11);

/// Whether the guest is scanned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum System {
    Alone,
    Scanned,
}

impl System {
    const ALL: [Self; 2] = [Self::Alone, Self::Scanned];

    fn name(self) -> &'static str {
        match self {
            Self::Alone => "alone",
            Self::Scanned => "scanned",
        }
    }
}

/// Runs it.
pub fn run(lab: &Lab) -> Result<Report> {
    let mut report = lab.vm_report("ws-overhead");
    let bench = Bench::boot(lab)?;
    let rounds = lab.extent.runs(ROUNDS.0, ROUNDS.1);
    for workload in Workload::ALL {
        let units = bench.calibrate(workload)?;
        interleaved(rounds, &System::ALL, |round, &system| {
            let Turn { seconds, running } = bench.turn(workload, units, system)?;
            let percent = 100.0 * running;
            lab.say(&format!(
                "{} {}: {seconds:.2} s, ran {percent:.1} % of the time",
                workload.name(),
                system.name()
            ));
            report.repetition(json!({ "workload": workload.name(), "system": system.name(),
                "round": round, "seconds": seconds, "running_percent": percent }));
            Ok(())
        })?;
        figure(workload, &mut report);
    }
    Ok(report)
}

/// Work that is done.
#[derive(Clone, Copy, Debug)]
struct Turn {
    /// How long it took, by the guest's clock.
    seconds: f64,
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
        let pid = lab.firn().status(VM)?["pid"].as_i64().context("no process id")?;
        lab.firn().detach(VM)?;
        Ok(Self { lab, hypervisor: Process::new(i32::try_from(pid)?)?, agent, mib })
    }

    /// So many units that the work takes about as long as it should.
    fn calibrate(&self, workload: Workload) -> Result<u64> {
        let Turn { seconds, .. } = self.work(workload, workload.trial())?;
        let wanted = self.lab.extent.pick(SECONDS.0, SECONDS.1);
        Ok((workload.trial() as f64 * wanted / seconds.max(0.1)).round() as u64)
    }

    fn turn(&self, workload: Workload, units: u64, system: System) -> Result<Turn> {
        match system {
            System::Alone => self.work(workload, units),
            System::Scanned => {
                self.lab.firn().attach(VM, &["--working-set", "access-bits"])?;
                let turn = self.work(workload, units);
                self.lab.firn().detach(VM)?;
                turn
            }
        }
    }

    /// Does the work.
    fn work(&self, workload: Workload, units: u64) -> Result<Turn> {
        let mut control = Control::connect(&self.agent, BOOT)?;
        let command = workload.command(self.mib, units);
        let argv: Vec<&str> = command.iter().map(String::as_str).collect();
        let (since, before) = (Instant::now(), self.user_seconds()?);
        control.spawn(JOB, &argv)?;
        let ended = control.wait(JOB, LIMIT)?;
        let running = (self.user_seconds()? - before) / since.elapsed().as_secs_f64();
        ensure!(ended.exit == 0, "{}: {}{}", workload.name(), ended.stdout, ended.stderr);
        let seconds =
            workload::seconds(&ended.stdout).with_context(|| workload.name().to_owned())?;
        Ok(Turn { seconds, running })
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

/// Each turn with a scan against the one without in the same round.
fn figure(workload: Workload, report: &mut Report) {
    let key = |figure: &str| format!("{figure}.access_bits.{}", workload.name());
    let of = |report: &Report, key: &str| {
        let times = |system| of_system(report, workload, system, key);
        times(System::Scanned).into_iter().zip(times(System::Alone)).collect::<Vec<_>>()
    };
    let shares = of(report, "running_percent");
    let lost = shares.iter().map(|(scanned, alone)| 100.0 * (1.0 - scanned / alone));
    report.sample(key("overhead_percent"), lost);
    let times = of(report, "seconds");
    let longer = times.iter().map(|(scanned, alone)| 100.0 * (scanned / alone - 1.0));
    report.sample(key("longer_percent"), longer);
}

fn of_system(report: &Report, workload: Workload, system: System, key: &str) -> Vec<f64> {
    let is_it = |run: &&Value| run["workload"] == workload.name() && run["system"] == system.name();
    let runs = report.repetitions().iter().filter(is_it);
    runs.filter_map(|run| run[key].as_f64()).collect()
}
