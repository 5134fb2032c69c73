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
use firn_restore::RestoreMode;
use serde_json::{Value, json};

use super::restored::{ObservedRestore, RestoreSettings};
use super::subject::{SubjectGuest, SubjectWork};
use super::throughput::ThroughputReceiver;
use crate::disk_profile::{DiskProfile, DiskThrottle};
use crate::firn::SaveArgs;
use crate::lab::{Lab, run_interleaved};
use crate::report::Report;

const WORKS: [SubjectWork; 2] = [SubjectWork::Jvm, SubjectWork::Video];
const DISK: DiskProfile = DiskProfile::Hdd7200;
const ROUNDS: (usize, usize) = (1, 5);
const KEYS: [&str; 3] = ["prefetched", "avoided", "on_demand"];

/// A restore's estimate of the pages that the guest will use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum PageEstimate {
    Nothing,
    AccessBits,
    Trace,
    All,
}

impl PageEstimate {
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

    fn restore_mode(self) -> RestoreMode {
        match self {
            Self::Nothing => RestoreMode::Lazy,
            Self::AccessBits | Self::Trace => RestoreMode::WorkingSet,
            Self::All => RestoreMode::Eager,
        }
    }

    fn image_file(self, lab: &Lab) -> PathBuf {
        lab.file(if self == Self::AccessBits { "access_bits.firn" } else { "trace.firn" })
    }

    /// Pages that are restored before the guest runs.
    fn prefetched_pages(self, image: &Path) -> Result<u64> {
        let image = Image::open(image)?;
        let pages = image.geometry().block_size.page_count() as u64;
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
    let Some(disk) = lab.throttle_disk(DISK, &mut report) else {
        WORKS.iter().for_each(|work| add_missing_figures(&work.name(), &mut report));
        return Ok(report);
    };
    let all_known = lab.extent.select_wanted(&PageEstimate::ALL, |known| known.name().to_owned());
    for work in lab.extent.select_wanted(&WORKS, SubjectWork::name) {
        save_both(lab, work, &mut report)?;
        let rounds = lab.extent.runs(ROUNDS.0, ROUNDS.1);
        run_interleaved(rounds, &all_known, |round, &known| {
            measure_restore(lab, work, known, &disk, round, &mut report)
        })?;
        add_numbers(&work.name(), &all_known, &mut report);
    }
    let drawing = draw_plot(&report)?;
    report.add_drawing("ws-estimators", drawing);
    Ok(report)
}

fn add_missing_figures(work: &str, report: &mut Report) {
    for known in PageEstimate::ALL {
        for key in KEYS {
            let key = format!("{work}.{}.{key}", known.name());
            report.add_missing(key, "needs a disk that can be throttled");
        }
    }
}

/// Makes two checkpoints of the same guest.
fn save_both(lab: &Lab, work: SubjectWork, report: &mut Report) -> Result<()> {
    let throughput = ThroughputReceiver::start_receiving()?;
    let subject = SubjectGuest::boot_and_start(lab, work, throughput.port())?;
    let traced = subject.checkpoint(&PageEstimate::Trace.image_file(lab), &SaveArgs::default())?;
    subject.scan_access()?;
    let bits = SaveArgs::default().with_option("--working-set", "access-bits");
    let scanned = subject.checkpoint(&PageEstimate::AccessBits.image_file(lab), &bits)?;
    for (known, said) in [(PageEstimate::Trace, traced), (PageEstimate::AccessBits, scanned)] {
        report.add_repetition(
            json!({ "work": work.name(), "saved": known.name(), "facts": said.facts }),
        );
    }
    Ok(())
}

fn measure_restore(
    lab: &Lab,
    work: SubjectWork,
    known: PageEstimate,
    disk: &DiskThrottle,
    round: usize,
    report: &mut Report,
) -> Result<()> {
    let (image, work, how) =
        (known.image_file(lab), work.name(), RestoreSettings::new(known.restore_mode(), disk));
    let plain = ObservedRestore::run_restore(lab, &image, how)?;
    let on_demand = plain.run.record.counts.on_demand_pages;
    let avoided = match known {
        PageEstimate::Nothing => 0,
        _ => {
            let accounted = ObservedRestore::run_restore(
                lab,
                &image,
                RestoreSettings { account_use: true, ..how },
            )?;
            let used = accounted.run.record.counts.prefetched_used_pages;
            used.context("use was not counted")?
        }
    };
    let (name, ttr) = (known.name(), plain.ttr_s());
    lab.log_progress(&format!(
        "{work}, {name}: {on_demand} pages on demand, {avoided} avoided, TTR {ttr:.2} s"
    ));
    report.add_repetition(json!({ "work": work, "known": name, "round": round, "ttr_1s_80": ttr,
        "prefetched": known.prefetched_pages(&image)?, "avoided": avoided, "on_demand": on_demand,
        "complete": plain.is_complete() }));
    Ok(())
}

fn add_numbers(work: &str, all_known: &[PageEstimate], report: &mut Report) {
    for known in all_known {
        for key in KEYS {
            let is_it = |run: &&Value| run["work"] == work && run["known"] == known.name();
            let runs = report.repetitions().iter().filter(is_it);
            let values: Vec<f64> = runs.filter_map(|run| run[key].as_f64()).collect();
            report.add_sample(format!("{work}.{}.{key}", known.name()), values);
        }
    }
    let lazy = on_demand_median(report, work, PageEstimate::Nothing);
    if !all_known.contains(&PageEstimate::Nothing) {
        return;
    }
    for &known in all_known.iter().filter(|known| known.is_estimated()) {
        let share = on_demand_median(report, work, known) / lazy;
        report.add_number(format!("{work}.{}.on_demand_to_lazy", known.name()), share);
    }
}

fn on_demand_median(report: &Report, work: &str, known: PageEstimate) -> f64 {
    report.figure_value(&format!("{work}.{}.on_demand", known.name())).unwrap_or(f64::NAN)
}

fn draw_plot(report: &Report) -> Result<String> {
    let of = |known: PageEstimate| {
        let pages = WORKS.map(|work| on_demand_median(report, &work.name(), known));
        (known.name().to_owned(), pages.into())
    };
    let plot = BarPlot {
        title: "Pages that the restored guest waited for".into(),
        y: "pages".into(),
        groups: WORKS.map(SubjectWork::name).into(),
        series: PageEstimate::ALL.map(of).into(),
    };
    plot.to_svg().context("the figure")
}
