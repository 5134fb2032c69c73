//! `ws-size`: restores of guests that read random pages of a smaller or larger part of their
//! memory.
//!
//! Reproduces Figures 9 and 10 of Zhang et al. (VEE 2011).
//!
//! **What varies**: the part of its memory in which the guest reads random pages (20, 40, 60, 80
//! %), and the mode: `lazy` (Figure 9), `working-set` (Figure 10), `auto`.
//!
//! **What is held equal**: all modes restore the same checkpoint; the disk (`hdd7200`, cold). No
//! method can predict which page is read next: the hardest case for a working set.
//!
//! **What is measured**: `ttr_1s_80.{percent}.{mode}`: TTR(1 s, 80 %) in seconds since the command,
//! by the run record.

use anyhow::{Context as _, Result};
use firn_report::plot::LinePlot;
use firn_restore::RestoreMode;
use serde_json::{Value, json};

use super::restored::{ObservedRestore, RestoreSettings};
use super::subject::{SubjectGuest, SubjectWork};
use crate::disk_profile::{DiskProfile, DiskThrottle};
use crate::firn::SaveArgs;
use crate::lab::{Lab, run_interleaved};
use crate::report::Report;

const DISK: DiskProfile = DiskProfile::Hdd7200;
const PERCENTS: [u32; 4] = [20, 40, 60, 80];
const MODES: [RestoreMode; 3] = [RestoreMode::Lazy, RestoreMode::WorkingSet, RestoreMode::Auto];
const ROUNDS: (usize, usize) = (1, 3);

/// A curve for each mode and percentage.
type ModeCurves = Vec<(RestoreMode, String, Vec<(f64, f64)>)>;

/// Runs the experiment.
pub fn run(lab: &Lab) -> Result<Report> {
    let mut report = lab.vm_report("ws-size");
    let disk = lab.throttle_disk(DISK, &mut report);
    let mut lines = ModeCurves::new();
    for percent in PERCENTS {
        if let Some(disk) = &disk {
            measure_percent(lab, percent, disk, &mut lines, &mut report)?;
        }
        add_numbers(percent, &mut report);
    }
    for mode in MODES.into_iter().filter(|_| disk.is_some()) {
        let drawing = draw_plot(mode, &lines)?;
        report.add_drawing(format!("ws-size-{mode}"), drawing);
    }
    Ok(report)
}

fn measure_percent(
    lab: &Lab,
    percent: u32,
    disk: &DiskThrottle,
    lines: &mut ModeCurves,
    report: &mut Report,
) -> Result<()> {
    let image = lab.file(&format!("random{percent}.firn"));
    let subject = SubjectGuest::boot_and_start(lab, SubjectWork::Random(percent), 0)?;
    let save_output = subject.checkpoint(&image, &SaveArgs::default())?;
    drop(subject);
    report.add_repetition(json!({ "percent": percent, "save": save_output.facts }));
    run_interleaved(lab.extent.runs(ROUNDS.0, ROUNDS.1), &MODES, |round, &mode| {
        let restored = ObservedRestore::run_restore(lab, &image, RestoreSettings::new(mode, disk))?;
        let ttr = restored.ttr_s();
        lab.log_progress(&format!("{percent} %, {mode}: TTR(1 s, 80 %) {ttr:.2} s"));
        if round == 0 {
            lines.push((mode, format!("{percent} % of memory"), restored.ttr_curve()));
        }
        report.add_repetition(json!({ "percent": percent, "mode": mode, "round": round,
            "ttr_1s_80": ttr, "complete": restored.is_complete(),
            "facts": restored.run.compute_facts() }));
        Ok(())
    })?;
    Ok(std::fs::remove_file(&image)?)
}

fn add_numbers(percent: u32, report: &mut Report) {
    for mode in MODES {
        let is_it = |run: &&Value| run["percent"] == percent && run["mode"] == json!(mode);
        let runs = report.repetitions().iter().filter(is_it);
        let values: Vec<f64> = runs.filter_map(|run| run["ttr_1s_80"].as_f64()).collect();
        report.add_sample(format!("ttr_1s_80.{percent}.{mode}"), values);
    }
}

fn draw_plot(mode: RestoreMode, lines: &ModeCurves) -> Result<String> {
    let of_mode = lines.iter().filter(|line| line.0 == mode);
    let plot = LinePlot {
        title: format!("TTR(1 s, u) by how much memory is in use: {mode}, on {DISK}"),
        x: "minimum utilization u, %".into(),
        y: "seconds since the command".into(),
        lines: of_mode.map(|(_, name, points)| (name.clone(), points.clone())).collect(),
    };
    plot.to_svg().context("the figure")
}
