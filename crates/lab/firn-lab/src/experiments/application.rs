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
use firn_image::{BlockOrganization, Codec, Image, ReorderOptions, reorder_image};
use firn_restore::RestoreMode;
use firn_types::BlockSize;
use serde_json::{Value, json};

use crate::disk_profile::{DiskProfile, DiskThrottle, make_cold, warm_file};
use crate::firn::SaveArgs;
use crate::guest::{GuestControl, GuestImage, QemuArgs, accel};
use crate::lab::{Lab, run_interleaved};
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
pub(super) struct ApplicationRun {
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
enum ApplicationSystem {
    /// All memory is present before the guest runs.
    Baseline,
    Lazy,
    Physical,
    LocalityUncompressed,
    Locality,
}

/// The systems whose overhead is measured.
const COMPARED: [ApplicationSystem; 4] = [
    ApplicationSystem::Lazy,
    ApplicationSystem::Physical,
    ApplicationSystem::LocalityUncompressed,
    ApplicationSystem::Locality,
];

impl ApplicationSystem {
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

    fn mode(self) -> RestoreMode {
        match self {
            Self::Baseline => RestoreMode::Eager,
            Self::Lazy => RestoreMode::Lazy,
            _ => RestoreMode::Locality,
        }
    }

    /// The reordering that makes its image out of the checkpoint; `None` for the checkpoint itself.
    fn arrangement(self) -> Result<Option<ReorderOptions>> {
        let plain = |by| ReorderOptions {
            codec: Some(Codec::None),
            ..ReorderOptions::for_organization(by)
        };
        Ok(match self {
            Self::Baseline | Self::Locality => None,
            Self::Lazy => {
                let block_size = Some(BlockSize::new(1)?);
                Some(ReorderOptions { block_size, ..plain(BlockOrganization::Physical) })
            }
            Self::Physical => Some(plain(BlockOrganization::Physical)),
            Self::LocalityUncompressed => Some(plain(BlockOrganization::Access)),
        })
    }

    fn image_path(self, lab: &Lab) -> PathBuf {
        let made = if self == Self::Baseline { Self::Locality } else { self };
        lab.file(&format!("{}.firn", made.name()))
    }
}

impl ApplicationRun {
    /// Runs the experiment: a checkpoint, then rounds of restores.
    pub(super) fn run(&self, lab: &Lab) -> Result<Report> {
        let mut report = lab.vm_report(self.name);
        let Some(throttle) = lab.throttle_disk(PROFILE, &mut report) else {
            report_missing(&mut report);
            return Ok(report);
        };
        let agent = lab.file("agent");
        self.start_work(lab, &agent)?;
        take_checkpoint(lab, &mut report)?;
        arrange_images(lab)?;
        let mut bench = RestoreBench { lab, agent, throttle, report };
        let rounds = lab.extent.runs(self.quick_rounds, 3);
        run_interleaved(rounds, &ApplicationSystem::ALL, |round, system| {
            bench.run_round(round, *system)
        })?;
        bench.add_overheads();
        let drawing = bench.overhead_plot(self.figure)?;
        bench.report.add_drawing(self.drawing, drawing);
        Ok(bench.report)
    }

    /// Boots the guest and waits until it is in the middle of its work.
    fn start_work(&self, lab: &Lab, agent: &Path) -> Result<()> {
        let image = GuestImage::full()?;
        let args = QemuArgs::new(&image, accel::choose_accel().accel)
            .memory_mib(self.memory_mib)
            .vcpus(2)
            .append_kernel_arg(&format!("firn.services={}", self.services))
            .root_in_memory(&image)
            .with_console(&lab.file("console"))
            .with_agent_socket(agent);
        lab.firn().run_vm(VM, &args)?;
        let mut control = GuestControl::connect(agent, BOOT)?;
        control.spawn_job(JOB, &["bash", "-c", &self.script])?;
        control.wait_output(JOB, "middle", LIMIT)?;
        lab.log_progress("the guest is in the middle of its work");
        Ok(())
    }
}

fn report_missing(report: &mut Report) {
    for system in COMPARED {
        let key = format!("overhead.{}", system.name());
        report.add_missing(key, "needs a disk that can be throttled");
    }
}

fn take_checkpoint(lab: &Lab, report: &mut Report) -> Result<()> {
    let saved = lab.firn().checkpoint(
        VM,
        &ApplicationSystem::Locality.image_path(lab),
        &SaveArgs::default(),
    )?;
    lab.firn().stop(VM);
    lab.log_progress(&format!("checkpointed in {:.1} s", saved.took.as_secs_f64()));
    report.add_repetition(json!({ "system": "save", "facts": saved.facts }));
    Ok(())
}

/// Makes the other images out of the checkpoint.
fn arrange_images(lab: &Lab) -> Result<()> {
    let source = Image::open(&ApplicationSystem::Locality.image_path(lab))?;
    for system in COMPARED {
        if let Some(how) = system.arrangement()? {
            reorder_image(&source, &how, &system.image_path(lab), &|_, _| ())?;
        }
    }
    lab.log_progress("images in all arrangements are ready");
    Ok(())
}

struct RestoreBench<'a> {
    lab: &'a Lab,
    agent: PathBuf,
    throttle: DiskThrottle,
    report: Report,
}

impl RestoreBench<'_> {
    fn run_round(&mut self, round: usize, system: ApplicationSystem) -> Result<()> {
        let image = system.image_path(self.lab);
        let (clock_s, restore_ms) = match system {
            ApplicationSystem::Baseline => {
                warm_file(&image)?;
                let none = DiskThrottle::new(DiskProfile::None, self.lab.dir())?;
                self.restore_and_wait(&image, system.mode(), &none)?
            }
            _ => {
                make_cold([image.as_path()])?;
                self.restore_and_wait(&image, system.mode(), &self.throttle)?
            }
        };
        self.lab.log_progress(&format!("{}: done at {clock_s:.2} s", system.name()));
        self.report.add_repetition(json!({ "system": system.name(), "round": round,
            "clock_s": clock_s, "restore_ms": restore_ms }));
        Ok(())
    }

    /// Restores with `firn` and waits for the end of the work. Returns the guest's clock then, and
    /// the time of each step of the restore.
    fn restore_and_wait(
        &self,
        image: &Path,
        mode: RestoreMode,
        throttle: &DiskThrottle,
    ) -> Result<(f64, Value)> {
        let firn = self.lab.firn();
        let restored = firn.restore(image, VM, &["--mode", &mode.to_string()], throttle)?;
        let clock_s = self.wait_for_clock();
        firn.stop(VM);
        Ok((clock_s?, restored.facts["timings_ms"].clone()))
    }

    /// The guest's clock at the end of its work.
    fn wait_for_clock(&self) -> Result<f64> {
        let ended = GuestControl::connect(&self.agent, BOOT)?.wait_job(JOB, LIMIT)?;
        let describe =
            || format!("the work ended with {}: {} {}", ended.exit, ended.stdout, ended.stderr);
        ensure!(ended.exit == 0, describe());
        clock_of(&ended.stdout).with_context(describe)
    }

    fn add_overheads(&mut self) {
        let clocks = |system: ApplicationSystem| clocks_of(&self.report, system);
        let baseline = clocks(ApplicationSystem::Baseline);
        let overheads = COMPARED.map(|system| (system, clocks(system)));
        self.report.add_sample("baseline_clock_s", baseline);
        let base_s = self.report.figure_value("baseline_clock_s").unwrap_or(f64::NAN);
        for (system, clocks) in overheads {
            let overheads = clocks.into_iter().map(|clock_s| clock_s - base_s);
            self.report.add_sample(format!("overhead.{}", system.name()), overheads);
        }
        for other in [ApplicationSystem::Lazy, ApplicationSystem::Physical] {
            let ratio = self.overhead_of(ApplicationSystem::Locality) / self.overhead_of(other);
            self.report.add_number(format!("overhead.locality_to_{}", other.name()), ratio);
        }
    }

    fn overhead_of(&self, system: ApplicationSystem) -> f64 {
        self.report.figure_value(&format!("overhead.{}", system.name())).unwrap_or(f64::NAN)
    }

    fn overhead_plot(&self, title: &str) -> Result<String> {
        let plot = BarPlot {
            title: title.to_owned(),
            y: "seconds longer than with all memory present".into(),
            groups: COMPARED.map(|system| system.name().to_owned()).into(),
            series: vec![(
                PROFILE.to_string(),
                COMPARED.map(|system| self.overhead_of(system)).into(),
            )],
        };
        plot.to_svg().context("the figure")
    }
}

fn clocks_of(report: &Report, system: ApplicationSystem) -> Vec<f64> {
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
        all.add_repetition(report("lazy", 9.0));
        all.add_repetition(report("baseline", 5.0));
        assert_eq!(clocks_of(&all, ApplicationSystem::Baseline), [5.0]);
    }
}
