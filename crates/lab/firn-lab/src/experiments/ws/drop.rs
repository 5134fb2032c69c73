//! `ws-drop`: the worth of a working set that lacks a part, or is wrong.
//!
//! Reproduces Figure 8 of Zhang et al. (VEE 2011), and measures besides the cost of a completely
//! useless working set.
//!
//! **What varies**: the part of the working set that is missing (0, 1, 5, 10, 20, 50 %, chosen at
//! random), in mode `working-set`; `lazy` for comparison. And a working set of as many pages, none
//! of which is right (`wrong`), in the modes that use it, against `locality`, which does not.
//!
//! **What is held equal**: the checkpoint of a guest that plays a film, and the positions of its
//! memory blocks; the disk (`hdd7200`, cold).
//!
//! **What is measured**: `ttr_1s_80.{percent}`, `ttr_1s_80.lazy`, `ttr_1s_80.wrong.{mode}`: TTR(1
//! s, 80 %) in seconds since the command, by the run record. `wrong_auto_to_locality`: the cost of
//! being misled. `learned.{n}`: with half of the working set dropped, after `n` restores from which
//! Firn could learn the missing blocks.

use std::path::PathBuf;

use anyhow::{Context as _, Result};
use firn_image::{BlockOrganization, Image, ListedWorkingSet, ReorderOptions, reorder_image};
use firn_report::plot::LinePlot;
use firn_restore::RestoreMode;
use serde_json::json;

use super::restored::{ObservedRestore, RestoreSettings};
use super::subject::{SubjectGuest, SubjectWork};
use super::throughput::ThroughputReceiver;
use crate::disk_profile::{DiskProfile, DiskThrottle};
use crate::firn::SaveArgs;
use crate::lab::{Lab, run_interleaved};
use crate::report::Report;

const DISK: DiskProfile = DiskProfile::Hdd7200;
const DROPPED: [u8; 6] = [0, 1, 5, 10, 20, 50];
/// Maximum number of restores to learn from.
const LEARNED_FROM: u32 = 3;
const ROUNDS: (usize, usize) = (1, 5);

/// A case to compare: an image, and a mode.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct DropCase {
    change: ListedWorkingSet,
    mode: RestoreMode,
}

impl DropCase {
    fn all_cases() -> Vec<Self> {
        let dropped = DROPPED.map(|percent| Self {
            change: ListedWorkingSet::Dropped(percent),
            mode: RestoreMode::WorkingSet,
        });
        let wrong = [RestoreMode::Auto, RestoreMode::WorkingSet, RestoreMode::Locality]
            .map(|mode| Self { change: ListedWorkingSet::Wrong, mode });
        let lazy = Self { change: ListedWorkingSet::Kept, mode: RestoreMode::Lazy };
        dropped.into_iter().chain(wrong).chain([lazy]).collect()
    }

    fn name(self) -> String {
        match self.change {
            ListedWorkingSet::Kept => self.mode.to_string(),
            ListedWorkingSet::Dropped(percent) => percent.to_string(),
            ListedWorkingSet::Wrong => format!("wrong.{}", self.mode),
        }
    }

    /// The image of the case. Each change has its own image.
    fn image_file(self, lab: &Lab) -> PathBuf {
        lab.file(&match self.change {
            ListedWorkingSet::Kept => "film.firn".to_owned(),
            ListedWorkingSet::Dropped(percent) => format!("film-{percent}.firn"),
            ListedWorkingSet::Wrong => "film-wrong.firn".to_owned(),
        })
    }
}

/// Runs the experiment.
pub fn run(lab: &Lab) -> Result<Report> {
    let mut report = lab.vm_report("ws-drop");
    let cases = DropCase::all_cases();
    let Some(disk) = lab.throttle_disk(DISK, &mut report) else {
        for case in cases {
            let why = "needs a disk that can be throttled";
            report.add_missing(format!("ttr_1s_80.{}", case.name()), why);
        }
        return Ok(report);
    };
    make_images(lab, &cases, &mut report)?;
    let mut curves = Vec::new();
    run_interleaved(lab.extent.runs(ROUNDS.0, ROUNDS.1), &cases, |round, &case| {
        let curve = measure_restore(lab, case, &disk, round, &mut report)?;
        if round == 0 && case.change != ListedWorkingSet::Wrong {
            curves.push((case.name(), curve));
        }
        Ok(())
    })?;
    add_numbers(&cases, &mut report);
    measure_learning(lab, &disk, &mut report)?;
    let drawing = draw_plot(curves)?;
    report.add_drawing("ws-drop", drawing);
    Ok(report)
}

/// Makes a checkpoint, and derives the other images from it.
fn make_images(lab: &Lab, cases: &[DropCase], report: &mut Report) -> Result<()> {
    let whole =
        DropCase { change: ListedWorkingSet::Kept, mode: RestoreMode::Lazy }.image_file(lab);
    let throughput = ThroughputReceiver::start_receiving()?;
    let subject = SubjectGuest::boot_and_start(lab, SubjectWork::Video, throughput.port())?;
    let save_output = subject.checkpoint(&whole, &SaveArgs::default())?;
    drop(subject);
    report.add_repetition(json!({ "save": save_output.facts }));
    let source = Image::open(&whole)?;
    for case in cases.iter().filter(|case| case.change != ListedWorkingSet::Kept) {
        let by = ReorderOptions::for_organization(BlockOrganization::Access);
        let how = ReorderOptions { working_set: case.change, seed: lab.extent.seed, ..by };
        reorder_image(&source, &how, &case.image_file(lab), &|_, _| ())?;
    }
    Ok(())
}

/// Measures one restore; returns its TTR by utilization.
fn measure_restore(
    lab: &Lab,
    case: DropCase,
    disk: &DiskThrottle,
    round: usize,
    report: &mut Report,
) -> Result<Vec<(f64, f64)>> {
    let restored = ObservedRestore::run_restore(
        lab,
        &case.image_file(lab),
        RestoreSettings::new(case.mode, disk),
    )?;
    let (name, ttr) = (case.name(), restored.ttr_s());
    lab.log_progress(&format!("{name}: TTR(1 s, 80 %) {ttr:.2} s"));
    report.add_repetition(json!({ "case": name, "round": round, "ttr_1s_80": ttr,
        "complete": restored.is_complete(), "facts": restored.run.compute_facts() }));
    Ok(restored.ttr_curve())
}

/// Restores half a working set repeatedly; each restore learns from those before it.
fn measure_learning(lab: &Lab, disk: &DiskThrottle, report: &mut Report) -> Result<()> {
    let half = DropCase { change: ListedWorkingSet::Dropped(50), mode: RestoreMode::WorkingSet };
    for restores in 0..=LEARNED_FROM {
        let how = RestoreSettings { learn: true, ..RestoreSettings::new(half.mode, disk) };
        let restored = ObservedRestore::run_restore(lab, &half.image_file(lab), how)?;
        let (ttr, facts) = (restored.ttr_s(), restored.run.compute_facts());
        let on_demand = facts.on_demand_pages;
        lab.log_progress(&format!(
            "after {restores} restores: TTR(1 s, 80 %) {ttr:.2} s, {on_demand} pages on demand"
        ));
        report.add_repetition(json!({ "learned": restores, "ttr_1s_80": ttr, "facts": facts }));
        report.add_number(format!("learned.{restores}"), ttr);
    }
    Ok(())
}

fn add_numbers(cases: &[DropCase], report: &mut Report) {
    for name in cases.iter().map(|case| case.name()) {
        let runs = report.repetitions().iter().filter(|run| run["case"] == name.as_str());
        let values: Vec<f64> = runs.filter_map(|run| run["ttr_1s_80"].as_f64()).collect();
        report.add_sample(format!("ttr_1s_80.{name}"), values);
    }
    let of = |name: &str| report.figure_value(&format!("ttr_1s_80.{name}")).unwrap_or(f64::NAN);
    let ratio = of("wrong.auto") / of("wrong.locality");
    report.add_number("wrong_auto_to_locality", ratio);
}

fn draw_plot(lines: Vec<(String, Vec<(f64, f64)>)>) -> Result<String> {
    let lines = lines.into_iter().map(|(name, points)| match name.parse::<u8>() {
        Ok(percent) => (format!("{percent} % dropped"), points),
        Err(_) => (name, points),
    });
    let plot = LinePlot {
        title: format!("TTR(1 s, u) with a part of the working set dropped, on {DISK}"),
        x: "minimum utilization u, %".into(),
        y: "seconds since the command".into(),
        lines: lines.collect(),
    };
    plot.to_svg().context("the figure")
}
