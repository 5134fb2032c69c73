//! `ws-agree`: whether time to responsiveness is the same by the run record and from outside.
//!
//! Reproduces no figure of a paper; it compares the run record (inside: when vCPUs waited for
//! pages) with an observation that does not depend on Firn (outside: how fast the guest progresses,
//! by its own reports).
//!
//! **What varies**: the mode, because restores are slow in different ways, and the required
//! utilization. Without `lazy`, which takes minutes on this disk.
//!
//! **What is held equal**: the checkpoint, which is not compressed, and the disk (`hdd7200`, cold):
//! the restore is to take seconds, so that the tenths of a second that any hypervisor takes to
//! start do not matter. The guest has one vCPU, which walks through most of its memory as fast as
//! it can and reports its progress a hundred times a second. As many steps per second as at its
//! steady rate are a utilization of 1. The steady rate is that of the same guest in the seconds
//! after its restore, because other load of this machine changes from minute to minute.
//!
//! **What is measured**: for each restore, TTR(1 s, u) from outside divided by that from inside:
//! `outside_to_inside.{mode}.{u in %}`.

use std::path::Path;
use std::time::Duration;

use anyhow::{Context as _, Result};
use firn_measure::ReplyTimes;
use firn_restore::RestoreMode;
use serde_json::{Value, json};

use super::beats::{EVENTS_PER_S, StepReceiver};
use super::restored::{ObservedRestore, RestoreSettings, WINDOW_US};
use super::subject::{SubjectGuest, SubjectWork};
use crate::disk_profile::{DiskProfile, DiskThrottle};
use crate::firn::SaveArgs;
use crate::lab::{Lab, run_interleaved};
use crate::report::Report;

const DISK: DiskProfile = DiskProfile::Hdd7200;
const MODES: [RestoreMode; 4] =
    [RestoreMode::Auto, RestoreMode::Eager, RestoreMode::Locality, RestoreMode::WorkingSet];
/// Utilizations, in percent.
const LEVELS: [u32; 2] = [50, 80];
/// How long a restored guest is observed once it has all its memory, to measure its steady rate.
const OBSERVATION_TIME: Duration = Duration::from_secs(8);
/// The part of this time, in microseconds, in which the rate still counts as the restore's: for
/// windows that begin in the restore.
const OBSERVED_US: u64 = 2_000_000;
const ROUNDS: (usize, usize) = (1, 5);

/// Runs the experiment.
pub fn run(lab: &Lab) -> Result<Report> {
    let mut report = lab.vm_report("ws-agree");
    if let Some(disk) = lab.throttle_disk(DISK, &mut report) {
        let image = lab.file("walker.firn");
        report.add_number("steps_per_s_before", save_walker(lab, &image)?);
        run_interleaved(lab.extent.runs(ROUNDS.0, ROUNDS.1), &MODES, |round, &mode| {
            measure_restore(lab, &image, (mode, &disk, round), &mut report)
        })?;
    }
    add_numbers(&mut report);
    Ok(report)
}

/// Makes the checkpoint; returns the guest's rate before it.
fn save_walker(lab: &Lab, image: &Path) -> Result<f64> {
    let subject = SubjectGuest::boot_and_start(lab, SubjectWork::Walk, 0)?;
    let beats = StepReceiver::start_receiving(&SubjectGuest::heartbeats_of(lab));
    subject.let_settle();
    let before = beats.all_steps().steady_rate(0, WINDOW_US);
    subject.checkpoint(image, &SaveArgs::default().with_option("--codec", "none"))?;
    before.context("the guest reports no progress")
}

fn measure_restore(
    lab: &Lab,
    image: &Path,
    (mode, disk, round): (RestoreMode, &DiskThrottle, usize),
    report: &mut Report,
) -> Result<()> {
    let beats = StepReceiver::start_receiving(&SubjectGuest::heartbeats_of(lab));
    let restored = ObservedRestore::run_restore(
        lab,
        image,
        RestoreSettings { afterwards: OBSERVATION_TIME, ..RestoreSettings::new(mode, disk) },
    )?;
    let Some(complete_us) = restored.run.record.finished_us else {
        report.add_remark(format!("{mode}, round {round}: not all memory was present in time"));
        return Ok(());
    };
    let steps = beats.steps_since(restored.since);
    let steady = steps.steady_rate(complete_us, WINDOW_US).context("the guest reports nothing")?;
    let outside = ReplyTimes::new(steps.times_us(steady), complete_us + OBSERVED_US, EVENTS_PER_S);
    for level in LEVELS {
        let utilization = f64::from(level) / 100.0;
        let inside_s = firn_measure::time_to_responsiveness(
            &restored.run.vcpu_waiting_time(),
            WINDOW_US,
            utilization,
        );
        let outside_s = outside.time_to_responsiveness(WINDOW_US, utilization);
        lab.log_progress(&format!(
            "{mode}, {level} %: inside {inside_s:.2} s, outside {outside_s:.2?} s"
        ));
        report.add_repetition(json!({ "mode": mode, "level": level, "round": round,
            "inside_s": inside_s, "outside_s": outside_s, "steady_steps_per_s": steady,
            "outside_to_inside": outside_s.map(|outside_s| outside_s / inside_s),
            "facts": restored.run.compute_facts() }));
    }
    Ok(())
}

fn add_numbers(report: &mut Report) {
    for mode in MODES {
        for level in LEVELS {
            let is_it = |run: &&Value| run["mode"] == json!(mode) && run["level"] == level;
            let runs = report.repetitions().iter().filter(is_it);
            let ratios: Vec<f64> =
                runs.filter_map(|run| run["outside_to_inside"].as_f64()).collect();
            report.add_sample(format!("outside_to_inside.{mode}.{level}"), ratios);
        }
    }
}
