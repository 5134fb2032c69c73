//! `halite-organization`: the gain of storing blocks together that are used together.
//!
//! Reproduces Table 1 and Figures 2 and 3 of Halite (sections 8.1.1 and 8.1.2).
//!
//! **What varies**: the block organization of the same checkpoint in its file, and the restore
//! mode. `random`, `physical` and `locality` read one locality block of 64 KiB per fault; `lazy` is
//! the ESXi baseline: one page of 4 KiB per fault, from an image in physical order. None is
//! compressed, as in the paper, so that a read of 64 KiB brings 16 pages.
//!
//! **What is held equal**: the checkpoint (`firn image reorder` derives the organizations from each
//! other), the guest, its work, the disk (`hdd15k`, image cold), background fill.
//!
//! **What is measured**: `overhead_s`: how much longer the workload runs, by its own clock, than in
//! a guest restored with all its memory beforehand from a warm image (by `firn restore`).
//! `guest_time_percent`: the share of each second in which the vCPUs did not wait for pages (a
//! second, recorded restore). `disk_reads` and `prefetched_used`: reads that the guest waited for,
//! and the share of the other pages in these reads that were used later (a third restore, without
//! background fill, which would read some of these pages before the guest requests them: their
//! number depends on the speed of the disk and not on the organization).

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::time::Instant;

use anyhow::{Context as _, Result};
use firn_image::{Image, Organization, Reorder, reorder};
use firn_restore::{Fill, Mode, RunCounts, RunRecord};
use firn_types::BlockSize;
use serde_json::{Value, json};

use super::synthetic::{Done, Scale, Synthetic, VM};
use crate::disk_profile::{DiskProfile, Throttle, make_cold, warm};
use crate::firn::SaveArgs;
use crate::guest_time::percent_per_second;
use crate::lab::{Lab, interleaved};
use crate::recorder::{Recorded, Recording};
use crate::report::{Figure, Report};
use crate::stats::Sample;
use firn_report::plot::{BarPlot, LinePlot};

const QUICK: Scale = Scale { mib: 256, working_set_mib: 64, before: 4000, after: 8000 };
const FULL: Scale = Scale { mib: 1024, working_set_mib: 256, before: 12_500, after: 15_000 };
const PROFILE: DiskProfile = DiskProfile::Hdd15k;
/// Maximum number of seconds in Figure 3.
const SECONDS_MAX: usize = 300;

/// A block organization and a restore mode.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct System {
    name: &'static str,
    mode: Mode,
}

const LAZY: System = System { name: "lazy", mode: Mode::Lazy };
const RANDOM: System = System { name: "random", mode: Mode::Locality };
const PHYSICAL: System = System { name: "physical", mode: Mode::Locality };
const LOCALITY: System = System { name: "locality", mode: Mode::Locality };
const SYSTEMS: [System; 4] = [LAZY, RANDOM, PHYSICAL, LOCALITY];

impl System {
    fn image(self, lab: &Lab) -> PathBuf {
        lab.file(&format!("{}.firn", self.name))
    }

    fn prefetches(self) -> bool {
        self != LAZY
    }
}

/// Runs the experiment.
pub fn run(lab: &Lab) -> Result<Report> {
    let mut report = lab.vm_report("halite-organization");
    let Some(throttle) = lab.disk(PROFILE, &mut report) else {
        missing(&mut report);
        return Ok(report);
    };
    let guest = Synthetic::new(lab, lab.extent.pick(QUICK, FULL))?;
    let work = guest.boot()?;
    guest.start(work, 50)?;
    let how = SaveArgs::default().with("--codec", "none").with("--block-pages", "2");
    let said = guest.checkpoint(&LOCALITY.image(lab), &how)?;
    guest.wait()?;
    guest.stop();
    report.repetition(json!({ "system": "save", "facts": said.facts }));
    arrange(lab)?;
    let mut bench = Bench { guest, throttle, report, guest_time: Vec::new() };
    interleaved(lab.extent.runs(1, 3), &SYSTEMS, |round, system| bench.round(round, *system))?;
    bench.finish()
}

fn missing(report: &mut Report) {
    for system in SYSTEMS {
        for key in ["disk_reads", "overhead_s", "guest_time_percent"] {
            report.missing(format!("{key}.{}", system.name), "needs a disk that can be throttled");
        }
        if system.prefetches() {
            let key = format!("prefetched_used.{}", system.name);
            report.missing(key, "needs a disk that can be throttled");
        }
    }
}

/// Derives the other images from the checkpoint.
fn arrange(lab: &Lab) -> Result<()> {
    let source = LOCALITY.image(lab);
    for system in [RANDOM, PHYSICAL] {
        let (by, out) = (OsStr::new(system.name), system.image(lab));
        let words = [source.as_os_str(), "--by".as_ref(), by, "-o".as_ref(), out.as_os_str()];
        lab.firn().image("reorder", &words)?;
    }
    let single =
        Reorder { block_size: Some(BlockSize::new(1)?), ..Reorder::by(Organization::Physical) };
    reorder(&Image::open(&source)?, &single, &LAZY.image(lab), &|_, _| ())?;
    lab.say("the checkpoint exists in every organization");
    Ok(())
}

struct Bench<'a> {
    guest: Synthetic<'a>,
    throttle: Throttle,
    report: Report,
    /// The data of Figure 3, from the first round.
    guest_time: Vec<(System, Vec<f64>)>,
}

impl Bench<'_> {
    /// One round of a system: its baseline, a timed restore, a recorded one, a counted one.
    fn round(&mut self, round: usize, system: System) -> Result<()> {
        let (baseline, _) = self.baseline()?;
        let (done, start_s) = self.timed(system)?;
        let overhead_s = done.seconds - baseline.seconds;
        if round == 0 {
            self.record_guest_time(system)?;
        }
        let counts = self.counted(system)?;
        let reads = counts.demand_reads;
        self.guest.lab.say(&format!("{}: {overhead_s:.1} s longer, {reads} reads", system.name));
        let used = counts.prefetched_used().filter(|_| system.prefetches());
        self.report.repetition(json!({
            "system": system.name, "round": round, "overhead_s": overhead_s, "start_s": start_s,
            "baseline_s": baseline.seconds, "run_s": done.seconds,
            "disk_reads": reads, "prefetched_used": used, "counts": counts,
        }));
        Ok(())
    }

    /// Restores all memory before the guest runs, from a warm image.
    fn baseline(&self) -> Result<(Done, f64)> {
        let none = Throttle::new(DiskProfile::None, self.guest.lab.dir())?;
        let image = LOCALITY.image(self.guest.lab);
        warm(&image)?;
        self.restore(&image, Mode::Eager, &none)
    }

    fn timed(&self, system: System) -> Result<(Done, f64)> {
        let image = system.image(self.guest.lab);
        make_cold([image.as_path()])?;
        self.restore(&image, system.mode, &self.throttle)
    }

    /// Restores with `firn` and waits for the workload. Also returns how long the command took.
    fn restore(&self, image: &Path, mode: Mode, throttle: &Throttle) -> Result<(Done, f64)> {
        let how = ["--mode", &mode.to_string()];
        let said = self.guest.lab.firn().restore(image, VM, &how, throttle)?;
        let done = self.guest.wait();
        self.guest.stop();
        Ok((done?, said.took.as_secs_f64()))
    }

    fn record_guest_time(&mut self, system: System) -> Result<()> {
        let start = Instant::now();
        let record = self.recorded(system, Fill::Quiet, false, &self.throttle)?;
        let took = start.elapsed().as_secs_f64();
        let waits: Vec<f64> = record.reads.iter().map(|read| f64::from(read.us)).collect();
        let read_p50_us = Sample::new(waits).map(|waits| waits.p50());
        self.report.repetition(json!({ "recorded": system.name, "seconds": took,
            "counts": record.counts, "read_p50_us": read_p50_us }));
        let seconds = (took.ceil() as usize).clamp(1, SECONDS_MAX);
        self.guest_time.push((system, percent_per_second(&record, seconds)));
        Ok(())
    }

    /// Restores unthrottled and counts reads: counts do not depend on the speed of the disk.
    fn counted(&self, system: System) -> Result<RunCounts> {
        let none = Throttle::new(DiskProfile::None, self.guest.lab.dir())?;
        Ok(self.recorded(system, Fill::Off, system.prefetches(), &none)?.counts)
    }

    fn recorded(
        &self,
        system: System,
        fill: Fill,
        account_use: bool,
        throttle: &Throttle,
    ) -> Result<RunRecord> {
        let lab = self.guest.lab;
        let (image, mode, dir) = (system.image(lab), system.mode, lab.dir().to_owned());
        make_cold([image.as_path()])?;
        let what = Recorded { image, mode, account_use, fill, dir };
        let recording = Recording::start(&std::env::current_exe()?, &what, throttle)?;
        self.guest.wait()?;
        recording.finish()
    }

    fn finish(mut self) -> Result<Report> {
        for system in SYSTEMS {
            self.sample("disk_reads", system);
            self.sample("overhead_s", system);
            if system.prefetches() {
                self.sample("prefetched_used", system);
            }
        }
        for (system, percent) in &self.guest_time {
            let key = format!("guest_time_percent.{}", system.name);
            self.report.figure(key, Figure::Series(percent.clone()));
        }
        self.ratios();
        let (two, three) = (self.figure_2()?, self.figure_3()?);
        self.report.drawing("halite-figure-2", two);
        self.report.drawing("halite-figure-3", three);
        Ok(self.report)
    }

    fn sample(&mut self, key: &str, system: System) {
        let is_it = |run: &&Value| run["system"] == system.name;
        let runs = self.report.repetitions().iter().filter(is_it);
        let values: Vec<f64> = runs.filter_map(|run| run[key].as_f64()).collect();
        self.report.sample(format!("{key}.{}", system.name), values);
    }

    fn value(&self, key: &str, system: System) -> f64 {
        self.report.value(&format!("{key}.{}", system.name)).unwrap_or(f64::NAN)
    }

    fn ratios(&mut self) {
        for key in ["disk_reads", "overhead_s"] {
            for other in [PHYSICAL, LAZY] {
                let ratio = self.value(key, LOCALITY) / self.value(key, other);
                self.report.number(format!("{key}.locality_to_{}", other.name), ratio);
            }
        }
    }

    fn figure_2(&self) -> Result<String> {
        let overhead = SYSTEMS.map(|system| self.value("overhead_s", system));
        let plot = BarPlot {
            title: "Restore overhead by block organization (Halite, Figure 2)".into(),
            y: "seconds longer than with all memory present".into(),
            groups: SYSTEMS.map(|system| system.name.to_owned()).into(),
            series: vec![(PROFILE.to_string(), overhead.into())],
        };
        plot.svg().context("Figure 2")
    }

    fn figure_3(&self) -> Result<String> {
        let line = |(system, percent): &(System, Vec<f64>)| {
            let points = percent.iter().enumerate();
            let points = points.map(|(second, percent)| (second as f64 + 0.5, *percent));
            (system.name.to_owned(), points.collect())
        };
        let plot = LinePlot {
            title: "Time the guest could run during restore (Halite, Figure 3)".into(),
            x: "seconds since the guest ran".into(),
            y: "% of each second".into(),
            lines: self.guest_time.iter().map(line).collect(),
        };
        plot.svg().context("Figure 3")
    }
}
