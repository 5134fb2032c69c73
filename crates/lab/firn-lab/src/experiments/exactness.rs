//! `exactness`: whether an image is the guest's memory at the instant of the pause, and a restored
//! guest the same guest.
//!
//! Reproduces no figure of a paper: it tests the promise that all of them depend on.
//!
//! **What varies**, at random for each run, from its seed: vCPUs (1, 2, 4), RAM (256 MiB to 4.5
//! GiB, to the page, in one or several backends, also split around the PCI hole), the load, the
//! size of memory blocks and locality blocks, the codec, the strategy (copy-on-access,
//! copy-on-write, pre-copy, stop-and-copy), the number of images that the image builds on, whether
//! the sweep is throttled, the mode of the restore; whether the guest has a disk that it writes to,
//! and whether its memory is private, with Firn attached to it.
//!
//! **What is held equal**: during every save writers run on each vCPU, disks and a network card do
//! DMA, a computation runs.
//!
//! **What is measured**: `differing_blocks`: memory blocks of the image that differ from a flat
//! copy made during the pause. `wrong_pages`: pages that the guests, the saved one and the restored
//! one, find to differ from what they wrote, or from their disk. `results_equal`: runs in which
//! both guests computed the result of an uninterrupted computation. `runs_exact`: runs without any
//! fault. `in_the_middle`: runs whose restored guest had not finished yet.
//!
//! Each run is identified by its seed: `firn-lab run exactness --seed SEED --runs 1` repeats it.
//!
//! **Memory that the guest gives back**: `--only balloon,free-page-reporting,virtio-mem`, or some of
//! these words, gives each run one of these devices, which is active during the save
//! ([`memory_device`]). Each run has a strategy that saves a VM that runs, shared or private memory,
//! and often images that the compared one builds on. A program in the guest allocates, checks and
//! frees memory all the time. A run is exact, or it has *failed closed*: three tries of its last save
//! lost memory, no image is left, and the guest is right. `runs_failed_closed` counts these. Saves that
//! succeeded in a later try are counted by `saves_tried_again`. A VM that Firn refuses is counted by
//! `runs_refused`, and not by `runs_exact`: then its image, made with `--accept-unrestorable`, is
//! compared, and not restored. `DEVICE.KEY` has the same counts for each device.
//!
//! `FIRN_FAULT=discards.check=EIO` switches the check of such memory off in a `firn` with fault
//! points: then `differing_blocks` is not zero, and the experiment fails.

mod drawn;
mod memory_device;
pub(super) mod trial;

use std::collections::{BTreeMap, BTreeSet};
use std::time::Instant;

use anyhow::Result;
use serde_json::{Value, json};

use self::drawn::TrialParameters;
use self::memory_device::MemoryDevice;
use self::trial::{TrialBench, TrialOutcome};
use crate::lab::Lab;
use crate::report::Report;

/// Runs the experiment.
pub fn run(lab: &Lab) -> Result<Report> {
    let mut report = lab.vm_report("exactness");
    let bench = TrialBench::new(lab)?;
    let mut tally = TrialCounts::default();
    let devices = named_devices(lab);
    for number in 0..lab.extent.runs(6, if devices.is_empty() { 216 } else { 100 }) {
        let seed = lab.extent.seed + number as u64;
        let drawn = match &devices[..] {
            [] => TrialParameters::from_seed(seed),
            devices => TrialParameters::with_device(seed, devices),
        };
        let since = Instant::now();
        let outcome = bench.run_trial(&drawn);
        let took_s = since.elapsed().as_secs_f64();
        lab.log_progress(&describe_run(&drawn, &outcome, took_s));
        tally.count_run(&drawn, &outcome);
        report.add_repetition(to_repetition(&drawn, &outcome, took_s));
    }
    tally.add_numbers(&mut report);
    Ok(report)
}

/// The memory devices that the user names.
fn named_devices(lab: &Lab) -> Vec<MemoryDevice> {
    let is_named = |device: &MemoryDevice| lab.extent.only.iter().any(|it| it == device.name());
    MemoryDevice::ALL.into_iter().filter(is_named).collect()
}

/// Counts over all runs.
#[derive(Default)]
struct TrialCounts {
    runs: u64,
    sums: BTreeMap<String, u64>,
    drawn: BTreeMap<String, u64>,
    /// Seeds of runs that were neither exact nor failed closed nor refused.
    not_exact: Vec<u64>,
    /// Each reason for which Firn refused a VM.
    refusals: BTreeSet<String>,
}

impl TrialCounts {
    fn count_run(&mut self, drawn: &TrialParameters, outcome: &Result<TrialOutcome>) {
        self.runs += 1;
        for label in drawn.figure_labels() {
            *self.drawn.entry(label).or_default() += 1;
        }
        let device = drawn.device.map(|drawn| drawn.device.name());
        for (key, value) in figure_values(outcome, device.is_some()) {
            *self.sums.entry(key.to_owned()).or_default() += value;
            if let Some(device) = device {
                *self.sums.entry(format!("{device}.{key}")).or_default() += value;
            }
        }
        if !outcome.as_ref().is_ok_and(TrialOutcome::is_right) {
            self.not_exact.push(drawn.seed);
        }
        self.refusals.extend(outcome.as_ref().ok().and_then(|found| found.refusal.clone()));
    }

    fn add_numbers(&self, report: &mut Report) {
        report.add_number("runs", self.runs as f64);
        for (key, value) in &self.sums {
            report.add_number(key, *value as f64);
        }
        self.refusals.iter().for_each(|why| report.add_remark(format!("refused: {why}")));
        for (label, count) in &self.drawn {
            report.add_number(label, *count as f64);
        }
        if !self.not_exact.is_empty() {
            report.mark_failed(format!("not exact: the runs with seeds {:?}", self.not_exact));
        }
    }
}

/// The values that a run adds to each figure. A failed run adds nothing to figures that must be
/// high.
fn figure_values(outcome: &Result<TrialOutcome>, has_device: bool) -> Vec<(&'static str, u64)> {
    let none = TrialOutcome::default();
    let found = outcome.as_ref().unwrap_or(&none);
    let mut values = vec![
        ("differing_blocks", found.differing_blocks),
        ("wrong_pages", found.wrong_pages),
        ("wrong_echoes", found.wrong_echoes),
        ("runs_exact", u64::from(outcome.is_ok() && found.is_exact())),
        ("results_equal", u64::from(found.results_equal)),
        ("in_the_middle", u64::from(found.in_the_middle)),
    ];
    if has_device {
        let saves = found.saves;
        values.extend([
            ("runs_failed_closed", u64::from(found.has_no_image)),
            ("runs_refused", u64::from(found.refusal.is_some())),
            ("saves_succeeded", saves.succeeded),
            ("saves_tried_again", saves.tried_again),
            ("saves_failed_closed", saves.failed_closed),
        ]);
    }
    values
}

fn to_repetition(drawn: &TrialParameters, outcome: &Result<TrialOutcome>, took_s: f64) -> Value {
    let mut run = json!({ "seed": drawn.seed, "took_s": took_s, "drawn": drawn.to_facts() });
    match outcome {
        Ok(found) => {
            let values = figure_values(outcome, drawn.device.is_some());
            values.into_iter().for_each(|(key, value)| run[key] = json!(value));
            run["facts"] = found.facts.clone();
            run["refusal"] = json!(found.refusal);
        }
        Err(error) => run["error"] = json!(format!("{error:#}")),
    }
    run
}

fn describe_run(drawn: &TrialParameters, outcome: &Result<TrialOutcome>, took_s: f64) -> String {
    let came = match outcome {
        Ok(found) if !found.is_right() => format!("NOT EXACT: {found:?}"),
        Ok(found) if found.refusal.is_some() => "refused, its marked image is exact".to_owned(),
        Ok(found) if found.has_no_image => "failed closed".to_owned(),
        Ok(found) => format!("exact, {} saves tried again", found.saves.tried_again),
        Err(error) => format!("FAILED: {error:#}"),
    };
    let (mib, vcpus, mode) = (drawn.ram.total_kib() >> 10, drawn.vcpus, drawn.mode);
    let device = drawn.device.map_or(String::new(), |given| {
        let memory = if drawn.private { "private" } else { "shared" };
        format!(", {}, {memory}, {}", given.device.name(), drawn.strategy)
    });
    format!("seed {}: {vcpus} vCPUs, {mib} MiB, {mode}{device}: {came}, {took_s:.0} s", drawn.seed)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn exact() -> TrialOutcome {
        TrialOutcome { results_equal: true, ..TrialOutcome::default() }
    }

    #[test]
    fn one_wrong_thing_is_not_exact() {
        assert!(exact().is_exact());
        assert!(!TrialOutcome { differing_blocks: 1, ..exact() }.is_exact());
        assert!(!TrialOutcome { wrong_pages: 1, ..exact() }.is_exact());
        assert!(!TrialOutcome { results_equal: false, ..exact() }.is_exact());
    }

    #[test]
    fn a_run_without_an_image_is_right_and_not_exact() {
        let closed = || TrialOutcome { has_no_image: true, ..exact() };
        let refused = || TrialOutcome { refusal: Some("virtio-mem".into()), ..exact() };
        let drawn = TrialParameters::with_device(1, &MemoryDevice::ALL[..1]);
        let mut tally = TrialCounts::default();
        for outcome in [exact(), closed(), refused()] {
            tally.count_run(&drawn, &Ok(outcome));
        }
        let mut report = Report::new("exactness", true);
        tally.add_numbers(&mut report);
        for key in ["runs_exact", "runs_failed_closed", "balloon.runs_refused"] {
            assert_eq!(report.figure_value(key), Some(1.0), "{key}");
        }
        assert!(report.is_complete());
        assert!(report.to_table().contains("refused: virtio-mem"), "{}", report.to_table());
        tally.count_run(&drawn, &Ok(TrialOutcome { wrong_pages: 2, ..closed() }));
        tally.add_numbers(&mut report);
        assert!(!report.is_complete());
    }

    #[test]
    fn a_failed_run_is_reported_with_its_seed() {
        let mut tally = TrialCounts::default();
        tally.count_run(&TrialParameters::from_seed(7), &Ok(exact()));
        tally.count_run(&TrialParameters::from_seed(8), &Err(anyhow::anyhow!("no guest")));
        let mut report = Report::new("exactness", true);
        tally.add_numbers(&mut report);
        assert_eq!(report.figure_value("runs"), Some(2.0));
        assert_eq!(report.figure_value("runs_exact"), Some(1.0));
        assert!(!report.is_complete());
        assert!(report.to_table().contains("seeds [8]"), "{}", report.to_table());
    }
}
