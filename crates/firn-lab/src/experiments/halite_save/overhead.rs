//! Overhead of a save: how much longer work takes while the guest is being saved.

use std::path::PathBuf;
use std::thread;
use std::time::Duration;

use anyhow::{Result, ensure};
use serde_json::{Value, json};

use crate::experiments::workload::{self, Workload, seconds};
use crate::firn::{Said, SaveArgs};
use crate::guest::{Control, GuestImage, JobState, QemuArgs, accel};
use crate::lab::{Lab, interleaved};
use crate::report::Report;

const VM: &str = "overhead";
const JOB: &str = "work";
/// How long a guest may take to boot, and to fill memory.
const BOOT: Duration = Duration::from_secs(120);
/// How long the work may take.
const LIMIT: Duration = Duration::from_secs(600);
/// Time from the begin of the work proper to the save.
const LEAD: Duration = Duration::from_millis(1000);

/// Sizes of a run.
#[derive(Clone, Copy, Debug)]
struct Scale {
    /// Memory that the synthetic workload allocates, in MiB.
    mib: u32,
    /// Approximate duration of the work without a save.
    seconds: f64,
}

/// Rounds of all systems, in quick and in full runs. The user's number of runs is about pauses,
/// which are many more.
const ROUNDS: (usize, usize) = (1, 3);
const QUICK: Scale = Scale { mib: 256, seconds: 5.0 };
const FULL: Scale = Scale { mib: 1024, seconds: 10.0 };

/// Whether and how the guest is saved.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum System {
    Without,
    Throttled,
    Unthrottled,
}

impl System {
    const ALL: [Self; 3] = [Self::Without, Self::Throttled, Self::Unthrottled];
    const SAVES: [Self; 2] = [Self::Throttled, Self::Unthrottled];

    fn name(self) -> &'static str {
        match self {
            Self::Without => "without",
            Self::Throttled => "throttled",
            Self::Unthrottled => "unthrottled",
        }
    }

    fn args(self) -> Option<SaveArgs> {
        match self {
            Self::Without => None,
            Self::Throttled => Some(SaveArgs::default()),
            Self::Unthrottled => Some(SaveArgs::default().flag("--no-throttle")),
        }
    }
}

/// Measures every workload, and adds the figures to the report.
pub(super) fn run(lab: &Lab, report: &mut Report) -> Result<()> {
    let bench = Bench::boot(lab, lab.extent.pick(QUICK, FULL))?;
    let rounds = lab.extent.pick(ROUNDS.0, ROUNDS.1);
    for workload in Workload::ALL {
        let units = bench.calibrate(workload)?;
        interleaved(rounds, &System::ALL, |round, &system| {
            bench.round(round, workload, units, system, report)
        })?;
        System::SAVES.iter().for_each(|&system| figures(workload, system, report));
    }
    lab.firn().stop(VM);
    Ok(())
}

/// The guest that works.
struct Bench<'a> {
    lab: &'a Lab,
    scale: Scale,
    agent: PathBuf,
    image: PathBuf,
}

impl<'a> Bench<'a> {
    fn boot(lab: &'a Lab, scale: Scale) -> Result<Self> {
        let agent = lab.file("agent");
        let args = QemuArgs::new(&GuestImage::small()?, accel::decide().accel)
            .memory_mib(scale.mib + 384)
            .vcpus(workload::VCPUS)
            .console(&lab.file("console"))
            .agent(&agent);
        lab.firn().run(VM, &args)?;
        Control::connect(&agent, BOOT)?;
        Ok(Self { lab, scale, agent, image: lab.file("overhead.firn") })
    }

    /// The number of units with which the work takes about as long as it should.
    fn calibrate(&self, workload: Workload) -> Result<u64> {
        let trial = workload.trial();
        let (seconds, _) = self.work(workload, trial, System::Without)?;
        let units = trial as f64 * self.scale.seconds / seconds.max(0.1);
        self.lab.say(&format!("{}: {units:.0} units of work", workload.name()));
        Ok(units.round() as u64)
    }

    fn round(
        &self,
        round: usize,
        workload: Workload,
        units: u64,
        system: System,
        report: &mut Report,
    ) -> Result<()> {
        let (seconds, save) = self.work(workload, units, system)?;
        self.lab.say(&format!("{} {}: {seconds:.2} s", workload.name(), system.name()));
        let facts = save.as_ref().map(|save| &save.said.facts["report"]);
        let within = save.as_ref().map(|save| save.within);
        if within == Some(false) {
            report.note(format!(
                "{} {}: the work ended before the save did",
                workload.name(),
                system.name()
            ));
        }
        report.repetition(json!({ "workload": workload.name(), "system": system.name(),
            "round": round, "seconds": seconds, "within": within, "facts": facts }));
        Ok(())
    }

    /// Runs the work, with a save in the middle or without; returns its duration by the guest's
    /// clock.
    fn work(&self, workload: Workload, units: u64, system: System) -> Result<(f64, Option<Save>)> {
        let mut control = Control::connect(&self.agent, BOOT)?;
        let command = workload.command(self.scale.mib, units);
        let argv: Vec<&str> = command.iter().map(String::as_str).collect();
        control.spawn(JOB, &argv)?;
        control.wait_output(JOB, "\"ready\":true", BOOT)?;
        let save = system.args().map(|how| self.save(&mut control, &how)).transpose()?;
        let ended = control.wait(JOB, LIMIT)?;
        ensure!(ended.exit == 0, "{}: {}{}", workload.name(), ended.stdout, ended.stderr);
        Ok((seconds(&ended.stdout)?, save))
    }

    fn save(&self, control: &mut Control, how: &SaveArgs) -> Result<Save> {
        thread::sleep(LEAD);
        let said = self.lab.firn().checkpoint(VM, &self.image, how)?;
        let within = matches!(control.poll(JOB)?, JobState::Running { .. });
        Ok(Save { said, within })
    }
}

/// A save in the middle of work.
struct Save {
    said: Said,
    /// Whether the save ended before the work did.
    within: bool,
}

/// Compares each run with a save with the run without in the same round.
fn figures(workload: Workload, system: System, report: &mut Report) {
    let times = |of: System| -> Vec<f64> {
        let is_it = |run: &&Value| run["workload"] == workload.name() && run["system"] == of.name();
        report
            .repetitions()
            .iter()
            .filter(is_it)
            .filter_map(|run| run["seconds"].as_f64())
            .collect()
    };
    let pairs: Vec<_> = times(system).into_iter().zip(times(System::Without)).collect();
    let name = match system {
        System::Unthrottled => format!("{}.unthrottled", workload.name()),
        _ => workload.name().to_owned(),
    };
    let seconds = pairs.iter().map(|(with, without)| with - without);
    report.sample(format!("save_overhead.{name}"), seconds);
    let percent = pairs.iter().map(|(with, without)| 100.0 * (with / without - 1.0));
    report.sample(format!("save_overhead_percent.{name}"), percent);
}
