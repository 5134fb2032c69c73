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
use firn_image::{BlockOrganization, Image, ReorderOptions, reorder_image};
use firn_restore::{BackgroundFill, RestoreMode, RunCounts, RunRecord};
use firn_types::BlockSize;
use serde_json::{Value, json};

use super::synthetic::{SyntheticGuest, SyntheticResult, SyntheticScale, VM};
use crate::disk_profile::{DiskProfile, DiskThrottle, make_cold, warm_file};
use crate::firn::SaveArgs;
use crate::guest_time::percent_per_second;
use crate::lab::{Lab, run_interleaved};
use crate::recorder::{RecordedRestoreRequest, RestoreRecording};
use crate::report::{Figure, Report};
use crate::stats::Sample;
use firn_report::plot::{BarPlot, LinePlot};

const QUICK: SyntheticScale =
    SyntheticScale { mib: 256, working_set_mib: 64, before: 4000, after: 8000 };
const FULL: SyntheticScale =
    SyntheticScale { mib: 1024, working_set_mib: 256, before: 12_500, after: 15_000 };
const PROFILE: DiskProfile = DiskProfile::Hdd15k;
/// Maximum number of seconds in Figure 3.
const SECONDS_MAX: usize = 300;

/// A block organization and a restore mode.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct OrganizationSystem {
    name: &'static str,
    mode: RestoreMode,
}

const LAZY: OrganizationSystem = OrganizationSystem { name: "lazy", mode: RestoreMode::Lazy };
const RANDOM: OrganizationSystem =
    OrganizationSystem { name: "random", mode: RestoreMode::Locality };
const PHYSICAL: OrganizationSystem =
    OrganizationSystem { name: "physical", mode: RestoreMode::Locality };
const LOCALITY: OrganizationSystem =
    OrganizationSystem { name: "locality", mode: RestoreMode::Locality };
const SYSTEMS: [OrganizationSystem; 4] = [LAZY, RANDOM, PHYSICAL, LOCALITY];

impl OrganizationSystem {
    fn image_file(self, lab: &Lab) -> PathBuf {
        lab.file(&format!("{}.firn", self.name))
    }

    fn has_prefetch(self) -> bool {
        self != LAZY
    }
}

/// Runs the experiment.
pub fn run(lab: &Lab) -> Result<Report> {
    let mut report = lab.vm_report("halite-organization");
    let Some(throttle) = lab.throttle_disk(PROFILE, &mut report) else {
        add_missing_figures(&mut report);
        return Ok(report);
    };
    let guest = SyntheticGuest::new(lab, lab.extent.pick(QUICK, FULL))?;
    let work = guest.boot_and_calibrate()?;
    guest.start_workload(work, 50)?;
    let how = SaveArgs::default().with_option("--codec", "none").with_option("--block-pages", "2");
    let save_output = guest.checkpoint(&LOCALITY.image_file(lab), &how)?;
    guest.wait_for_result()?;
    guest.stop();
    report.add_repetition(json!({ "system": "save", "facts": save_output.facts }));
    reorder_images(lab)?;
    let mut bench = OrganizationBench { guest, throttle, report, guest_time: Vec::new() };
    run_interleaved(lab.extent.runs(1, 3), &SYSTEMS, |round, system| {
        bench.run_round(round, *system)
    })?;
    bench.into_report()
}

fn add_missing_figures(report: &mut Report) {
    for system in SYSTEMS {
        for key in ["disk_reads", "overhead_s", "guest_time_percent"] {
            report.add_missing(
                format!("{key}.{}", system.name),
                "needs a disk that can be throttled",
            );
        }
        if system.has_prefetch() {
            let key = format!("prefetched_used.{}", system.name);
            report.add_missing(key, "needs a disk that can be throttled");
        }
    }
}

/// Derives the other images from the checkpoint.
fn reorder_images(lab: &Lab) -> Result<()> {
    let source = LOCALITY.image_file(lab);
    for system in [RANDOM, PHYSICAL] {
        let (by, out) = (OsStr::new(system.name), system.image_file(lab));
        let words = [source.as_os_str(), "--by".as_ref(), by, "-o".as_ref(), out.as_os_str()];
        lab.firn().run_image_verb("reorder", &words)?;
    }
    let single = ReorderOptions {
        block_size: Some(BlockSize::new(1)?),
        ..ReorderOptions::for_organization(BlockOrganization::Physical)
    };
    reorder_image(&Image::open(&source)?, &single, &LAZY.image_file(lab), &|_, _| ())?;
    lab.log_progress("the checkpoint exists in every organization");
    Ok(())
}

struct OrganizationBench<'a> {
    guest: SyntheticGuest<'a>,
    throttle: DiskThrottle,
    report: Report,
    /// The data of Figure 3, from the first round.
    guest_time: Vec<(OrganizationSystem, Vec<f64>)>,
}

impl OrganizationBench<'_> {
    /// One round of a system: its baseline, a timed restore, a recorded one, a counted one.
    fn run_round(&mut self, round: usize, system: OrganizationSystem) -> Result<()> {
        let (baseline, _) = self.restore_baseline()?;
        let (done, start_s) = self.restore_timed(system)?;
        let overhead_s = done.seconds - baseline.seconds;
        if round == 0 {
            self.record_guest_time(system)?;
        }
        let counts = self.restore_counted(system)?;
        let reads = counts.demand_reads;
        self.guest
            .lab
            .log_progress(&format!("{}: {overhead_s:.1} s longer, {reads} reads", system.name));
        let used = counts.prefetched_used().filter(|_| system.has_prefetch());
        self.report.add_repetition(json!({
            "system": system.name, "round": round, "overhead_s": overhead_s, "start_s": start_s,
            "baseline_s": baseline.seconds, "run_s": done.seconds,
            "disk_reads": reads, "prefetched_used": used, "counts": counts,
        }));
        Ok(())
    }

    /// Restores all memory before the guest runs, from a warm image.
    fn restore_baseline(&self) -> Result<(SyntheticResult, f64)> {
        let none = DiskThrottle::new(DiskProfile::None, self.guest.lab.dir())?;
        let image = LOCALITY.image_file(self.guest.lab);
        warm_file(&image)?;
        self.restore_and_wait(&image, RestoreMode::Eager, &none)
    }

    fn restore_timed(&self, system: OrganizationSystem) -> Result<(SyntheticResult, f64)> {
        let image = system.image_file(self.guest.lab);
        make_cold([image.as_path()])?;
        self.restore_and_wait(&image, system.mode, &self.throttle)
    }

    /// Restores with `firn` and waits for the workload. Also returns how long the command took.
    fn restore_and_wait(
        &self,
        image: &Path,
        mode: RestoreMode,
        throttle: &DiskThrottle,
    ) -> Result<(SyntheticResult, f64)> {
        let how = ["--mode", &mode.to_string()];
        let restore_output = self.guest.lab.firn().restore(image, VM, &how, throttle)?;
        let done = self.guest.wait_for_result();
        self.guest.stop();
        Ok((done?, restore_output.took.as_secs_f64()))
    }

    fn record_guest_time(&mut self, system: OrganizationSystem) -> Result<()> {
        let start = Instant::now();
        let record =
            self.restore_recorded(system, BackgroundFill::AtOnce, false, &self.throttle)?;
        let took = start.elapsed().as_secs_f64();
        let waits: Vec<f64> = record.reads.iter().map(|read| read.us as f64).collect();
        let read_p50_us = Sample::new(waits).map(|waits| waits.p50());
        self.report.add_repetition(json!({ "recorded": system.name, "seconds": took,
            "counts": record.counts, "read_p50_us": read_p50_us }));
        let seconds = (took.ceil() as usize).clamp(1, SECONDS_MAX);
        self.guest_time.push((system, percent_per_second(&record, seconds)));
        Ok(())
    }

    /// Restores unthrottled and counts reads: counts do not depend on the speed of the disk.
    fn restore_counted(&self, system: OrganizationSystem) -> Result<RunCounts> {
        let none = DiskThrottle::new(DiskProfile::None, self.guest.lab.dir())?;
        Ok(self.restore_recorded(system, BackgroundFill::Off, system.has_prefetch(), &none)?.counts)
    }

    fn restore_recorded(
        &self,
        system: OrganizationSystem,
        fill: BackgroundFill,
        account_use: bool,
        throttle: &DiskThrottle,
    ) -> Result<RunRecord> {
        let lab = self.guest.lab;
        let (image, mode, dir) = (system.image_file(lab), system.mode, lab.dir().to_owned());
        make_cold([image.as_path()])?;
        let what = RecordedRestoreRequest { image, mode, account_use, fill, dir };
        let recording =
            RestoreRecording::start_restore(&std::env::current_exe()?, &what, throttle)?;
        self.guest.wait_for_result()?;
        recording.finish_restore()
    }

    fn into_report(mut self) -> Result<Report> {
        for system in SYSTEMS {
            self.add_sample("disk_reads", system);
            self.add_sample("overhead_s", system);
            if system.has_prefetch() {
                self.add_sample("prefetched_used", system);
            }
        }
        for (system, percent) in &self.guest_time {
            let key = format!("guest_time_percent.{}", system.name);
            self.report.add_figure(key, Figure::Series(percent.clone()));
        }
        self.add_ratios();
        let (two, three) = (self.figure_2()?, self.figure_3()?);
        self.report.add_drawing("halite-figure-2", two);
        self.report.add_drawing("halite-figure-3", three);
        Ok(self.report)
    }

    fn add_sample(&mut self, key: &str, system: OrganizationSystem) {
        let is_it = |run: &&Value| run["system"] == system.name;
        let runs = self.report.repetitions().iter().filter(is_it);
        let values: Vec<f64> = runs.filter_map(|run| run[key].as_f64()).collect();
        self.report.add_sample(format!("{key}.{}", system.name), values);
    }

    fn figure_value(&self, key: &str, system: OrganizationSystem) -> f64 {
        self.report.figure_value(&format!("{key}.{}", system.name)).unwrap_or(f64::NAN)
    }

    fn add_ratios(&mut self) {
        for key in ["disk_reads", "overhead_s"] {
            for other in [PHYSICAL, LAZY] {
                let ratio = self.figure_value(key, LOCALITY) / self.figure_value(key, other);
                self.report.add_number(format!("{key}.locality_to_{}", other.name), ratio);
            }
        }
    }

    fn figure_2(&self) -> Result<String> {
        let overhead = SYSTEMS.map(|system| self.figure_value("overhead_s", system));
        let plot = BarPlot {
            title: "Restore overhead by block organization (Halite, Figure 2)".into(),
            y: "seconds longer than with all memory present".into(),
            groups: SYSTEMS.map(|system| system.name.to_owned()).into(),
            series: vec![(PROFILE.to_string(), overhead.into())],
        };
        plot.to_svg().context("Figure 2")
    }

    fn figure_3(&self) -> Result<String> {
        let line = |(system, percent): &(OrganizationSystem, Vec<f64>)| {
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
        plot.to_svg().context("Figure 3")
    }
}
