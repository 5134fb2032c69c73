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
use firn_restore::Mode;
use serde_json::{Value, json};

use super::synthetic::{Done, Scale, Synthetic, VM};
use crate::disk_profile::{DiskProfile, Throttle, make_cold, warm};
use crate::firn::SaveArgs;
use crate::lab::Lab;
use crate::report::Report;
use firn_report::plot::LinePlot;

const QUICK: Scale = Scale { mib: 256, working_set_mib: 64, before: 4000, after: 8000 };
const FULL: Scale = Scale { mib: 1024, working_set_mib: 256, before: 12_500, after: 15_000 };
const PROFILE: DiskProfile = DiskProfile::Hdd15k;
const MIB: f64 = 1_048_576.0;
/// Percent of its size that memory compresses to.
const COMPRESSES_TO: [u8; 5] = [10, 30, 50, 70, 90];

/// With compression, or without.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct System(Codec);

const PLAIN: System = System(Codec::None);
const PACKED: System = System(Codec::Lz4);
const SYSTEMS: [System; 2] = [PLAIN, PACKED];

impl System {
    fn name(self) -> String {
        self.0.to_string()
    }

    fn key(self, figure: &str, compresses_to: u8) -> String {
        format!("{figure}.{}.{compresses_to}", self.0)
    }

    fn image(self, lab: &Lab) -> PathBuf {
        lab.file(&format!("{}.firn", self.0))
    }
}

/// Runs the experiment.
pub fn run(lab: &Lab) -> Result<Report> {
    let mut report = lab.vm_report("halite-compression");
    let Some(throttle) = lab.disk(PROFILE, &mut report) else {
        missing(&mut report);
        return Ok(report);
    };
    let guest = Synthetic::new(lab, lab.extent.pick(QUICK, FULL))?;
    let mut bench = Bench { guest, throttle, report };
    for compresses_to in COMPRESSES_TO {
        bench.point(compresses_to)?;
    }
    bench.finish()
}

fn missing(report: &mut Report) {
    for compresses_to in COMPRESSES_TO {
        for system in SYSTEMS {
            let key = system.key("overhead_s", compresses_to);
            report.missing(key, "needs a disk that can be throttled");
        }
    }
}

struct Bench<'a> {
    guest: Synthetic<'a>,
    throttle: Throttle,
    report: Report,
}

impl Bench<'_> {
    /// Measures one point of each line.
    fn point(&mut self, compresses_to: u8) -> Result<()> {
        self.save(compresses_to)?;
        let rounds = self.guest.lab.extent.runs(2, 3);
        for round in 0..rounds {
            let baseline = self.baseline()?;
            for system in SYSTEMS {
                self.turn(round, system, compresses_to, baseline)?;
            }
        }
        SYSTEMS.iter().for_each(|&system| self.figures(system, compresses_to));
        Ok(())
    }

    /// Boots a guest, checkpoints it in the middle of its work, and derives the compressed
    /// checkpoint from that one.
    fn save(&mut self, compresses_to: u8) -> Result<()> {
        let lab = self.guest.lab;
        let work = self.guest.boot()?;
        self.guest.start(work, compresses_to)?;
        let how = SaveArgs::default().with("--codec", PLAIN.name());
        self.guest.checkpoint(&PLAIN.image(lab), &how)?;
        self.guest.stop();
        let (from, to, codec) = (PLAIN.image(lab), PACKED.image(lab), PACKED.name());
        let words = ["--by", "locality", "--codec", &codec, "-o"].map(OsStr::new);
        lab.firn().image("reorder", &[&words[..], &[to.as_os_str(), from.as_os_str()]].concat())?;
        for system in SYSTEMS {
            let bytes = fs::metadata(system.image(lab))?.len();
            self.report.repetition(json!({ "image": system.name(), "compresses_to": compresses_to,
                "image_mib": bytes as f64 / MIB }));
        }
        Ok(())
    }

    /// Measures a timed restore of one system.
    fn turn(&mut self, round: usize, system: System, percent: u8, baseline: Done) -> Result<()> {
        let image = system.image(self.guest.lab);
        make_cold([image.as_path()])?;
        let done = self.restore(&image, Mode::Locality, &self.throttle)?;
        let overhead_s = done.seconds - baseline.seconds;
        self.guest.lab.say(&format!("{}, {percent} %: {overhead_s:.1} s longer", system.name()));
        self.report.repetition(json!({ "system": system.name(), "compresses_to": percent,
            "round": round, "overhead_s": overhead_s, "baseline_s": baseline.seconds,
            "run_s": done.seconds }));
        Ok(())
    }

    /// Restores all memory before the guest runs, from a warm image.
    fn baseline(&self) -> Result<Done> {
        let none = Throttle::new(DiskProfile::None, self.guest.lab.dir())?;
        let image = PLAIN.image(self.guest.lab);
        warm(&image)?;
        self.restore(&image, Mode::Eager, &none)
    }

    fn restore(&self, image: &Path, mode: Mode, throttle: &Throttle) -> Result<Done> {
        let how = ["--mode", &mode.to_string()];
        self.guest.lab.firn().restore(image, VM, &how, throttle)?;
        let done = self.guest.wait();
        self.guest.stop();
        done
    }

    fn figures(&mut self, system: System, compresses_to: u8) {
        for (figure, by) in [("overhead_s", "system"), ("image_mib", "image")] {
            let is_it =
                |run: &&Value| run[by] == system.name() && run["compresses_to"] == compresses_to;
            let runs = self.report.repetitions().iter().filter(is_it);
            let values: Vec<f64> = runs.filter_map(|run| run[figure].as_f64()).collect();
            self.report.sample(system.key(figure, compresses_to), values);
        }
    }

    fn finish(mut self) -> Result<Report> {
        for percent in COMPRESSES_TO {
            let share = self.overhead(PACKED, percent) / self.overhead(PLAIN, percent);
            self.report.number(format!("improvement_percent.{percent}"), 100.0 * (1.0 - share));
        }
        let figure = self.figure_4()?;
        self.report.drawing("halite-figure-4", figure);
        Ok(self.report)
    }

    fn overhead(&self, system: System, compresses_to: u8) -> f64 {
        self.report.value(&system.key("overhead_s", compresses_to)).unwrap_or(f64::NAN)
    }

    fn figure_4(&self) -> Result<String> {
        let line = |system: System| {
            let point = |percent: u8| (f64::from(percent), self.overhead(system, percent).max(0.0));
            (system.0.to_string(), COMPRESSES_TO.map(point).into())
        };
        let plot = LinePlot {
            title: "Restore overhead with and without compression (Halite, Figure 4)".into(),
            x: "% of its size that memory compresses to".into(),
            y: "seconds longer than with all memory present".into(),
            lines: SYSTEMS.map(line).into(),
        };
        plot.svg().context("Figure 4")
    }
}
