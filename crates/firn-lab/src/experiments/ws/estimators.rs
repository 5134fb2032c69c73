//! `ws-estimators`: how well the pages that a restored guest will use are known beforehand.
//!
//! Reproduces Tables 2 and 3 of Zhang et al. (VEE 2011).
//!
//! **What varies**: the guest's work (a JVM, a film), and the estimate that a restore uses: none
//! (`lazy`), access bits before the cut (`access_bits`), the guest's accesses during the save
//! (`trace`), or all pages (`eager`).
//!
//! **What is held equal**: the guest, the disk (`hdd7200`, cold). Both estimators observe the same
//! guest at the same work; each has its own checkpoint, seconds apart. `lazy` and `eager` restore
//! that of `trace`. The estimated pages are restored before the guest runs (`working-set`), the
//! others in the background and on demand, as in the paper.
//!
//! **What is measured**, in pages: `prefetched`, the working set; `avoided`, its pages that the
//! guest used; `on_demand`, other pages that the guest had to wait for. `avoided` comes from a
//! separate restore, in which prefetched pages stay inaccessible to the guest so that each first
//! use is seen. `on_demand_to_lazy` is the share of lazy's waits that remain.

use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result};
use firn_image::Image;
use firn_report::plot::BarPlot;
use firn_restore::Mode;
use serde_json::{Value, json};

use super::restored::{How, Restored};
use super::subject::{Subject, Work};
use super::throughput::Throughput;
use crate::disk_profile::{DiskProfile, Throttle};
use crate::firn::SaveArgs;
use crate::lab::{Lab, interleaved};
use crate::report::Report;

const WORKS: [Work; 2] = [Work::Jvm, Work::Video];
const DISK: DiskProfile = DiskProfile::Hdd7200;
const ROUNDS: (usize, usize) = (1, 5);
const KEYS: [&str; 3] = ["prefetched", "avoided", "on_demand"];

/// A restore's estimate of the pages that the guest will use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Known {
    Nothing,
    AccessBits,
    Trace,
    All,
}

impl Known {
    const ALL: [Self; 4] = [Self::Nothing, Self::AccessBits, Self::Trace, Self::All];

    fn name(self) -> &'static str {
        match self {
            Self::Nothing => "lazy",
            Self::AccessBits => "access_bits",
            Self::Trace => "trace",
            Self::All => "eager",
        }
    }

    fn is_estimated(self) -> bool {
        matches!(self, Self::AccessBits | Self::Trace)
    }

    fn mode(self) -> Mode {
        match self {
            Self::Nothing => Mode::Lazy,
            Self::AccessBits | Self::Trace => Mode::WorkingSet,
            Self::All => Mode::Eager,
        }
    }

    fn image(self, lab: &Lab) -> PathBuf {
        lab.file(if self == Self::AccessBits { "access_bits.firn" } else { "trace.firn" })
    }

    /// Pages that are restored before the guest runs.
    fn prefetched(self, image: &Path) -> Result<u64> {
        let image = Image::open(image)?;
        let pages = image.geometry().block_size.pages() as u64;
        Ok(match self {
            Self::Nothing => 0,
            Self::AccessBits | Self::Trace => image.working_set().len() as u64 * pages,
            Self::All => u64::from(image.summary().stored_blocks) * pages,
        })
    }
}

/// Runs the experiment.
pub fn run(lab: &Lab) -> Result<Report> {
    let mut report = lab.vm_report("ws-estimators");
    let Some(disk) = lab.disk(DISK, &mut report) else {
        WORKS.iter().for_each(|work| missing(&work.name(), &mut report));
        return Ok(report);
    };
    let all_known = lab.extent.wanted(&Known::ALL, |known| known.name().to_owned());
    for work in lab.extent.wanted(&WORKS, Work::name) {
        save(lab, work, &mut report)?;
        let rounds = lab.extent.runs(ROUNDS.0, ROUNDS.1);
        interleaved(rounds, &all_known, |round, &known| {
            restore(lab, work, known, &disk, round, &mut report)
        })?;
        figures(&work.name(), &all_known, &mut report);
    }
    let drawing = drawing(&report)?;
    report.drawing("ws-estimators", drawing);
    Ok(report)
}

fn missing(work: &str, report: &mut Report) {
    for known in Known::ALL {
        for key in KEYS {
            let key = format!("{work}.{}.{key}", known.name());
            report.missing(key, "needs a disk that can be throttled");
        }
    }
}

/// Makes two checkpoints of the same guest.
fn save(lab: &Lab, work: Work, report: &mut Report) -> Result<()> {
    let throughput = Throughput::listen()?;
    let subject = Subject::start(lab, work, throughput.port())?;
    let traced = subject.checkpoint(&Known::Trace.image(lab), &SaveArgs::default())?;
    subject.scan()?;
    let bits = SaveArgs::default().with("--working-set", "access-bits");
    let scanned = subject.checkpoint(&Known::AccessBits.image(lab), &bits)?;
    for (known, said) in [(Known::Trace, traced), (Known::AccessBits, scanned)] {
        report
            .repetition(json!({ "work": work.name(), "saved": known.name(), "facts": said.facts }));
    }
    Ok(())
}

fn restore(
    lab: &Lab,
    work: Work,
    known: Known,
    disk: &Throttle,
    round: usize,
    report: &mut Report,
) -> Result<()> {
    let (image, work, how) = (known.image(lab), work.name(), How::new(known.mode(), disk));
    let plain = Restored::of(lab, &image, how)?;
    let on_demand = plain.run.record.counts.on_demand_pages;
    let avoided = match known {
        Known::Nothing => 0,
        _ => {
            let accounted = Restored::of(lab, &image, How { account_use: true, ..how })?;
            let used = accounted.run.record.counts.prefetched_used_pages;
            used.context("use was not counted")?
        }
    };
    let (name, ttr) = (known.name(), plain.ttr());
    lab.say(&format!(
        "{work}, {name}: {on_demand} pages on demand, {avoided} avoided, TTR {ttr:.2} s"
    ));
    report.repetition(json!({ "work": work, "known": name, "round": round, "ttr_1s_80": ttr,
        "prefetched": known.prefetched(&image)?, "avoided": avoided, "on_demand": on_demand,
        "complete": plain.is_complete() }));
    Ok(())
}

fn figures(work: &str, all_known: &[Known], report: &mut Report) {
    for known in all_known {
        for key in KEYS {
            let is_it = |run: &&Value| run["work"] == work && run["known"] == known.name();
            let runs = report.repetitions().iter().filter(is_it);
            let values: Vec<f64> = runs.filter_map(|run| run[key].as_f64()).collect();
            report.sample(format!("{work}.{}.{key}", known.name()), values);
        }
    }
    let lazy = on_demand(report, work, Known::Nothing);
    if !all_known.contains(&Known::Nothing) {
        return;
    }
    for &known in all_known.iter().filter(|known| known.is_estimated()) {
        let share = on_demand(report, work, known) / lazy;
        report.number(format!("{work}.{}.on_demand_to_lazy", known.name()), share);
    }
}

fn on_demand(report: &Report, work: &str, known: Known) -> f64 {
    report.value(&format!("{work}.{}.on_demand", known.name())).unwrap_or(f64::NAN)
}

fn drawing(report: &Report) -> Result<String> {
    let of = |known: Known| {
        let pages = WORKS.map(|work| on_demand(report, &work.name(), known));
        (known.name().to_owned(), pages.into())
    };
    let plot = BarPlot {
        title: "Pages that the restored guest waited for".into(),
        y: "pages".into(),
        groups: WORKS.map(Work::name).into(),
        series: Known::ALL.map(of).into(),
    };
    plot.svg().context("the figure")
}
