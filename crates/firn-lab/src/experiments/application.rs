//! An application of the full guest: checkpointed during its work, and restored in several modes.
//! The common part of `halite-pgbench` and `halite-desktop`.
//!
//! The work is a shell script in the guest. It prepares, prints `middle` when it can be
//! checkpointed, then has a fixed amount of work left, and ends by printing the guest's clock,
//! which stops from the checkpoint until the restored guest runs. The *overhead* is how much later
//! that is than in a guest that was restored with all its memory beforehand, from a warm image on a
//! disk that is not throttled: the time for which the guest had to wait.
//!
//! ```text
//!   boot, prepare | works | works on                                  | done: clock
//!                     middle: checkpoint; every restore continues here
//! ```
//!
//! **What varies**: the arrangement of the same checkpoint in its file, and the mode of reading it,
//! in the paper's four combinations. `lazy` is the ESXi baseline: one page of 4 KiB per fault, in
//! physical order, not compressed. `physical` reads a block of 64 KiB per fault instead, still in
//! physical order and not compressed; `locality_uncompressed` the same in locality order.
//! `locality` is Firn's default: in locality order, compressed.
//!
//! **What is equal**: the checkpoint, the guest, its work, the disk (image cold), background fill.
//! The guest only reads its own disk, and what the work reads of it is in the guest's page cache by
//! the time of the checkpoint; QEMU and the guest's kernel are warm.

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use firn_image::{Codec, Image, Organization, Reorder, reorder};
use firn_restore::Mode;
use firn_types::BlockSize;
use serde_json::{Value, json};

use crate::disk_profile::{DiskProfile, Throttle, make_cold, warm};
use crate::firn::SaveArgs;
use crate::guest::{Control, GuestImage, QemuArgs, accel};
use crate::lab::{Lab, interleaved};
use crate::report::Report;
use firn_report::plot::BarPlot;

const PROFILE: DiskProfile = DiskProfile::Hdd15k;
/// The name of the VM under Firn.
const VM: &str = "application";
/// The name of the work in the guest.
const JOB: &str = "work";
/// The maximum time that a guest may take to boot.
const BOOT: Duration = Duration::from_secs(180);
/// The maximum time of the work, before its middle or after a restore.
const LIMIT: Duration = Duration::from_secs(1800);

/// The application to run.
#[derive(Clone, Debug)]
pub(super) struct Application {
    /// The experiment's name.
    pub(super) name: &'static str,
    /// Guest memory.
    pub(super) memory_mib: u32,
    /// The services that the guest starts: `postgres`, `nginx`, both with a comma.
    pub(super) services: &'static str,
    /// A bash script that prints `middle` when it can be checkpointed, and `done` with the guest's
    /// clock at its end.
    pub(super) script: String,
    /// Rounds of a quick run: more if they are short.
    pub(super) quick_rounds: usize,
    /// The title of the figure.
    pub(super) figure: &'static str,
    /// The file name of the figure.
    pub(super) drawing: &'static str,
}

/// An arrangement of the image, and a mode of restoring it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum System {
    /// All memory is present before the guest runs.
    Baseline,
    Lazy,
    Physical,
    LocalityUncompressed,
    Locality,
}

/// The systems whose overhead is measured.
const COMPARED: [System; 4] =
    [System::Lazy, System::Physical, System::LocalityUncompressed, System::Locality];

impl System {
    const ALL: [Self; 5] =
        [Self::Baseline, Self::Lazy, Self::Physical, Self::LocalityUncompressed, Self::Locality];

    fn name(self) -> &'static str {
        match self {
            Self::Baseline => "baseline",
            Self::Lazy => "lazy",
            Self::Physical => "physical",
            Self::LocalityUncompressed => "locality_uncompressed",
            Self::Locality => "locality",
        }
    }

    fn mode(self) -> Mode {
        match self {
            Self::Baseline => Mode::Eager,
            Self::Lazy => Mode::Lazy,
            _ => Mode::Locality,
        }
    }

    /// The reordering that makes its image out of the checkpoint; `None` for the checkpoint itself.
    fn arrangement(self) -> Result<Option<Reorder>> {
        let plain = |by| Reorder { codec: Some(Codec::None), ..Reorder::by(by) };
        Ok(match self {
            Self::Baseline | Self::Locality => None,
            Self::Lazy => {
                let block_size = Some(BlockSize::new(1)?);
                Some(Reorder { block_size, ..plain(Organization::Physical) })
            }
            Self::Physical => Some(plain(Organization::Physical)),
            Self::LocalityUncompressed => Some(plain(Organization::Access)),
        })
    }

    fn image(self, lab: &Lab) -> PathBuf {
        let made = if self == Self::Baseline { Self::Locality } else { self };
        lab.file(&format!("{}.firn", made.name()))
    }
}

impl Application {
    /// Runs the experiment: a checkpoint, then rounds of restores.
    pub(super) fn run(&self, lab: &Lab) -> Result<Report> {
        let mut report = lab.vm_report(self.name);
        let Some(throttle) = lab.disk(PROFILE, &mut report) else {
            missing(&mut report);
            return Ok(report);
        };
        let agent = lab.file("agent");
        self.boot(lab, &agent)?;
        checkpoint(lab, &mut report)?;
        arrange(lab)?;
        let mut bench = Bench { lab, agent, throttle, report };
        let rounds = lab.extent.runs(self.quick_rounds, 3);
        interleaved(rounds, &System::ALL, |round, system| bench.round(round, *system))?;
        bench.figures();
        let drawing = bench.drawing(self.figure)?;
        bench.report.drawing(self.drawing, drawing);
        Ok(bench.report)
    }

    /// Boots the guest and waits until it is in the middle of its work.
    fn boot(&self, lab: &Lab, agent: &Path) -> Result<()> {
        let image = GuestImage::full()?;
        let args = QemuArgs::new(&image, accel::decide().accel)
            .memory_mib(self.memory_mib)
            .vcpus(2)
            .append(&format!("firn.services={}", self.services))
            .root_in_memory(&image)
            .console(&lab.file("console"))
            .agent(agent);
        lab.firn().run(VM, &args)?;
        let mut control = Control::connect(agent, BOOT)?;
        control.spawn(JOB, &["bash", "-c", &self.script])?;
        control.wait_output(JOB, "middle", LIMIT)?;
        lab.say("the guest is in the middle of its work");
        Ok(())
    }
}

fn missing(report: &mut Report) {
    for system in COMPARED {
        let key = format!("overhead.{}", system.name());
        report.missing(key, "needs a disk that can be throttled");
    }
}

fn checkpoint(lab: &Lab, report: &mut Report) -> Result<()> {
    let said = lab.firn().checkpoint(VM, &System::Locality.image(lab), &SaveArgs::default())?;
    lab.firn().stop(VM);
    lab.say(&format!("checkpointed in {:.1} s", said.took.as_secs_f64()));
    report.repetition(json!({ "system": "save", "facts": said.facts }));
    Ok(())
}

/// Makes the other images out of the checkpoint.
fn arrange(lab: &Lab) -> Result<()> {
    let source = Image::open(&System::Locality.image(lab))?;
    for system in COMPARED {
        if let Some(how) = system.arrangement()? {
            reorder(&source, &how, &system.image(lab), &|_, _| ())?;
        }
    }
    lab.say("images in all arrangements are ready");
    Ok(())
}

struct Bench<'a> {
    lab: &'a Lab,
    agent: PathBuf,
    throttle: Throttle,
    report: Report,
}

impl Bench<'_> {
    fn round(&mut self, round: usize, system: System) -> Result<()> {
        let image = system.image(self.lab);
        let (clock_s, restore_ms) = match system {
            System::Baseline => {
                warm(&image)?;
                let none = Throttle::new(DiskProfile::None, self.lab.dir())?;
                self.restore(&image, system.mode(), &none)?
            }
            _ => {
                make_cold([image.as_path()])?;
                self.restore(&image, system.mode(), &self.throttle)?
            }
        };
        self.lab.say(&format!("{}: done at {clock_s:.2} s", system.name()));
        self.report.repetition(json!({ "system": system.name(), "round": round,
            "clock_s": clock_s, "restore_ms": restore_ms }));
        Ok(())
    }

    /// Restores with `firn` and waits for the end of the work. Returns the guest's clock then, and
    /// the time of each step of the restore.
    fn restore(&self, image: &Path, mode: Mode, throttle: &Throttle) -> Result<(f64, Value)> {
        let firn = self.lab.firn();
        let said = firn.restore(image, VM, &["--mode", &mode.to_string()], throttle)?;
        let clock_s = self.wait();
        firn.stop(VM);
        Ok((clock_s?, said.facts["timings_ms"].clone()))
    }

    /// The guest's clock at the end of its work.
    fn wait(&self) -> Result<f64> {
        let ended = Control::connect(&self.agent, BOOT)?.wait(JOB, LIMIT)?;
        let said =
            || format!("the work ended with {}: {} {}", ended.exit, ended.stdout, ended.stderr);
        ensure!(ended.exit == 0, said());
        clock_of(&ended.stdout).with_context(said)
    }

    fn figures(&mut self) {
        let clocks = |system: System| clocks(&self.report, system);
        let baseline = clocks(System::Baseline);
        let overheads = COMPARED.map(|system| (system, clocks(system)));
        self.report.sample("baseline_clock_s", baseline);
        let base_s = self.report.value("baseline_clock_s").unwrap_or(f64::NAN);
        for (system, clocks) in overheads {
            let overheads = clocks.into_iter().map(|clock_s| clock_s - base_s);
            self.report.sample(format!("overhead.{}", system.name()), overheads);
        }
        for other in [System::Lazy, System::Physical] {
            let ratio = self.overhead(System::Locality) / self.overhead(other);
            self.report.number(format!("overhead.locality_to_{}", other.name()), ratio);
        }
    }

    fn overhead(&self, system: System) -> f64 {
        self.report.value(&format!("overhead.{}", system.name())).unwrap_or(f64::NAN)
    }

    fn drawing(&self, title: &str) -> Result<String> {
        let plot = BarPlot {
            title: title.to_owned(),
            y: "seconds longer than with all memory present".into(),
            groups: COMPARED.map(|system| system.name().to_owned()).into(),
            series: vec![(
                PROFILE.to_string(),
                COMPARED.map(|system| self.overhead(system)).into(),
            )],
        };
        plot.svg().context("the figure")
    }
}

fn clocks(report: &Report, system: System) -> Vec<f64> {
    let runs = report.repetitions().iter().filter(|run| run["system"] == system.name());
    runs.filter_map(|run| run["clock_s"].as_f64()).collect()
}

/// The number in the last line `done SECONDS`.
fn clock_of(said: &str) -> Option<f64> {
    said.lines().rev().find_map(|line| line.strip_prefix("done ")?.trim().parse().ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_clock_is_in_the_last_line() {
        assert_eq!(clock_of("middle\npages: 5\ndone 12.34\n"), Some(12.34));
        assert_eq!(clock_of("middle\n"), None);
        assert_eq!(clock_of("done soon\n"), None);
    }

    #[test]
    fn the_baseline_is_restored_from_the_checkpoint_itself() {
        let report = |system, clock_s| json!({ "system": system, "clock_s": clock_s });
        let mut all = Report::new("x", true);
        all.repetition(report("lazy", 9.0));
        all.repetition(report("baseline", 5.0));
        assert_eq!(clocks(&all, System::Baseline), [5.0]);
    }
}
