//! `incremental`: incremental checkpoints, and restores from chains of them.
//!
//! Answers a question that Sun and Blough ("Fast, Lightweight Virtual Machine Checkpointing",
//! section 4.4) leave open.
//!
//! **What varies**: how fast the guest writes (`idle`, and random pages per second), and how many
//! images a restore reads (1 to 100). **What is held equal**: the guest, three eighths of whose
//! memory contain data that does not compress; the time between two checkpoints.
//!
//! **What is measured**: size and duration of an incremental checkpoint after one second, against a
//! full one of the same guest, by the default strategy or by pre-copy, whichever is smaller and
//! faster (`size_ratio`, `time_ratio`: idle; `size_ratio.RATE` and so on); the pause
//! (`downtime_ms.RATE`); and TTR(0.1 s, 90 %) of a restore from a chain of 1, 10 and 100 increments
//! against one from the same checkpoint merged into one file (`chain_ttr_ratio.DEPTH.PROFILE`;
//! `chain_ttr_ratio` is the worst at depth 100). The chain's memory is compared with the merged
//! image byte for byte first.

use std::cell::RefCell;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use firn_image::{Image, LocalityBlockId};
use firn_report::ReportedRun;
use firn_report::plot::BarPlot;
use serde_json::{Value, json};

use crate::disk_profile::{DiskProfile, DiskThrottle, make_cold, warm_file};
use crate::experiments::synthetic::split_words;
use crate::firn::{CommandOutput, SaveArgs};
use crate::guest::{GuestControl, GuestImage, QemuArgs, accel};
use crate::lab::{Lab, run_interleaved, wait_for};
use crate::report::Report;

const SIGKILL: i32 = 9;
const VM: &str = "growing";
const BOOT: Duration = Duration::from_secs(120);
/// How long the guest may take to fill memory.
const FILL: Duration = Duration::from_secs(300);
/// RAM in MiB, in quick and in full runs.
const RAM_MIB: (u32, u32) = (384, 1024);
/// Pages that the guest writes per second and vCPU.
const RATES: [u32; 3] = [100, 1000, 10_000];
/// Time between two checkpoints.
const CHECKPOINT_INTERVAL: Duration = Duration::from_secs(1);
/// Increments in a chain, in quick and in full runs.
const DEPTHS: ([usize; 2], [usize; 3]) = ([1, 10], [1, 10, 100]);
const PROFILES: [DiskProfile; 2] = [DiskProfile::None, DiskProfile::Hdd15k];
const WINDOW_US: u64 = 100_000;
const RESPONSIVE_SHARE: f64 = 0.9;
/// How long a restore may take.
const LIMIT: Duration = Duration::from_secs(120);

/// Runs the experiment.
pub fn run(lab: &Lab) -> Result<Report> {
    let mut report = lab.vm_report("incremental");
    let guest = WritingGuest::boot_guest(lab)?;
    guest.measure_increments("idle", &mut report)?;
    for rate in RATES {
        guest.write_at_rate(rate)?;
        guest.measure_increments(&rate.to_string(), &mut report)?;
    }
    add_numbers(&mut report);
    guest.write_at_rate(RATES[0])?;
    let depths: &[usize] = if lab.extent.quick { &DEPTHS.0 } else { &DEPTHS.1 };
    for &depth in depths {
        guest.measure_chain(depth, &mut report)?;
    }
    lab.firn().stop(VM);
    for profile in PROFILES {
        if let Some(throttle) = lab.throttle_disk(profile, &mut report) {
            for &depth in depths {
                compare_restores(lab, depth, &throttle, &mut report)?;
            }
        }
    }
    add_worst_ratio(depths, &mut report);
    let drawing = draw_plot(&report)?;
    report.add_drawing("incremental", drawing);
    Ok(report)
}

/// How much of RAM is filled: as much as fits into its tmpfs.
fn full_mib(ram_mib: u32) -> u32 {
    ram_mib * 3 / 8
}

/// A guest that writes to its memory.
struct WritingGuest<'a> {
    lab: &'a Lab,
    agent: PathBuf,
    mib: u32,
    /// The job that writes now.
    writers: RefCell<Option<String>>,
}

impl<'a> WritingGuest<'a> {
    fn boot_guest(lab: &'a Lab) -> Result<Self> {
        let mib = lab.extent.pick(RAM_MIB.0, RAM_MIB.1);
        let agent = lab.file("agent");
        let args = QemuArgs::new(&GuestImage::small()?, accel::choose_accel().accel)
            .memory_mib(mib)
            .vcpus(2)
            .with_console(&lab.file("console"))
            .with_agent_socket(&agent);
        lab.firn().run_vm(VM, &args)?;
        let guest = Self { lab, agent, mib, writers: RefCell::new(None) };
        let fill = format!("head -c {} /dev/urandom > /dev/shm/full", full_mib(mib) << 20);
        guest
            .connect_control()?
            .spawn_job("fill", &["sh", "-c", &format!("{fill} && echo filled")])?;
        guest.connect_control()?.wait_output("fill", "filled", FILL)?;
        lab.log_progress(&format!("{} MiB of {mib} are full", full_mib(mib)));
        Ok(guest)
    }

    fn connect_control(&self) -> Result<GuestControl> {
        Ok(GuestControl::connect(&self.agent, BOOT)?)
    }

    /// Makes the guest write random pages from now on.
    fn write_at_rate(&self, rate: u32) -> Result<()> {
        let name = format!("writers-{rate}-{}", self.lab.dir().read_dir()?.count());
        let mib = self.mib / 8;
        if let Some(before) = self.writers.replace(Some(name.clone())) {
            self.connect_control()?.signal_job(&before, SIGKILL)?;
        }
        let work = format!(
            "firn-guest writers --mib {mib} --rate {rate} --order random --compresses-to 90"
        );
        self.connect_control()?.spawn_job(&name, &split_words(&work))?;
        self.connect_control()?.wait_output(&name, "\"ready\":true", FILL)?;
        self.lab.log_progress(&format!("the guest writes {rate} pages a second on each vCPU"));
        Ok(())
    }

    fn checkpoint_vm(&self, image: &Path, how: &SaveArgs) -> Result<CommandOutput> {
        Ok(self.lab.firn().checkpoint(VM, image, how)?)
    }

    /// Makes full and incremental checkpoints alternately.
    fn measure_increments(&self, rate: &str, report: &mut Report) -> Result<()> {
        let image = |name: &str| self.lab.file(name);
        for round in 0..self.lab.extent.runs(2, 7) {
            let full = self.checkpoint_vm(&image("full.firn"), &SaveArgs::default())?;
            let pre_copy = SaveArgs::default().with_option("--strategy", "pre-copy");
            let base = self.checkpoint_vm(&image("base.firn"), &pre_copy)?;
            std::thread::sleep(CHECKPOINT_INTERVAL);
            let how = SaveArgs::default().with_option("--parent", image("base.firn"));
            let small = self.checkpoint_vm(&image("small.firn"), &how)?;
            let number = |said: &CommandOutput, what: &str| said.number(&format!("/report/{what}"));
            let whole = |what: &str| Some(number(&full, what)?.min(number(&base, what)?));
            let ratio = |what: &str| Some(number(&small, what)? / whole(what)?);
            self.lab.log_progress(&format!(
                "{rate}: {:.2} % of the size, {:.2} % of the time, pause {:.1} ms",
                100.0 * ratio("image_bytes").context("no size")?,
                100.0 * ratio("total_ms").context("no duration")?,
                number(&small, "pause/downtime_ms").context("no pause")?,
            ));
            report.add_repetition(json!({ "rate": rate, "round": round,
                "size_ratio": ratio("image_bytes"), "time_ratio": ratio("total_ms"),
                "downtime_ms": number(&small, "pause/downtime_ms"),
                "size_mib": number(&small, "image_bytes").map(|bytes| bytes / f64::from(1 << 20)),
                "total_ms": number(&small, "total_ms"), "full_ms": whole("total_ms"),
                "facts": small.facts["report"] }));
        }
        Ok(())
    }

    /// Makes a chain of `depth` increments, and merges it into one file.
    fn measure_chain(&self, depth: usize, report: &mut Report) -> Result<()> {
        let files = chain_files(self.lab, depth);
        let base = SaveArgs::default().with_option("--strategy", "pre-copy");
        self.checkpoint_vm(&files[0], &base)?;
        for pair in files.windows(2) {
            std::thread::sleep(CHECKPOINT_INTERVAL / 10);
            self.checkpoint_vm(&pair[1], &SaveArgs::default().with_option("--parent", &pair[0]))?;
        }
        let (last, merged) = (&files[depth], merged_file(self.lab, depth));
        let words = [last.as_os_str(), "-o".as_ref(), merged.as_os_str()];
        self.lab.firn().run_image_verb("merge", &words)?;
        ensure_same_memory(last, &merged)?;
        let bytes = |file: &PathBuf| Ok(std::fs::metadata(file)?.len() as f64);
        let all = files.iter().map(bytes).sum::<Result<f64>>()?;
        report.add_number(format!("chain_to_merged_bytes.{depth}"), all / bytes(&merged)?);
        self.lab.log_progress(&format!("a chain of {depth} increments, and the same merged"));
        Ok(())
    }
}

fn chain_files(lab: &Lab, depth: usize) -> Vec<PathBuf> {
    (0..=depth).map(|n| lab.file(&format!("chain-{depth}-{n}.firn"))).collect()
}

fn merged_file(lab: &Lab, depth: usize) -> PathBuf {
    lab.file(&format!("merged-{depth}.firn"))
}

/// Fails unless two images hold the same memory.
fn ensure_same_memory(one: &Path, other: &Path) -> Result<()> {
    let (one, other) = (Image::open(one)?, Image::open(other)?);
    let bytes = one.geometry().block_size.byte_count();
    let (mut stored, mut ours, mut theirs) = (Vec::new(), vec![0; bytes], vec![0; bytes]);
    for block in (0..one.geometry().block_count()).map(firn_types::Block) {
        one.read_block(block, &mut stored, &mut ours)?;
        other.read_block(block, &mut stored, &mut theirs)?;
        ensure!(ours == theirs, "{block} differs between the chain and the merged image");
    }
    ensure!(other.entries(LocalityBlockId(0)).len() > 1, "the merged image is empty");
    Ok(())
}

/// Restores alternately from a chain and from the merged image.
fn compare_restores(
    lab: &Lab,
    depth: usize,
    throttle: &DiskThrottle,
    report: &mut Report,
) -> Result<()> {
    let chain = chain_files(lab, depth);
    let rows = [("chain", chain), ("merged", vec![merged_file(lab, depth)])];
    let profile = throttle.profile();
    run_interleaved(lab.extent.runs(2, 7), &rows, |round, (name, files)| {
        match profile {
            DiskProfile::None => files.iter().try_for_each(|file| warm_file(file))?,
            _ => evict_chain(lab, files, profile)?,
        }
        let ttr_s = measure_ttr(lab, &files[files.len() - 1], throttle)?;
        lab.log_progress(&format!("{name} of {depth} on {profile}: {ttr_s:.2} s"));
        report.add_repetition(json!({ "row": name, "depth": depth, "profile": profile,
            "round": round, "ttr_s": ttr_s }));
        Ok(())
    })?;
    let values = |row: &str| {
        let is_it = |run: &&Value| {
            run["row"] == row && run["depth"] == depth && run["profile"] == profile.name()
        };
        let runs = report.repetitions().iter().filter(is_it);
        runs.filter_map(|run| run["ttr_s"].as_f64()).collect::<Vec<_>>()
    };
    let (chain, merged) = (values("chain"), values("merged"));
    report.add_sample(format!("chain_ttr_s.{depth}.{profile}"), chain);
    report.add_sample(format!("merged_ttr_s.{depth}.{profile}"), merged);
    let of = |row: &str| report.figure_value(&format!("{row}_ttr_s.{depth}.{profile}"));
    let ratio = of("chain").zip(of("merged")).map_or(f64::NAN, |(chain, merged)| chain / merged);
    report.add_number(format!("chain_ttr_ratio.{depth}.{profile}"), ratio);
    Ok(())
}

/// Evicts a chain from the page cache, and keeps everything else cached.
fn evict_chain(lab: &Lab, chain: &[PathBuf], profile: DiskProfile) -> Result<()> {
    let Some((last, below)) = chain.split_last() else { return Ok(()) };
    make_cold(below.iter().map(PathBuf::as_path))?;
    Ok(lab.make_cold(last, profile)?)
}

/// Time to responsiveness of one restore, by its run record: from the command on.
fn measure_ttr(lab: &Lab, image: &Path, throttle: &DiskThrottle) -> Result<f64> {
    lab.firn().restore(image, VM, &[], throttle)?;
    let record = lab.firn().run_record(VM);
    let since = Instant::now();
    let whole = || {
        let run = ReportedRun::read_file(&record).ok();
        Ok(run.filter(|run| run.record.finished_us.is_some() || since.elapsed() > LIMIT / 2))
    };
    let run = wait_for("the run record", LIMIT, whole)?;
    lab.firn().stop(VM);
    Ok(firn_measure::time_to_responsiveness(&run.vcpu_waiting_time(), WINDOW_US, RESPONSIVE_SHARE))
}

fn add_numbers(report: &mut Report) {
    let rates = ["idle".to_owned()].into_iter().chain(RATES.map(|rate| rate.to_string()));
    for rate in rates {
        for key in ["size_ratio", "time_ratio", "downtime_ms", "size_mib", "total_ms", "full_ms"] {
            let is_it = |run: &&Value| run["rate"] == *rate;
            let runs = report.repetitions().iter().filter(is_it);
            let values: Vec<f64> = runs.filter_map(|run| run[key].as_f64()).collect();
            report.add_sample(format!("{key}.{rate}"), values);
        }
    }
    for key in ["size_ratio", "time_ratio"] {
        report.add_number(key, report.figure_value(&format!("{key}.idle")).unwrap_or(f64::NAN));
    }
}

/// The ratio of the deepest chain on its worst disk.
fn add_worst_ratio(depths: &[usize], report: &mut Report) {
    let deepest = depths.last().copied().unwrap_or_default();
    let ratio =
        |profile: DiskProfile| report.figure_value(&format!("chain_ttr_ratio.{deepest}.{profile}"));
    let worst = PROFILES.into_iter().filter_map(ratio).fold(f64::NAN, f64::max);
    report.add_number("chain_ttr_ratio", worst);
}

fn draw_plot(report: &Report) -> Result<String> {
    let groups: Vec<String> =
        ["idle".to_owned()].into_iter().chain(RATES.map(|rate| rate.to_string())).collect();
    let percent = |key: &str| {
        let value =
            |rate: &String| report.figure_value(&format!("{key}.{rate}")).unwrap_or(0.0) * 100.0;
        (key.to_owned(), groups.iter().map(value).collect())
    };
    let plot = BarPlot {
        title:
            "A checkpoint of one second's changes against a full one, by pages written per second"
                .into(),
        y: "percent".into(),
        series: vec![percent("size_ratio"), percent("time_ratio")],
        groups,
    };
    plot.to_svg().context("the figure")
}
