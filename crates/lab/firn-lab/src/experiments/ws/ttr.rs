//! `ws-ttr`: time to responsiveness by restore mode.
//!
//! Reproduces Figures 2 and 4 to 7 of Zhang et al. (VEE 2011), with modes and disks that the paper
//! does not have.
//!
//! **What varies**: the guest's work (idle, a JVM with two warehouses, a film, random reads,
//! Redis), the mode (`eager`, `lazy`, `working-set`, `locality`, `auto`) and the disk (`hdd7200`,
//! `netssd`, `none`). On `none` the image is cached.
//!
//! **What is held equal**: all modes and disks restore the same checkpoint of a guest at work.
//!
//! **What is measured**: `ttr_1s_80.{disk}.{work}.{mode}`: TTR(1 s, 80 %) in seconds since the
//! command, from the waits of the vCPUs in the run record. `auto_to_best` is `auto` divided by the
//! best of the other four, where less than a tenth of a second counts as a tenth; `auto_below_lazy`
//! is the share of lazy's time that it saves. The run records are written beside the report, for
//! `firn report`. A JVM's throughput and a film's frames, as they reach the host, are drawn too;
//! the times of the frames are in the report (`frames_s`).

use std::path::Path;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use firn_report::plot::{BarPlot, LinePlot};
use firn_restore::RestoreMode;
use serde_json::{Value, json};

use super::restored::{ObservedRestore, RestoreSettings};
use super::subject::{SubjectGuest, SubjectWork};
use super::throughput::{ThroughputReceiver, work_per_second};
use crate::disk_profile::{DiskProfile, DiskThrottle};
use crate::firn::SaveArgs;
use crate::lab::{Lab, run_interleaved};
use crate::report::Report;

const WORKS: [SubjectWork; 5] = [
    SubjectWork::Idle,
    SubjectWork::Jvm,
    SubjectWork::Video,
    SubjectWork::Random(40),
    SubjectWork::Redis,
];
const MODES: [RestoreMode; 5] = [
    RestoreMode::Eager,
    RestoreMode::Lazy,
    RestoreMode::WorkingSet,
    RestoreMode::Locality,
    RestoreMode::Auto,
];
const DISKS: [DiskProfile; 3] = [DiskProfile::Hdd7200, DiskProfile::NetSsd, DiskProfile::None];
/// The disk of the figures.
const FIGURE_DISK: DiskProfile = DiskProfile::Hdd7200;
const ROUNDS: (usize, usize) = (1, 3);

/// Points of a line.
type LinePoints = Vec<(f64, f64)>;

/// Runs the experiment.
pub fn run(lab: &Lab) -> Result<Report> {
    let mut report = lab.vm_report("ws-ttr");
    let wanted = lab.extent.select_wanted(&DISKS, |disk| disk.to_string());
    let disks: Vec<DiskThrottle> =
        wanted.iter().filter_map(|&disk| lab.throttle_disk(disk, &mut report)).collect();
    for work in lab.extent.select_wanted(&WORKS, SubjectWork::name) {
        measure_work(lab, work, &disks, &mut report)?;
    }
    let drawing = draw_side_by_side(&report)?;
    report.add_drawing("ws-ttr", drawing);
    Ok(report)
}

fn measure_work(
    lab: &Lab,
    work: SubjectWork,
    disks: &[DiskThrottle],
    report: &mut Report,
) -> Result<()> {
    let (name, throughput) = (work.name(), ThroughputReceiver::start_receiving()?);
    let image = lab.file(&format!("{name}.firn"));
    let subject = SubjectGuest::boot_and_start(lab, work, throughput.port())?;
    let save_output = subject.checkpoint(&image, &SaveArgs::default())?;
    drop(subject);
    report.add_repetition(json!({ "work": name, "save": save_output.facts }));
    let mut drawn = FirstRoundPlots::default();
    let modes = lab.extent.select_wanted(&MODES, |mode| mode.to_string());
    for disk in disks {
        let rounds = lab.extent.runs(ROUNDS.0, ROUNDS.1);
        run_interleaved(rounds, &modes, |round, &mode| {
            measure_restore(lab, &image, (work, disk, mode, round), &throughput, &mut drawn, report)
        })?;
    }
    std::fs::remove_file(&image)?;
    let wanted = lab.extent.select_wanted(&DISKS, |disk| disk.to_string());
    wanted.into_iter().for_each(|disk| add_numbers(disk, &name, &modes, report));
    drawn.draw_plots(work, report)
}

/// Measures one restore.
fn measure_restore(
    lab: &Lab,
    image: &Path,
    (work, disk, mode, round): (SubjectWork, &DiskThrottle, RestoreMode, usize),
    throughput: &ThroughputReceiver,
    drawn: &mut FirstRoundPlots,
    report: &mut Report,
) -> Result<()> {
    throughput.clear_reports();
    let restored = ObservedRestore::run_restore(
        lab,
        image,
        RestoreSettings { afterwards: observation_time(work), ..RestoreSettings::new(mode, disk) },
    )?;
    let reports = throughput.reports_since(restored.since);
    let (ttr, profile, name) = (restored.ttr_s(), disk.profile(), work.name());
    lab.log_progress(&format!("{name}, {profile}, {mode}: TTR(1 s, 80 %) {ttr:.2} s"));
    if !restored.is_complete() {
        report.add_remark(format!("{name}, {profile}, {mode}: not all memory was present in time"));
    }
    if profile == FIGURE_DISK && round == 0 {
        drawn.curves.push((mode.to_string(), restored.ttr_curve()));
        drawn.throughput.push((mode.to_string(), work_per_second(&reports)));
    }
    let record = serde_json::to_string(&restored.run.record)?;
    report.add_file(format!("ws-ttr-{name}-{profile}-{mode}-{round}.run.json"), record);
    let mut repetition = json!({ "work": name, "disk": profile, "mode": mode, "round": round,
        "ttr_1s_80": ttr, "complete": restored.is_complete(), "facts": restored.run.compute_facts() });
    if work == SubjectWork::Video {
        ensure!(!reports.is_empty(), "{name}: the film reports no frames");
        let times: Vec<f64> = reports.iter().map(|report| report.0).collect();
        repetition["frames_s"] = json!(times);
    }
    report.add_repetition(repetition);
    Ok(())
}

/// How long a guest is observed once all memory is present, if it reports its progress itself.
fn observation_time(work: SubjectWork) -> Duration {
    match work {
        SubjectWork::Jvm | SubjectWork::Video => Duration::from_secs(2),
        _ => Duration::ZERO,
    }
}

fn add_numbers(disk: DiskProfile, work: &str, modes: &[RestoreMode], report: &mut Report) {
    for &mode in modes {
        let is_it = |run: &&Value| {
            run["work"] == work && run["disk"] == disk.name() && run["mode"] == json!(mode)
        };
        let runs = report.repetitions().iter().filter(is_it);
        let values: Vec<f64> = runs.filter_map(|run| run["ttr_1s_80"].as_f64()).collect();
        report.add_sample(figure_key(disk, work, mode), values);
    }
    let of = |mode| report.figure_value(&figure_key(disk, work, mode)).unwrap_or(f64::NAN);
    if modes.len() < MODES.len() {
        return;
    }
    let others = MODES.into_iter().filter(|&mode| mode != RestoreMode::Auto);
    let best = others.map(of).fold(f64::INFINITY, f64::min);
    let (auto, lazy) = (of(RestoreMode::Auto), of(RestoreMode::Lazy));
    report.add_number(format!("auto_to_best.{disk}.{work}"), bounded_ratio(auto, best));
    report.add_number(format!("auto_below_lazy.{disk}.{work}"), 1.0 - bounded_ratio(auto, lazy));
}

/// A tenth of the window, in seconds: shorter times to responsiveness count as this.
const TTR_S_MIN: f64 = 0.1;

fn bounded_ratio(one: f64, other: f64) -> f64 {
    one.max(TTR_S_MIN) / other.max(TTR_S_MIN)
}

fn figure_key(disk: DiskProfile, work: &str, mode: RestoreMode) -> String {
    format!("ttr_1s_80.{disk}.{work}.{mode}")
}

/// The data of the plots, from the first round on [`FIGURE_DISK`], by mode.
#[derive(Default)]
struct FirstRoundPlots {
    curves: Vec<(String, LinePoints)>,
    throughput: Vec<(String, LinePoints)>,
}

impl FirstRoundPlots {
    fn draw_plots(self, work: SubjectWork, report: &mut Report) -> Result<()> {
        let name = work.name();
        let curves = LinePlot {
            title: format!("TTR(1 s, u) of {name} on {FIGURE_DISK}"),
            x: "minimum utilization u, %".into(),
            y: "seconds since the command".into(),
            lines: self.curves,
        };
        report.add_drawing(format!("ws-ttr-{name}"), curves.to_svg().context("the figure")?);
        let (title, y, file) = match work {
            SubjectWork::Jvm => {
                ("Throughput of the JVM", "transactions per second", "ws-ttr-throughput")
            }
            SubjectWork::Video => ("Frames of the film", "frames per second", "ws-ttr-frames"),
            _ => return Ok(()),
        };
        let throughput = LinePlot {
            title: format!("{title}, restored on {FIGURE_DISK}"),
            x: "seconds since the command".into(),
            y: y.into(),
            lines: self.throughput,
        };
        report.add_drawing(file, throughput.to_svg().context("the figure")?);
        Ok(())
    }
}

/// Draws the TTR of all modes side by side, for every work on [`FIGURE_DISK`].
fn draw_side_by_side(report: &Report) -> Result<String> {
    let of_mode = |mode: RestoreMode| {
        let of = |work: SubjectWork| {
            report.figure_value(&figure_key(FIGURE_DISK, &work.name(), mode)).unwrap_or(0.0)
        };
        (mode.to_string(), WORKS.map(of).into())
    };
    let plot = BarPlot {
        title: format!("TTR(1 s, 80 %) on {FIGURE_DISK}"),
        y: "seconds since the command".into(),
        groups: WORKS.map(SubjectWork::name).into(),
        series: MODES.map(of_mode).into(),
    };
    plot.to_svg().context("the figure")
}
