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
//! **What is measured**: `overhead_percent`: how much longer the work takes, by the guest's clock, than in the turn beside it.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
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
            let seconds = bench.turn(workload, units, system)?;
            lab.say(&format!("{} {}: {seconds:.2} s", workload.name(), system.name()));
            report.repetition(json!({ "workload": workload.name(), "system": system.name(),
                "round": round, "seconds": seconds }));
            Ok(())
        })?;
        figure(workload, &mut report);
    }
    Ok(report)
}

struct Bench<'a> {
    lab: &'a Lab,
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
        lab.firn().detach(VM)?;
        Ok(Self { lab, agent, mib })
    }

    /// So many units that the work takes about as long as it should.
    fn calibrate(&self, workload: Workload) -> Result<u64> {
        let seconds = self.work(workload, workload.trial())?;
        let wanted = self.lab.extent.pick(SECONDS.0, SECONDS.1);
        Ok((workload.trial() as f64 * wanted / seconds.max(0.1)).round() as u64)
    }

    fn turn(&self, workload: Workload, units: u64, system: System) -> Result<f64> {
        match system {
            System::Alone => self.work(workload, units),
            System::Scanned => {
                self.lab.firn().attach(VM, &["--working-set", "access-bits"])?;
                let seconds = self.work(workload, units);
                self.lab.firn().detach(VM)?;
                seconds
            }
        }
    }

    /// Does the work; how long it took by the guest's clock.
    fn work(&self, workload: Workload, units: u64) -> Result<f64> {
        let mut control = Control::connect(&self.agent, BOOT)?;
        let command = workload.command(self.mib, units);
        let argv: Vec<&str> = command.iter().map(String::as_str).collect();
        control.spawn(JOB, &argv)?;
        let ended = control.wait(JOB, LIMIT)?;
        ensure!(ended.exit == 0, "{}: {}{}", workload.name(), ended.stdout, ended.stderr);
        workload::seconds(&ended.stdout).with_context(|| workload.name().to_owned())
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
    let times = |system: System| -> Vec<f64> {
        let is_it =
            |run: &&Value| run["workload"] == workload.name() && run["system"] == system.name();
        let runs = report.repetitions().iter().filter(is_it);
        runs.filter_map(|run| run["seconds"].as_f64()).collect()
    };
    let pairs: Vec<_> = times(System::Scanned).into_iter().zip(times(System::Alone)).collect();
    let percent = pairs.iter().map(|(scanned, alone)| 100.0 * (scanned / alone - 1.0));
    report.sample(format!("overhead_percent.access_bits.{}", workload.name()), percent);
}
