//! Overhead of a save: how much longer work takes while the guest is being saved.

use std::path::PathBuf;
use std::thread;
use std::time::Duration;

use anyhow::{Result, ensure};
use serde_json::{Value, json};

use crate::experiments::workload::{self, GuestWorkload, parse_seconds};
use crate::firn::{CommandOutput, SaveArgs};
use crate::guest::{GuestControl, GuestImage, JobState, QemuArgs, accel};
use crate::lab::{Lab, run_interleaved};
use crate::report::Report;

const VM: &str = "overhead";
const JOB: &str = "work";
/// How long a guest may take to boot, and to fill memory.
const BOOT: Duration = Duration::from_secs(120);
/// How long the work may take.
const LIMIT: Duration = Duration::from_secs(600);
/// Time from the begin of the work proper to the save.
const TIME_BEFORE_SAVE: Duration = Duration::from_millis(1000);

/// Sizes of a run.
#[derive(Clone, Copy, Debug)]
struct OverheadScale {
    /// Memory that the synthetic workload allocates, in MiB.
    mib: u32,
    /// Approximate duration of the work without a save.
    seconds: f64,
}

/// Rounds of all systems, in quick and in full runs. The user's number of runs is about pauses,
/// which are many more.
const ROUNDS: (usize, usize) = (1, 3);
const QUICK: OverheadScale = OverheadScale { mib: 256, seconds: 5.0 };
const FULL: OverheadScale = OverheadScale { mib: 1024, seconds: 10.0 };

/// Whether and how the guest is saved.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum SaveSystem {
    Without,
    Throttled,
    Unthrottled,
}

impl SaveSystem {
    const ALL: [Self; 3] = [Self::Without, Self::Throttled, Self::Unthrottled];
    const SAVES: [Self; 2] = [Self::Throttled, Self::Unthrottled];

    fn name(self) -> &'static str {
        match self {
            Self::Without => "without",
            Self::Throttled => "throttled",
            Self::Unthrottled => "unthrottled",
        }
    }

    fn save_args(self) -> Option<SaveArgs> {
        match self {
            Self::Without => None,
            Self::Throttled => Some(SaveArgs::default()),
            Self::Unthrottled => Some(SaveArgs::default().with_flag("--no-throttle")),
        }
    }
}

/// Measures every workload, and adds the figures to the report.
pub(super) fn run_overhead(lab: &Lab, report: &mut Report) -> Result<()> {
    let bench = OverheadBench::boot_guest(lab, lab.extent.pick(QUICK, FULL))?;
    let rounds = lab.extent.pick(ROUNDS.0, ROUNDS.1);
    for workload in GuestWorkload::ALL {
        let units = bench.calibrate_units(workload)?;
        run_interleaved(rounds, &SaveSystem::ALL, |round, &system| {
            bench.run_round(round, workload, units, system, report)
        })?;
        SaveSystem::SAVES.iter().for_each(|&system| add_numbers(workload, system, report));
    }
    lab.firn().stop(VM);
    Ok(())
}

/// The guest that works.
struct OverheadBench<'a> {
    lab: &'a Lab,
    scale: OverheadScale,
    agent: PathBuf,
    image: PathBuf,
}

impl<'a> OverheadBench<'a> {
    fn boot_guest(lab: &'a Lab, scale: OverheadScale) -> Result<Self> {
        let agent = lab.file("agent");
        let args = QemuArgs::new(&GuestImage::small()?, accel::choose_accel().accel)
            .memory_mib(scale.mib + 384)
            .vcpus(workload::VCPUS)
            .with_console(&lab.file("console"))
            .with_agent_socket(&agent);
        lab.firn().run_vm(VM, &args)?;
        GuestControl::connect(&agent, BOOT)?;
        Ok(Self { lab, scale, agent, image: lab.file("overhead.firn") })
    }

    /// The number of units with which the work takes about as long as it should.
    fn calibrate_units(&self, workload: GuestWorkload) -> Result<u64> {
        let trial = workload.trial_units();
        let (seconds, _) = self.run_work(workload, trial, SaveSystem::Without)?;
        let units = trial as f64 * self.scale.seconds / seconds.max(0.1);
        self.lab.log_progress(&format!("{}: {units:.0} units of work", workload.name()));
        Ok(units.round() as u64)
    }

    fn run_round(
        &self,
        round: usize,
        workload: GuestWorkload,
        units: u64,
        system: SaveSystem,
        report: &mut Report,
    ) -> Result<()> {
        let (seconds, save) = self.run_work(workload, units, system)?;
        self.lab.log_progress(&format!("{} {}: {seconds:.2} s", workload.name(), system.name()));
        let facts = save.as_ref().map(|save| &save.said.facts["report"]);
        let within = save.as_ref().map(|save| save.within);
        if within == Some(false) {
            report.add_remark(format!(
                "{} {}: the work ended before the save did",
                workload.name(),
                system.name()
            ));
        }
        report.add_repetition(json!({ "workload": workload.name(), "system": system.name(),
            "round": round, "seconds": seconds, "within": within, "facts": facts }));
        Ok(())
    }

    /// Runs the work, with a save in the middle or without; returns its duration by the guest's
    /// clock.
    fn run_work(
        &self,
        workload: GuestWorkload,
        units: u64,
        system: SaveSystem,
    ) -> Result<(f64, Option<SaveDuringWork>)> {
        let mut control = GuestControl::connect(&self.agent, BOOT)?;
        let command = workload.command_line(self.scale.mib, units);
        let argv: Vec<&str> = command.iter().map(String::as_str).collect();
        control.spawn_job(JOB, &argv)?;
        control.wait_output(JOB, "\"ready\":true", BOOT)?;
        let save =
            system.save_args().map(|how| self.save_during_work(&mut control, &how)).transpose()?;
        let ended = control.wait_job(JOB, LIMIT)?;
        ensure!(ended.exit == 0, "{}: {}{}", workload.name(), ended.stdout, ended.stderr);
        Ok((parse_seconds(&ended.stdout)?, save))
    }

    fn save_during_work(
        &self,
        control: &mut GuestControl,
        how: &SaveArgs,
    ) -> Result<SaveDuringWork> {
        thread::sleep(TIME_BEFORE_SAVE);
        let save_output = self.lab.firn().checkpoint(VM, &self.image, how)?;
        let within = matches!(control.poll_job(JOB)?, JobState::Running { .. });
        Ok(SaveDuringWork { said: save_output, within })
    }
}

/// A save in the middle of work.
struct SaveDuringWork {
    said: CommandOutput,
    /// Whether the save ended before the work did.
    within: bool,
}

/// Compares each run with a save with the run without in the same round.
fn add_numbers(workload: GuestWorkload, system: SaveSystem, report: &mut Report) {
    let times = |of: SaveSystem| -> Vec<f64> {
        let is_it = |run: &&Value| run["workload"] == workload.name() && run["system"] == of.name();
        report
            .repetitions()
            .iter()
            .filter(is_it)
            .filter_map(|run| run["seconds"].as_f64())
            .collect()
    };
    let pairs: Vec<_> = times(system).into_iter().zip(times(SaveSystem::Without)).collect();
    let name = match system {
        SaveSystem::Unthrottled => format!("{}.unthrottled", workload.name()),
        _ => workload.name().to_owned(),
    };
    let seconds = pairs.iter().map(|(with, without)| with - without);
    report.add_sample(format!("save_overhead.{name}"), seconds);
    let percent = pairs.iter().map(|(with, without)| 100.0 * (with / without - 1.0));
    report.add_sample(format!("save_overhead_percent.{name}"), percent);
}
