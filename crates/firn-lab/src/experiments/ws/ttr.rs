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
use firn_restore::Mode;
use serde_json::{Value, json};

use super::restored::{How, Restored};
use super::subject::{Subject, Work};
use super::throughput::{Throughput, per_second};
use crate::disk_profile::{DiskProfile, Throttle};
use crate::firn::SaveArgs;
use crate::lab::{Lab, interleaved};
use crate::report::Report;

const WORKS: [Work; 5] = [Work::Idle, Work::Jvm, Work::Video, Work::Random(40), Work::Redis];
const MODES: [Mode; 5] = [Mode::Eager, Mode::Lazy, Mode::WorkingSet, Mode::Locality, Mode::Auto];
const DISKS: [DiskProfile; 3] = [DiskProfile::Hdd7200, DiskProfile::NetSsd, DiskProfile::None];
/// The disk of the figures.
const DRAWN: DiskProfile = DiskProfile::Hdd7200;
const ROUNDS: (usize, usize) = (1, 3);

/// Points of a line.
type Points = Vec<(f64, f64)>;

/// Runs the experiment.
pub fn run(lab: &Lab) -> Result<Report> {
    let mut report = lab.vm_report("ws-ttr");
    let wanted = lab.extent.wanted(&DISKS, |disk| disk.to_string());
    let disks: Vec<Throttle> =
        wanted.iter().filter_map(|&disk| lab.disk(disk, &mut report)).collect();
    for work in lab.extent.wanted(&WORKS, Work::name) {
        of_work(lab, work, &disks, &mut report)?;
    }
    let drawing = side_by_side(&report)?;
    report.drawing("ws-ttr", drawing);
    Ok(report)
}

fn of_work(lab: &Lab, work: Work, disks: &[Throttle], report: &mut Report) -> Result<()> {
    let (name, throughput) = (work.name(), Throughput::listen()?);
    let image = lab.file(&format!("{name}.firn"));
    let subject = Subject::start(lab, work, throughput.port())?;
    let said = subject.checkpoint(&image, &SaveArgs::default())?;
    drop(subject);
    report.repetition(json!({ "work": name, "save": said.facts }));
    let mut drawn = Drawn::default();
    let modes = lab.extent.wanted(&MODES, |mode| mode.to_string());
    for disk in disks {
        let rounds = lab.extent.runs(ROUNDS.0, ROUNDS.1);
        interleaved(rounds, &modes, |round, &mode| {
            one(lab, &image, (work, disk, mode, round), &throughput, &mut drawn, report)
        })?;
    }
    std::fs::remove_file(&image)?;
    let wanted = lab.extent.wanted(&DISKS, |disk| disk.to_string());
    wanted.into_iter().for_each(|disk| figures(disk, &name, &modes, report));
    drawn.draw(work, report)
}

/// Measures one restore.
fn one(
    lab: &Lab,
    image: &Path,
    (work, disk, mode, round): (Work, &Throttle, Mode, usize),
    throughput: &Throughput,
    drawn: &mut Drawn,
    report: &mut Report,
) -> Result<()> {
    throughput.begin();
    let restored =
        Restored::of(lab, image, How { afterwards: afterwards(work), ..How::new(mode, disk) })?;
    let reports = throughput.since(restored.since);
    let (ttr, profile, name) = (restored.ttr(), disk.profile(), work.name());
    lab.say(&format!("{name}, {profile}, {mode}: TTR(1 s, 80 %) {ttr:.2} s"));
    if !restored.is_complete() {
        report.note(format!("{name}, {profile}, {mode}: not all memory was present in time"));
    }
    if profile == DRAWN && round == 0 {
        drawn.curves.push((mode.to_string(), restored.curve()));
        drawn.throughput.push((mode.to_string(), per_second(&reports)));
    }
    let record = serde_json::to_string(&restored.run.record)?;
    report.file(format!("ws-ttr-{name}-{profile}-{mode}-{round}.run.json"), record);
    let mut repetition = json!({ "work": name, "disk": profile, "mode": mode, "round": round,
        "ttr_1s_80": ttr, "complete": restored.is_complete(), "facts": restored.run.facts() });
    if work == Work::Video {
        ensure!(!reports.is_empty(), "{name}: the film reports no frames");
        let times: Vec<f64> = reports.iter().map(|report| report.0).collect();
        repetition["frames_s"] = json!(times);
    }
    report.repetition(repetition);
    Ok(())
}

/// How long a guest is observed once all memory is present, if it reports its progress itself.
fn afterwards(work: Work) -> Duration {
    match work {
        Work::Jvm | Work::Video => Duration::from_secs(2),
        _ => Duration::ZERO,
    }
}

fn figures(disk: DiskProfile, work: &str, modes: &[Mode], report: &mut Report) {
    for &mode in modes {
        let is_it = |run: &&Value| {
            run["work"] == work && run["disk"] == disk.name() && run["mode"] == json!(mode)
        };
        let runs = report.repetitions().iter().filter(is_it);
        let values: Vec<f64> = runs.filter_map(|run| run["ttr_1s_80"].as_f64()).collect();
        report.sample(key(disk, work, mode), values);
    }
    let of = |mode| report.value(&key(disk, work, mode)).unwrap_or(f64::NAN);
    if modes.len() < MODES.len() {
        return;
    }
    let others = MODES.into_iter().filter(|&mode| mode != Mode::Auto);
    let best = others.map(of).fold(f64::INFINITY, f64::min);
    let (auto, lazy) = (of(Mode::Auto), of(Mode::Lazy));
    report.number(format!("auto_to_best.{disk}.{work}"), ratio(auto, best));
    report.number(format!("auto_below_lazy.{disk}.{work}"), 1.0 - ratio(auto, lazy));
}

/// A tenth of the window, in seconds: shorter times to responsiveness count as this.
const AT_ONCE: f64 = 0.1;

fn ratio(one: f64, other: f64) -> f64 {
    one.max(AT_ONCE) / other.max(AT_ONCE)
}

fn key(disk: DiskProfile, work: &str, mode: Mode) -> String {
    format!("ttr_1s_80.{disk}.{work}.{mode}")
}

/// The data of the plots, from the first round on [`DRAWN`], by mode.
#[derive(Default)]
struct Drawn {
    curves: Vec<(String, Points)>,
    throughput: Vec<(String, Points)>,
}

impl Drawn {
    fn draw(self, work: Work, report: &mut Report) -> Result<()> {
        let name = work.name();
        let curves = LinePlot {
            title: format!("TTR(1 s, u) of {name} on {DRAWN}"),
            x: "minimum utilization u, %".into(),
            y: "seconds since the command".into(),
            lines: self.curves,
        };
        report.drawing(format!("ws-ttr-{name}"), curves.svg().context("the figure")?);
        let (title, y, file) = match work {
            Work::Jvm => ("Throughput of the JVM", "transactions per second", "ws-ttr-throughput"),
            Work::Video => ("Frames of the film", "frames per second", "ws-ttr-frames"),
            _ => return Ok(()),
        };
        let throughput = LinePlot {
            title: format!("{title}, restored on {DRAWN}"),
            x: "seconds since the command".into(),
            y: y.into(),
            lines: self.throughput,
        };
        report.drawing(file, throughput.svg().context("the figure")?);
        Ok(())
    }
}

/// Draws the TTR of all modes side by side, for every work on [`DRAWN`].
fn side_by_side(report: &Report) -> Result<String> {
    let of_mode = |mode: Mode| {
        let of = |work: Work| report.value(&key(DRAWN, &work.name(), mode)).unwrap_or(0.0);
        (mode.to_string(), WORKS.map(of).into())
    };
    let plot = BarPlot {
        title: format!("TTR(1 s, 80 %) on {DRAWN}"),
        y: "seconds since the command".into(),
        groups: WORKS.map(Work::name).into(),
        series: MODES.map(of_mode).into(),
    };
    plot.svg().context("the figure")
}
