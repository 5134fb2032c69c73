//! `fork-density`: many guests from one saved VM, until each of them replies, and their memory.
//!
//! Reproduces no figure of a paper; it answers what clones cost.
//!
//! **What varies**: the number of guests (1, 10, 50, 100), and the system that starts them:
//! `firn-clones` (`firn restore --count N`), `firn-restores` (`firn restore`, N times),
//! `qemu-template` (N QEMUs map one RAM file privately and load only device state,
//! `x-ignore-shared`, as Kata Containers does), and `qemu-file` (N QEMUs read one migration file).
//!
//! **What is held equal**: the guest (256 MiB, one vCPU, Redis with data), its command line but for
//! the address at which it answers, the number of guests that are started at the same time, and the
//! clients. The image, the RAM file and the migration file are in the page cache. The systems run
//! alternately. The host keeps 2 GiB: a guest that would take them is not started, and figures of
//! that number of guests are missing.
//!
//! **What is measured**: `first_reply_p50_s`, `first_reply_p95_s`: from the start of the first guest
//! until each guest replies to a PING. `started_s`: until the last start has returned.
//! `pss_idle_mib`, `pss_loaded_mib`: proportional share of the mapping of guest RAM, per guest, some
//! seconds after the last reply, and after 500 values were written to the Redis of each.
//! `written_idle_mib`, `written_loaded_mib`: of it, pages of a private mapping that a guest has for
//! itself (in `qemu-file` all are; `firn-restores` have shared mappings, each of a file of its own).
//! `host_mib`: by how much the memory available to the host fell, per guest; it includes hypervisors
//! and supervisors, and whatever else the host does. `pss_of_bound`: the sum of `pss_loaded_mib`, by
//! what the saved guest takes once plus 1.1 times what all guests have written.
//! `first_reply_p95_of_best_peer`: clones by the better of `firn-restores` and `qemu-template`.
//! `pause_ms`: the pause of the source by `firn fork` and by `firn checkpoint`, alternately.

mod memory;
mod replies;
mod starts;
mod systems;

use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use serde_json::{Value, json};

use crate::guest::{RedisClient, RedisLoad};
use crate::lab::{Lab, run_interleaved};
use crate::report::Report;
use crate::stats::Sample;

use memory::RamUse;
use starts::{RESERVE_MIB, start_each};
use systems::{DensitySystem, SavedSource};

/// The numbers of guests, in full and in quick runs.
const COUNTS: &[usize] = &[1, 10, 50, 100];
const QUICK_COUNTS: &[usize] = &[1, 4];
/// Up to this number of guests, rounds are repeated.
const REPEATED_MAX: usize = 10;
/// How long all guests may take to reply: at least, and for each of them.
const REPLY_LIMIT: Duration = Duration::from_secs(120);
const REPLY_LIMIT_EACH: Duration = Duration::from_secs(6);
/// The pause before memory is measured.
const SETTLE: Duration = Duration::from_secs(5);
/// Values that are written to each guest.
const WRITTEN_KEYS: u64 = 500;
/// Values of the saved guest that are read again in each guest.
const CHECKED_KEYS: std::ops::Range<u64> = 5000..5200;
/// How long a guest under load may take to accept a connection.
const CONNECT: Duration = Duration::from_secs(120);
/// What clones may take in addition to the saved guest, by what they have written.
const WRITTEN_FACTOR: f64 = 1.1;

/// The figures of each system, by their keys in a repetition.
const KEYS: [&str; 8] = [
    "first_reply_p50_s",
    "first_reply_p95_s",
    "started_s",
    "pss_idle_mib",
    "pss_loaded_mib",
    "written_idle_mib",
    "written_loaded_mib",
    "host_mib",
];

/// Runs the experiment.
pub fn run(lab: &Lab) -> Result<Report> {
    let mut report = lab.vm_report("fork-density");
    let counts = lab.extent.pick(QUICK_COUNTS, COUNTS);
    let counts = lab.extent.select_wanted(counts, |count| count.to_string());
    let systems = lab.extent.select_wanted(&DensitySystem::ALL, |system| system.name().to_owned());
    let source = SavedSource::create(lab, &systems, &mut report)?;
    for count in counts {
        let rounds = if count > REPEATED_MAX { 1 } else { lab.extent.runs(1, 3) };
        run_interleaved(rounds, &systems, |round, &system| {
            let estimated_mib = estimate_memory(&report, system);
            let run = DensityRun { lab, source: &source, system, count, estimated_mib };
            report.add_repetition(run.measure_or_explain(round));
            Ok(())
        })?;
        systems.iter().for_each(|&system| add_figures(system, count, &mut report));
        add_ratios(count, &mut report);
    }
    Ok(report)
}

/// One number of guests, by one system.
struct DensityRun<'a> {
    lab: &'a Lab,
    source: &'a SavedSource<'a>,
    system: DensitySystem,
    count: usize,
    /// The memory of the host that a guest will take, in MiB.
    estimated_mib: f64,
}

impl DensityRun<'_> {
    /// The repetition: what was measured, or why not.
    fn measure_or_explain(&self, round: usize) -> Value {
        let (system, count) = (self.system.name(), self.count);
        let measured = self.measure();
        self.source.end_guests();
        let mut run = measured.unwrap_or_else(|error| json!({ "why": format!("{error:#}") }));
        let shown = |key: &str| run[key].as_f64().unwrap_or(f64::NAN);
        let text = match run["why"].as_str() {
            Some(why) => format!("{count} guests by {system}: {why}"),
            None => format!(
                "{count} guests by {system}: replies p50 {:.2} s, p95 {:.2} s; PSS {:.1} MiB, loaded {:.1} MiB",
                shown("first_reply_p50_s"),
                shown("first_reply_p95_s"),
                shown("pss_idle_mib"),
                shown("pss_loaded_mib")
            ),
        };
        self.lab.log_progress(&text);
        run["system"] = json!(system);
        run["count"] = json!(count);
        run["round"] = json!(round);
        run
    }

    fn measure(&self) -> Result<Value> {
        let before = memory::available_mib()?;
        self.check_memory(before)?;
        let addresses: Vec<_> = (1..=self.count).map(|it| self.source.address_of(it)).collect();
        let limit = REPLY_LIMIT.max(REPLY_LIMIT_EACH * self.count as u32);
        let since = Instant::now();
        let start = || {
            let pids = self.source.start_guests(self.system, self.count)?;
            Ok((pids, since.elapsed().as_secs_f64()))
        };
        let ((pids, started_s), replies) = replies::await_first_replies(&addresses, limit, start)?;
        self.source.await_memory(self.system)?;
        std::thread::sleep(SETTLE);
        let idle = RamUse::of_processes(&pids, self.system.ram_mapping())?;
        let host_mib = (before - memory::available_mib()?) / self.count as f64;
        let first = *pids.first().context("no guest")?;
        let shared_mib = self.source.shared_mib(self.system, first)?;
        start_each(self.count, |number| self.load_guest(number))?;
        let loaded = RamUse::of_processes(&pids, self.system.ram_mapping())?;
        let replies = Sample::new(replies).context("no reply")?;
        let each = |sum: f64| sum / self.count as f64;
        Ok(json!({
            "first_reply_p50_s": replies.p50(), "first_reply_p95_s": replies.p95(),
            "started_s": started_s, "host_mib": host_mib, "shared_mib": shared_mib,
            "pss_idle_mib": each(idle.pss_mib), "pss_loaded_mib": each(loaded.pss_mib),
            "written_idle_mib": each(idle.private_mib),
            "written_loaded_mib": each(loaded.private_mib),
            "first_replies_s": replies.values(),
        }))
    }

    /// Refuses a number of guests for which the host has too little memory.
    fn check_memory(&self, available: f64) -> Result<()> {
        let each = self.estimated_mib;
        let needed = each * self.count as f64 + RESERVE_MIB;
        ensure!(
            available >= needed,
            "the host's memory does not suffice: {each:.0} MiB for each guest and a reserve make {needed:.0} MiB, {available:.0} MiB are available"
        );
        Ok(())
    }

    /// Writes values to a guest, and checks values that it was saved with.
    fn load_guest(&self, number: usize) -> Result<()> {
        let mut redis = RedisClient::connect(self.source.address_of(number), CONNECT)?;
        let written =
            RedisLoad { keys: 0..WRITTEN_KEYS, generation: 1, ..self.source.load().clone() };
        written.write_all(&mut redis)?;
        for load in [written, RedisLoad { keys: CHECKED_KEYS, ..self.source.load().clone() }] {
            let checked = load.verify_all(&mut redis)?;
            ensure!(checked.is_right(), "guest {number} has lost data: {:?}", checked.problems);
        }
        Ok(())
    }
}

/// The memory that a guest takes of the host, in MiB: as the last guests of the system did, or a
/// guess.
fn estimate_memory(report: &Report, system: DensitySystem) -> f64 {
    let runs = report.repetitions().iter().rev();
    let mut known = runs.filter(|run| run["system"] == system.name());
    known.find_map(|run| run["host_mib"].as_f64()).unwrap_or_else(|| system.first_estimate_mib())
}

fn runs_of(report: &Report, system: DensitySystem, count: usize) -> Vec<&Value> {
    let is_it = |run: &&Value| run["system"] == system.name() && run["count"] == count;
    report.repetitions().iter().filter(is_it).collect()
}

fn add_figures(system: DensitySystem, count: usize, report: &mut Report) {
    for key in KEYS {
        let runs = runs_of(report, system, count);
        let values: Vec<f64> = runs.iter().filter_map(|run| run[key].as_f64()).collect();
        let why = runs.iter().find_map(|run| run["why"].as_str()).map(str::to_owned);
        let key = format!("{key}.{}.{count}", system.name());
        match why {
            Some(why) => report.add_missing(key, why),
            None => report.add_sample(key, values),
        }
    }
}

fn add_ratios(count: usize, report: &mut Report) {
    let bound = runs_of(report, DensitySystem::Clones, count).into_iter().filter_map(|run| {
        let number = |key: &str| run[key].as_f64();
        let written = number("written_loaded_mib")? * count as f64;
        let sum = number("pss_loaded_mib")? * count as f64;
        Some(sum / (number("shared_mib")? + WRITTEN_FACTOR * written))
    });
    let bound: Vec<f64> = bound.collect();
    report.add_sample(format!("pss_of_bound.{count}"), bound);
    let p95 = |system: DensitySystem| {
        report.figure_value(&format!("first_reply_p95_s.{}.{count}", system.name()))
    };
    let peers = [DensitySystem::Restores, DensitySystem::QemuTemplate];
    let best = peers.into_iter().filter_map(p95).fold(f64::INFINITY, f64::min);
    let clones = p95(DensitySystem::Clones).unwrap_or(f64::NAN);
    report.add_number(format!("first_reply_p95_of_best_peer.{count}"), clones / best);
}
