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
use firn_report::Run;
use firn_report::plot::BarPlot;
use serde_json::{Value, json};

use crate::disk_profile::{DiskProfile, Throttle, make_cold, warm};
use crate::experiments::synthetic::words;
use crate::firn::{Said, SaveArgs};
use crate::guest::{Control, GuestImage, QemuArgs, accel};
use crate::lab::{Lab, interleaved, wait_for};
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
const BETWEEN: Duration = Duration::from_secs(1);
/// Increments in a chain, in quick and in full runs.
const DEPTHS: ([usize; 2], [usize; 3]) = ([1, 10], [1, 10, 100]);
const PROFILES: [DiskProfile; 2] = [DiskProfile::None, DiskProfile::Hdd15k];
const WINDOW_US: u64 = 100_000;
const BACK: f64 = 0.9;
/// How long a restore may take.
const LIMIT: Duration = Duration::from_secs(120);

/// Runs the experiment.
pub fn run(lab: &Lab) -> Result<Report> {
    let mut report = lab.vm_report("incremental");
    let guest = Guest::boot(lab)?;
    guest.increments("idle", &mut report)?;
    for rate in RATES {
        guest.write(rate)?;
        guest.increments(&rate.to_string(), &mut report)?;
    }
    figures(&mut report);
    guest.write(RATES[0])?;
    let depths: &[usize] = if lab.extent.quick { &DEPTHS.0 } else { &DEPTHS.1 };
    for &depth in depths {
        guest.chain(depth, &mut report)?;
    }
    lab.firn().stop(VM);
    for profile in PROFILES {
        if let Some(throttle) = lab.disk(profile, &mut report) {
            for &depth in depths {
                restores(lab, depth, &throttle, &mut report)?;
            }
        }
    }
    worst(depths, &mut report);
    let drawing = drawing(&report)?;
    report.drawing("incremental", drawing);
    Ok(report)
}

/// How much of RAM is filled: as much as fits into its tmpfs.
fn full_mib(ram_mib: u32) -> u32 {
    ram_mib * 3 / 8
}

/// A guest that writes to its memory.
struct Guest<'a> {
    lab: &'a Lab,
    agent: PathBuf,
    mib: u32,
    /// The job that writes now.
    writers: RefCell<Option<String>>,
}

impl<'a> Guest<'a> {
    fn boot(lab: &'a Lab) -> Result<Self> {
        let mib = lab.extent.pick(RAM_MIB.0, RAM_MIB.1);
        let agent = lab.file("agent");
        let args = QemuArgs::new(&GuestImage::small()?, accel::decide().accel)
            .memory_mib(mib)
            .vcpus(2)
            .console(&lab.file("console"))
            .agent(&agent);
        lab.firn().run(VM, &args)?;
        let guest = Self { lab, agent, mib, writers: RefCell::new(None) };
        let fill = format!("head -c {} /dev/urandom > /dev/shm/full", full_mib(mib) << 20);
        guest.control()?.spawn("fill", &["sh", "-c", &format!("{fill} && echo filled")])?;
        guest.control()?.wait_output("fill", "filled", FILL)?;
        lab.say(&format!("{} MiB of {mib} are full", full_mib(mib)));
        Ok(guest)
    }

    fn control(&self) -> Result<Control> {
        Ok(Control::connect(&self.agent, BOOT)?)
    }

    /// Makes the guest write random pages from now on.
    fn write(&self, rate: u32) -> Result<()> {
        let name = format!("writers-{rate}-{}", self.lab.dir().read_dir()?.count());
        let mib = self.mib / 8;
        if let Some(before) = self.writers.replace(Some(name.clone())) {
            self.control()?.signal(&before, SIGKILL)?;
        }
        let work = format!(
            "firn-guest writers --mib {mib} --rate {rate} --order random --compresses-to 90"
        );
        self.control()?.spawn(&name, &words(&work))?;
        self.control()?.wait_output(&name, "\"ready\":true", FILL)?;
        self.lab.say(&format!("the guest writes {rate} pages a second on each vCPU"));
        Ok(())
    }

    fn checkpoint(&self, image: &Path, how: &SaveArgs) -> Result<Said> {
        Ok(self.lab.firn().checkpoint(VM, image, how)?)
    }

    /// Makes full and incremental checkpoints alternately.
    fn increments(&self, rate: &str, report: &mut Report) -> Result<()> {
        let image = |name: &str| self.lab.file(name);
        for round in 0..self.lab.extent.runs(2, 7) {
            let full = self.checkpoint(&image("full.firn"), &SaveArgs::default())?;
            let pre_copy = SaveArgs::default().with("--strategy", "pre-copy");
            let base = self.checkpoint(&image("base.firn"), &pre_copy)?;
            std::thread::sleep(BETWEEN);
            let how = SaveArgs::default().with("--parent", image("base.firn"));
            let small = self.checkpoint(&image("small.firn"), &how)?;
            let number = |said: &Said, what: &str| said.number(&format!("/report/{what}"));
            let whole = |what: &str| Some(number(&full, what)?.min(number(&base, what)?));
            let ratio = |what: &str| Some(number(&small, what)? / whole(what)?);
            self.lab.say(&format!(
                "{rate}: {:.2} % of the size, {:.2} % of the time, pause {:.1} ms",
                100.0 * ratio("image_bytes").context("no size")?,
                100.0 * ratio("total_ms").context("no duration")?,
                number(&small, "pause/downtime_ms").context("no pause")?,
            ));
            report.repetition(json!({ "rate": rate, "round": round,
                "size_ratio": ratio("image_bytes"), "time_ratio": ratio("total_ms"),
                "downtime_ms": number(&small, "pause/downtime_ms"),
                "size_mib": number(&small, "image_bytes").map(|bytes| bytes / f64::from(1 << 20)),
                "total_ms": number(&small, "total_ms"), "full_ms": whole("total_ms"),
                "facts": small.facts["report"] }));
        }
        Ok(())
    }

    /// Makes a chain of `depth` increments, and merges it into one file.
    fn chain(&self, depth: usize, report: &mut Report) -> Result<()> {
        let files = files(self.lab, depth);
        let base = SaveArgs::default().with("--strategy", "pre-copy");
        self.checkpoint(&files[0], &base)?;
        for pair in files.windows(2) {
            std::thread::sleep(BETWEEN / 10);
            self.checkpoint(&pair[1], &SaveArgs::default().with("--parent", &pair[0]))?;
        }
        let (last, merged) = (&files[depth], merged(self.lab, depth));
        let words = [last.as_os_str(), "-o".as_ref(), merged.as_os_str()];
        self.lab.firn().image("merge", &words)?;
        same(last, &merged)?;
        let bytes = |file: &PathBuf| Ok(std::fs::metadata(file)?.len() as f64);
        let all = files.iter().map(bytes).sum::<Result<f64>>()?;
        report.number(format!("chain_to_merged_bytes.{depth}"), all / bytes(&merged)?);
        self.lab.say(&format!("a chain of {depth} increments, and the same merged"));
        Ok(())
    }
}

fn files(lab: &Lab, depth: usize) -> Vec<PathBuf> {
    (0..=depth).map(|n| lab.file(&format!("chain-{depth}-{n}.firn"))).collect()
}

fn merged(lab: &Lab, depth: usize) -> PathBuf {
    lab.file(&format!("merged-{depth}.firn"))
}

/// Fails unless two images hold the same memory.
fn same(one: &Path, other: &Path) -> Result<()> {
    let (one, other) = (Image::open(one)?, Image::open(other)?);
    let bytes = one.geometry().block_size.bytes();
    let (mut stored, mut ours, mut theirs) = (Vec::new(), vec![0; bytes], vec![0; bytes]);
    for block in (0..one.geometry().blocks()).map(firn_types::Block) {
        one.read_block(block, &mut stored, &mut ours)?;
        other.read_block(block, &mut stored, &mut theirs)?;
        ensure!(ours == theirs, "{block} differs between the chain and the merged image");
    }
    ensure!(other.entries(LocalityBlockId(0)).len() > 1, "the merged image is empty");
    Ok(())
}

/// Restores alternately from a chain and from the merged image.
fn restores(lab: &Lab, depth: usize, throttle: &Throttle, report: &mut Report) -> Result<()> {
    let chain = files(lab, depth);
    let rows = [("chain", chain), ("merged", vec![merged(lab, depth)])];
    let profile = throttle.profile();
    interleaved(lab.extent.runs(2, 7), &rows, |round, (name, files)| {
        match profile {
            DiskProfile::None => files.iter().try_for_each(|file| warm(file))?,
            _ => evict(lab, files, profile)?,
        }
        let ttr_s = ttr(lab, &files[files.len() - 1], throttle)?;
        lab.say(&format!("{name} of {depth} on {profile}: {ttr_s:.2} s"));
        report.repetition(json!({ "row": name, "depth": depth, "profile": profile,
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
    report.sample(format!("chain_ttr_s.{depth}.{profile}"), chain);
    report.sample(format!("merged_ttr_s.{depth}.{profile}"), merged);
    let of = |row: &str| report.value(&format!("{row}_ttr_s.{depth}.{profile}"));
    let ratio = of("chain").zip(of("merged")).map_or(f64::NAN, |(chain, merged)| chain / merged);
    report.number(format!("chain_ttr_ratio.{depth}.{profile}"), ratio);
    Ok(())
}

/// Evicts a chain from the page cache, and keeps everything else cached.
fn evict(lab: &Lab, chain: &[PathBuf], profile: DiskProfile) -> Result<()> {
    let Some((last, below)) = chain.split_last() else { return Ok(()) };
    make_cold(below.iter().map(PathBuf::as_path))?;
    Ok(lab.make_cold(last, profile)?)
}

/// Time to responsiveness of one restore, by its run record: from the command on.
fn ttr(lab: &Lab, image: &Path, throttle: &Throttle) -> Result<f64> {
    lab.firn().restore(image, VM, &[], throttle)?;
    let record = lab.firn().run_record(VM);
    let since = Instant::now();
    let whole = || {
        let run = Run::read(&record).ok();
        Ok(run.filter(|run| run.record.finished_us.is_some() || since.elapsed() > LIMIT / 2))
    };
    let run = wait_for("the run record", LIMIT, whole)?;
    lab.firn().stop(VM);
    Ok(firn_measure::responsiveness(&run.stalls(), WINDOW_US, BACK))
}

fn figures(report: &mut Report) {
    let rates = ["idle".to_owned()].into_iter().chain(RATES.map(|rate| rate.to_string()));
    for rate in rates {
        for key in ["size_ratio", "time_ratio", "downtime_ms", "size_mib", "total_ms", "full_ms"] {
            let is_it = |run: &&Value| run["rate"] == *rate;
            let runs = report.repetitions().iter().filter(is_it);
            let values: Vec<f64> = runs.filter_map(|run| run[key].as_f64()).collect();
            report.sample(format!("{key}.{rate}"), values);
        }
    }
    for key in ["size_ratio", "time_ratio"] {
        report.number(key, report.value(&format!("{key}.idle")).unwrap_or(f64::NAN));
    }
}

/// The ratio of the deepest chain on its worst disk.
fn worst(depths: &[usize], report: &mut Report) {
    let deepest = depths.last().copied().unwrap_or_default();
    let ratio =
        |profile: DiskProfile| report.value(&format!("chain_ttr_ratio.{deepest}.{profile}"));
    let worst = PROFILES.into_iter().filter_map(ratio).fold(f64::NAN, f64::max);
    report.number("chain_ttr_ratio", worst);
}

fn drawing(report: &Report) -> Result<String> {
    let groups: Vec<String> =
        ["idle".to_owned()].into_iter().chain(RATES.map(|rate| rate.to_string())).collect();
    let percent = |key: &str| {
        let value = |rate: &String| report.value(&format!("{key}.{rate}")).unwrap_or(0.0) * 100.0;
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
    plot.svg().context("the figure")
}
