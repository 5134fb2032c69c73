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
use firn_restore::Mode;
use serde_json::{Value, json};

use super::restored::{How, Restored};
use super::subject::{Subject, Work};
use crate::disk_profile::{DiskProfile, Throttle};
use crate::firn::SaveArgs;
use crate::lab::{Lab, interleaved};
use crate::report::Report;

const DISK: DiskProfile = DiskProfile::Hdd7200;
const PERCENTS: [u32; 4] = [20, 40, 60, 80];
const MODES: [Mode; 3] = [Mode::Lazy, Mode::WorkingSet, Mode::Auto];
const ROUNDS: (usize, usize) = (1, 3);

/// A curve for each mode and percentage.
type Lines = Vec<(Mode, String, Vec<(f64, f64)>)>;

/// Runs the experiment.
pub fn run(lab: &Lab) -> Result<Report> {
    let mut report = lab.vm_report("ws-size");
    let disk = lab.disk(DISK, &mut report);
    let mut lines = Lines::new();
    for percent in PERCENTS {
        if let Some(disk) = &disk {
            of_percent(lab, percent, disk, &mut lines, &mut report)?;
        }
        figures(percent, &mut report);
    }
    for mode in MODES.into_iter().filter(|_| disk.is_some()) {
        let drawing = drawing(mode, &lines)?;
        report.drawing(format!("ws-size-{mode}"), drawing);
    }
    Ok(report)
}

fn of_percent(
    lab: &Lab,
    percent: u32,
    disk: &Throttle,
    lines: &mut Lines,
    report: &mut Report,
) -> Result<()> {
    let image = lab.file(&format!("random{percent}.firn"));
    let subject = Subject::start(lab, Work::Random(percent), 0)?;
    let said = subject.checkpoint(&image, &SaveArgs::default())?;
    drop(subject);
    report.repetition(json!({ "percent": percent, "save": said.facts }));
    interleaved(lab.extent.runs(ROUNDS.0, ROUNDS.1), &MODES, |round, &mode| {
        let restored = Restored::of(lab, &image, How::new(mode, disk))?;
        let ttr = restored.ttr();
        lab.say(&format!("{percent} %, {mode}: TTR(1 s, 80 %) {ttr:.2} s"));
        if round == 0 {
            lines.push((mode, format!("{percent} % of memory"), restored.curve()));
        }
        report.repetition(json!({ "percent": percent, "mode": mode, "round": round,
            "ttr_1s_80": ttr, "complete": restored.is_complete(),
            "facts": restored.run.facts() }));
        Ok(())
    })?;
    Ok(std::fs::remove_file(&image)?)
}

fn figures(percent: u32, report: &mut Report) {
    for mode in MODES {
        let is_it = |run: &&Value| run["percent"] == percent && run["mode"] == json!(mode);
        let runs = report.repetitions().iter().filter(is_it);
        let values: Vec<f64> = runs.filter_map(|run| run["ttr_1s_80"].as_f64()).collect();
        report.sample(format!("ttr_1s_80.{percent}.{mode}"), values);
    }
}

fn drawing(mode: Mode, lines: &Lines) -> Result<String> {
    let of_mode = lines.iter().filter(|line| line.0 == mode);
    let plot = LinePlot {
        title: format!("TTR(1 s, u) by how much memory is in use: {mode}, on {DISK}"),
        x: "minimum utilization u, %".into(),
        y: "seconds since the command".into(),
        lines: of_mode.map(|(_, name, points)| (name.clone(), points.clone())).collect(),
    };
    plot.svg().context("the figure")
}
