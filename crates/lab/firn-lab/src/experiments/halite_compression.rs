//! `halite-compression`: the gain of compressing memory blocks.
//!
//! Reproduces Figure 4 of Halite (section 8.1.3).
//!
//! **What varies**: to how many percent of its size the guest's memory compresses, and whether the
//! checkpoint is compressed: by the default codec (`lz4`; the paper used zlib), or not at all
//! (`none`).
//!
//! **What is held equal**: the checkpoint (one for each such memory; `firn image reorder`
//! compresses it, and changes nothing else), the guest, its work, block organization and mode
//! (`locality`), the disk (`hdd15k`, image cold), background fill.
//!
//! **What is measured**: `overhead_s`, as in `halite-organization`: how much longer the workload
//! runs, by its own clock, than in a guest restored with all its memory beforehand from a warm
//! image. `image_mib` is the size of the checkpoint.

use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result};
use firn_image::Codec;
use firn_restore::RestoreMode;
use serde_json::{Value, json};

use super::synthetic::{SyntheticGuest, SyntheticResult, SyntheticScale, VM};
use crate::disk_profile::{DiskProfile, DiskThrottle, make_cold, warm_file};
use crate::firn::SaveArgs;
use crate::lab::Lab;
use crate::report::Report;
use firn_report::plot::LinePlot;

const QUICK: SyntheticScale =
    SyntheticScale { mib: 256, working_set_mib: 64, before: 4000, after: 8000 };
const FULL: SyntheticScale =
    SyntheticScale { mib: 1024, working_set_mib: 256, before: 12_500, after: 15_000 };
const PROFILE: DiskProfile = DiskProfile::Hdd15k;
const MIB: f64 = 1_048_576.0;
/// Percent of its size that memory compresses to.
const COMPRESSES_TO: [u8; 5] = [10, 30, 50, 70, 90];

/// With compression, or without.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct CompressionSystem(Codec);

const PLAIN: CompressionSystem = CompressionSystem(Codec::None);
const PACKED: CompressionSystem = CompressionSystem(Codec::Lz4);
const SYSTEMS: [CompressionSystem; 2] = [PLAIN, PACKED];

impl CompressionSystem {
    fn name(self) -> String {
        self.0.to_string()
    }

    fn figure_key(self, figure: &str, compresses_to: u8) -> String {
        format!("{figure}.{}.{compresses_to}", self.0)
    }

    fn image_file(self, lab: &Lab) -> PathBuf {
        lab.file(&format!("{}.firn", self.0))
    }
}

/// Runs the experiment.
pub fn run(lab: &Lab) -> Result<Report> {
    let mut report = lab.vm_report("halite-compression");
    let Some(throttle) = lab.throttle_disk(PROFILE, &mut report) else {
        add_missing_figures(&mut report);
        return Ok(report);
    };
    let guest = SyntheticGuest::new(lab, lab.extent.pick(QUICK, FULL))?;
    let mut bench = CompressionBench { guest, throttle, report };
    for compresses_to in COMPRESSES_TO {
        bench.measure_point(compresses_to)?;
    }
    bench.into_report()
}

fn add_missing_figures(report: &mut Report) {
    for compresses_to in COMPRESSES_TO {
        for system in SYSTEMS {
            let key = system.figure_key("overhead_s", compresses_to);
            report.add_missing(key, "needs a disk that can be throttled");
        }
    }
}

struct CompressionBench<'a> {
    guest: SyntheticGuest<'a>,
    throttle: DiskThrottle,
    report: Report,
}

impl CompressionBench<'_> {
    /// Measures one point of each line.
    fn measure_point(&mut self, compresses_to: u8) -> Result<()> {
        self.save_both(compresses_to)?;
        let rounds = self.guest.lab.extent.runs(2, 3);
        for round in 0..rounds {
            let baseline = self.restore_baseline()?;
            for system in SYSTEMS {
                self.measure_system(round, system, compresses_to, baseline)?;
            }
        }
        SYSTEMS.iter().for_each(|&system| self.add_numbers(system, compresses_to));
        Ok(())
    }

    /// Boots a guest, checkpoints it in the middle of its work, and derives the compressed
    /// checkpoint from that one.
    fn save_both(&mut self, compresses_to: u8) -> Result<()> {
        let lab = self.guest.lab;
        let work = self.guest.boot_and_calibrate()?;
        self.guest.start_workload(work, compresses_to)?;
        let how = SaveArgs::default().with_option("--codec", PLAIN.name());
        self.guest.checkpoint(&PLAIN.image_file(lab), &how)?;
        self.guest.stop();
        let (from, to, codec) = (PLAIN.image_file(lab), PACKED.image_file(lab), PACKED.name());
        let words = ["--by", "locality", "--codec", &codec, "-o"].map(OsStr::new);
        lab.firn().run_image_verb(
            "reorder",
            &[&words[..], &[to.as_os_str(), from.as_os_str()]].concat(),
        )?;
        for system in SYSTEMS {
            let bytes = fs::metadata(system.image_file(lab))?.len();
            self.report
                .add_repetition(json!({ "image": system.name(), "compresses_to": compresses_to,
                "image_mib": bytes as f64 / MIB }));
        }
        Ok(())
    }

    /// Measures a timed restore of one system.
    fn measure_system(
        &mut self,
        round: usize,
        system: CompressionSystem,
        percent: u8,
        baseline: SyntheticResult,
    ) -> Result<()> {
        let image = system.image_file(self.guest.lab);
        make_cold([image.as_path()])?;
        let done = self.restore_and_wait(&image, RestoreMode::Locality, &self.throttle)?;
        let overhead_s = done.seconds - baseline.seconds;
        self.guest
            .lab
            .log_progress(&format!("{}, {percent} %: {overhead_s:.1} s longer", system.name()));
        self.report.add_repetition(json!({ "system": system.name(), "compresses_to": percent,
            "round": round, "overhead_s": overhead_s, "baseline_s": baseline.seconds,
            "run_s": done.seconds }));
        Ok(())
    }

    /// Restores all memory before the guest runs, from a warm image.
    fn restore_baseline(&self) -> Result<SyntheticResult> {
        let none = DiskThrottle::new(DiskProfile::None, self.guest.lab.dir())?;
        let image = PLAIN.image_file(self.guest.lab);
        warm_file(&image)?;
        self.restore_and_wait(&image, RestoreMode::Eager, &none)
    }

    fn restore_and_wait(
        &self,
        image: &Path,
        mode: RestoreMode,
        throttle: &DiskThrottle,
    ) -> Result<SyntheticResult> {
        let how = ["--mode", &mode.to_string()];
        self.guest.lab.firn().restore(image, VM, &how, throttle)?;
        let done = self.guest.wait_for_result();
        self.guest.stop();
        done
    }

    fn add_numbers(&mut self, system: CompressionSystem, compresses_to: u8) {
        for (figure, by) in [("overhead_s", "system"), ("image_mib", "image")] {
            let is_it =
                |run: &&Value| run[by] == system.name() && run["compresses_to"] == compresses_to;
            let runs = self.report.repetitions().iter().filter(is_it);
            let values: Vec<f64> = runs.filter_map(|run| run[figure].as_f64()).collect();
            self.report.add_sample(system.figure_key(figure, compresses_to), values);
        }
    }

    fn into_report(mut self) -> Result<Report> {
        for percent in COMPRESSES_TO {
            let share = self.overhead_s(PACKED, percent) / self.overhead_s(PLAIN, percent);
            self.report.add_number(format!("improvement_percent.{percent}"), 100.0 * (1.0 - share));
        }
        let figure = self.figure_4()?;
        self.report.add_drawing("halite-figure-4", figure);
        Ok(self.report)
    }

    fn overhead_s(&self, system: CompressionSystem, compresses_to: u8) -> f64 {
        self.report
            .figure_value(&system.figure_key("overhead_s", compresses_to))
            .unwrap_or(f64::NAN)
    }

    fn figure_4(&self) -> Result<String> {
        let line = |system: CompressionSystem| {
            let point =
                |percent: u8| (f64::from(percent), self.overhead_s(system, percent).max(0.0));
            (system.0.to_string(), COMPRESSES_TO.map(point).into())
        };
        let plot = LinePlot {
            title: "Restore overhead with and without compression (Halite, Figure 4)".into(),
            x: "% of its size that memory compresses to".into(),
            y: "seconds longer than with all memory present".into(),
            lines: SYSTEMS.map(line).into(),
        };
        plot.to_svg().context("Figure 4")
    }
}
