//! `app-size`: what a transaction costs, and how much memory a session takes, by the size of its
//! areas.
//!
//! **What varies**: the size of all areas, 1 MiB to 1 GiB; one area or 1,000; the tracker. **What
//! is equal**: each transaction writes one word in one page, chosen at random; all pages have been
//! written before; the areas are the session's own memory, and nothing is stored.
//!
//! **What is measured**: `commit_us`, the time of begin, write and commit: the median of each
//! round, as a sample of all rounds. `ratio` is that of the largest size to that of the smallest,
//! by tracker. Then, with a log, `memory_ratio`: the maximum of resident memory (VmHWM) during the
//! first commit, a commit of a page and one of everything, less what the process had before, as a
//! multiple of the areas. Each is measured in a process of its own.
//!
//! Last, the same transactions in a guest, where Firn on the host is the tracker (`guest`, see
//! `size_in_guest`). `--only` selects parts: `native`, `memory`, `guest`.

use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use firn_app::{Area, BackupTarget, FsyncPolicy, Session, SessionOptions, TrackerKind};
use serde_json::json;

use super::size_in_guest;
use crate::lab::{Lab, run_interleaved};
use crate::report::Report;
use crate::stats::Sample;

/// Sizes in MiB, in quick and in full runs.
const SIZES: (&[usize], &[usize]) = (&[1, 16, 64], &[1, 16, 256, 1024]);
const COUNTS: [usize; 2] = [1, 1000];
/// Rounds, and the transactions of each, in quick and in full runs.
const ROUNDS: (usize, usize) = (3, 5);
const TRANSACTIONS: (usize, usize) = (100, 400);
/// Transactions before the first round: in this time `auto` decides, and pages become hot.
const WARM_UP: usize = 200;
const PAGE: usize = 4096;

/// The trackers, and `auto`. Comparing everything costs by size by definition.
const TRACKERS: [Option<TrackerKind>; 5] = [
    None,
    Some(TrackerKind::Assisted),
    Some(TrackerKind::Pages),
    Some(TrackerKind::Emulate),
    Some(TrackerKind::Scan),
];

/// The parts of the experiment.
const PARTS: [&str; 3] = ["native", "memory", "guest"];

/// Runs the experiment.
pub fn run(lab: &Lab) -> Result<Report> {
    let parts = lab.extent.select_wanted(&PARTS, str::to_owned);
    let mut report = match parts.contains(&"guest") {
        true => lab.vm_report("app-size"),
        false => lab.report("app-size"),
    };
    for part in parts {
        match part {
            "native" => measure_natively(lab, &mut report)?,
            "memory" => measure_memory(lab, &mut report)?,
            _ => size_in_guest::measure_in_guest(lab, &mut report)?,
        }
    }
    Ok(report)
}

fn measure_natively(lab: &Lab, report: &mut Report) -> Result<()> {
    let sizes = lab.extent.pick(SIZES.0, SIZES.1);
    for count in COUNTS {
        for tracker in lab.extent.select_wanted(&TRACKERS, |it| tracker_name(it).to_owned()) {
            lab.log_progress(&format!("{}, {count} areas", tracker_name(tracker)));
            measure_commits(lab, report, (tracker, count), sizes)?;
        }
    }
    Ok(())
}

fn measure_memory(lab: &Lab, report: &mut Report) -> Result<()> {
    for &mib in lab.extent.pick(SIZES.0, SIZES.1) {
        for count in COUNTS {
            lab.log_progress(&format!("memory of {count} areas, {mib} MiB"));
            let ratio = measure_memory_in_child(&lab.file("size.log"), mib, count)?;
            report.add_number(format!("memory_ratio.areas{count}.mib{mib}"), ratio);
        }
    }
    Ok(())
}

fn tracker_name(tracker: Option<TrackerKind>) -> &'static str {
    tracker.map_or("auto", TrackerKind::name)
}

fn measure_commits(
    lab: &Lab,
    report: &mut Report,
    (tracker, count): (Option<TrackerKind>, usize),
    sizes: &[usize],
) -> Result<()> {
    let (rounds, transactions) =
        (lab.extent.runs(ROUNDS.0, ROUNDS.1), lab.extent.pick(TRANSACTIONS.0, TRANSACTIONS.1));
    let mut areas = sizes
        .iter()
        .map(|mib| Ok((MeasuredAreas::open(tracker, mib << 20, count)?, Vec::new())))
        .collect::<Result<Vec<_>>>()?;
    let numbers: Vec<usize> = (0..areas.len()).collect();
    run_interleaved(rounds, &numbers, |_, &number| {
        let (areas, medians) = &mut areas[number];
        medians.push(areas.measure_round(transactions)?);
        Ok(())
    })?;
    let name = tracker_name(tracker);
    for ((_, medians), mib) in areas.iter().zip(sizes) {
        report
            .add_repetition(json!({ "tracker": name, "areas": count, "mib": mib, "us": medians }));
        let key = format!("commit_us.{name}.areas{count}.mib{mib}");
        report.add_sample(key, medians.iter().copied());
    }
    let median = |at: Option<&(MeasuredAreas, Vec<f64>)>| {
        at.and_then(|(_, medians)| Sample::new(medians.iter().copied())).map(|it| it.median())
    };
    if let (Some(small), Some(large)) = (median(areas.first()), median(areas.last())) {
        report.add_number(format!("ratio.{name}.areas{count}"), large / small);
    }
    Ok(())
}

/// A session with areas of which each page was written.
struct MeasuredAreas {
    session: Session,
    areas: Vec<Area>,
    number: u64,
}

impl MeasuredAreas {
    fn open(tracker: Option<TrackerKind>, bytes: usize, count: usize) -> Result<Self> {
        let options = SessionOptions::new("size");
        let options = tracker.map_or(options.clone(), |kind| options.tracker(kind));
        let mut this = Self::open_session(options, bytes, count)?;
        this.fill(1)?;
        for _ in 0..WARM_UP {
            this.commit_page()?;
        }
        Ok(this)
    }

    fn open_session(options: SessionOptions, bytes: usize, count: usize) -> Result<Self> {
        let mut session = Session::open(options)?;
        // Whole pages, and at least one for each area.
        let len = (bytes / count / PAGE).max(1) * PAGE;
        let areas = (0..count).map(|number| session.allocate(&number.to_string(), len));
        let areas = areas.collect::<Result<_, _>>()?;
        Ok(Self { session, areas, number: 0 })
    }

    fn fill(&mut self, value: u64) -> Result<()> {
        let mut transaction = self.session.begin()?;
        for area in &self.areas {
            for (at, word) in transaction.words(area).iter_mut().enumerate() {
                *word = (value << 40 | at as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
            }
        }
        transaction.commit()?;
        Ok(())
    }

    fn commit_page(&mut self) -> Result<Duration> {
        self.number += 1;
        let drawn = self.number.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 20;
        let area = &self.areas[drawn as usize % self.areas.len()];
        let page = drawn as usize / self.areas.len() % (area.len() / PAGE);
        let start = Instant::now();
        let mut transaction = self.session.begin()?;
        let word = &mut transaction.words(area)[page * PAGE / 8 + 7];
        *word = std::hint::black_box(word.wrapping_add(1));
        transaction.commit()?;
        let time = start.elapsed();
        ensure!(self.session.changes().len() == 1, "the transaction changed one word");
        Ok(time)
    }

    /// The median of a round, in microseconds.
    fn measure_round(&mut self, transactions: usize) -> Result<f64> {
        let times = (0..transactions).map(|_| Ok(self.commit_page()?.as_secs_f64() * 1e6));
        let times = times.collect::<Result<Vec<_>>>()?;
        Sample::new(times).map(|sample| sample.median()).context("no transactions")
    }
}

/// Measures memory in a process of its own, as the maximum never falls.
fn measure_memory_in_child(log: &Path, mib: usize, count: usize) -> Result<f64> {
    let output = Command::new(std::env::current_exe()?)
        .args(["app-memory", &mib.to_string(), &count.to_string()])
        .arg(log)
        .output()
        .context("cannot start a process that measures memory")?;
    let text = String::from_utf8_lossy(&output.stdout);
    let errors = String::from_utf8_lossy(&output.stderr);
    // Each size begins with an empty log.
    std::fs::remove_file(log).context("cannot remove the log")?;
    text.trim().parse().with_context(|| format!("the process printed {text:?}: {errors}"))
}

/// Commits areas of a size with a log, and prints the maximum of memory as a multiple of them.
pub fn serve_memory(mib: usize, count: usize, log: &Path) -> Result<()> {
    let before = peak_bytes()?;
    let target = BackupTarget::file(log).fsync(FsyncPolicy::Never);
    let options = SessionOptions::new("size")
        .tracker(TrackerKind::Assisted)
        .backup(target)
        .backup_timeout(Duration::from_secs(300));
    let mut areas = MeasuredAreas::open_session(options, mib << 20, count)?;
    areas.fill(1)?;
    areas.commit_page()?;
    areas.fill(2)?;
    let bytes: usize = areas.areas.iter().map(Area::len).sum();
    println!("{:.3}", (peak_bytes()? - before) as f64 / bytes as f64);
    Ok(())
}

fn peak_bytes() -> Result<u64> {
    let status = std::fs::read_to_string("/proc/self/status")?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
    let kib = line.and_then(|line| line.split_whitespace().next()).context("no VmHWM")?;
    Ok(kib.parse::<u64>()? * 1024)
}
