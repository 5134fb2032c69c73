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
use firn_image::{Image, ListedWorkingSet, Organization, Reorder, reorder};
use firn_report::plot::LinePlot;
use firn_restore::Mode;
use serde_json::json;

use super::restored::{How, Restored};
use super::subject::{Subject, Work};
use super::throughput::Throughput;
use crate::disk_profile::{DiskProfile, Throttle};
use crate::firn::SaveArgs;
use crate::lab::{Lab, interleaved};
use crate::report::Report;

const DISK: DiskProfile = DiskProfile::Hdd7200;
const DROPPED: [u8; 6] = [0, 1, 5, 10, 20, 50];
/// Maximum number of restores to learn from.
const LEARNED_FROM: u32 = 3;
const ROUNDS: (usize, usize) = (1, 5);

/// A case to compare: an image, and a mode.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Case {
    change: ListedWorkingSet,
    mode: Mode,
}

impl Case {
    fn all() -> Vec<Self> {
        let dropped = DROPPED.map(|percent| Self {
            change: ListedWorkingSet::Dropped(percent),
            mode: Mode::WorkingSet,
        });
        let wrong = [Mode::Auto, Mode::WorkingSet, Mode::Locality]
            .map(|mode| Self { change: ListedWorkingSet::Wrong, mode });
        let lazy = Self { change: ListedWorkingSet::Kept, mode: Mode::Lazy };
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
    fn image(self, lab: &Lab) -> PathBuf {
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
    let cases = Case::all();
    let Some(disk) = lab.disk(DISK, &mut report) else {
        for case in cases {
            let why = "needs a disk that can be throttled";
            report.missing(format!("ttr_1s_80.{}", case.name()), why);
        }
        return Ok(report);
    };
    images(lab, &cases, &mut report)?;
    let mut curves = Vec::new();
    interleaved(lab.extent.runs(ROUNDS.0, ROUNDS.1), &cases, |round, &case| {
        let curve = one(lab, case, &disk, round, &mut report)?;
        if round == 0 && case.change != ListedWorkingSet::Wrong {
            curves.push((case.name(), curve));
        }
        Ok(())
    })?;
    figures(&cases, &mut report);
    learn(lab, &disk, &mut report)?;
    let drawing = drawing(curves)?;
    report.drawing("ws-drop", drawing);
    Ok(report)
}

/// Makes a checkpoint, and derives the other images from it.
fn images(lab: &Lab, cases: &[Case], report: &mut Report) -> Result<()> {
    let whole = Case { change: ListedWorkingSet::Kept, mode: Mode::Lazy }.image(lab);
    let throughput = Throughput::listen()?;
    let subject = Subject::start(lab, Work::Video, throughput.port())?;
    let said = subject.checkpoint(&whole, &SaveArgs::default())?;
    drop(subject);
    report.repetition(json!({ "save": said.facts }));
    let source = Image::open(&whole)?;
    for case in cases.iter().filter(|case| case.change != ListedWorkingSet::Kept) {
        let by = Reorder::by(Organization::Access);
        let how = Reorder { working_set: case.change, seed: lab.extent.seed, ..by };
        reorder(&source, &how, &case.image(lab), &|_, _| ())?;
    }
    Ok(())
}

/// Measures one restore; returns its TTR by utilization.
fn one(
    lab: &Lab,
    case: Case,
    disk: &Throttle,
    round: usize,
    report: &mut Report,
) -> Result<Vec<(f64, f64)>> {
    let restored = Restored::of(lab, &case.image(lab), How::new(case.mode, disk))?;
    let (name, ttr) = (case.name(), restored.ttr());
    lab.say(&format!("{name}: TTR(1 s, 80 %) {ttr:.2} s"));
    report.repetition(json!({ "case": name, "round": round, "ttr_1s_80": ttr,
        "complete": restored.is_complete(), "facts": restored.run.facts() }));
    Ok(restored.curve())
}

/// Restores half a working set repeatedly; each restore learns from those before it.
fn learn(lab: &Lab, disk: &Throttle, report: &mut Report) -> Result<()> {
    let half = Case { change: ListedWorkingSet::Dropped(50), mode: Mode::WorkingSet };
    for restores in 0..=LEARNED_FROM {
        let how = How { learn: true, ..How::new(half.mode, disk) };
        let restored = Restored::of(lab, &half.image(lab), how)?;
        let (ttr, facts) = (restored.ttr(), restored.run.facts());
        let on_demand = facts.on_demand_pages;
        lab.say(&format!(
            "after {restores} restores: TTR(1 s, 80 %) {ttr:.2} s, {on_demand} pages on demand"
        ));
        report.repetition(json!({ "learned": restores, "ttr_1s_80": ttr, "facts": facts }));
        report.number(format!("learned.{restores}"), ttr);
    }
    Ok(())
}

fn figures(cases: &[Case], report: &mut Report) {
    for name in cases.iter().map(|case| case.name()) {
        let runs = report.repetitions().iter().filter(|run| run["case"] == name.as_str());
        let values: Vec<f64> = runs.filter_map(|run| run["ttr_1s_80"].as_f64()).collect();
        report.sample(format!("ttr_1s_80.{name}"), values);
    }
    let of = |name: &str| report.value(&format!("ttr_1s_80.{name}")).unwrap_or(f64::NAN);
    let ratio = of("wrong.auto") / of("wrong.locality");
    report.number("wrong_auto_to_locality", ratio);
}

fn drawing(lines: Vec<(String, Vec<(f64, f64)>)>) -> Result<String> {
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
    plot.svg().context("the figure")
}
