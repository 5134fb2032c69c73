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

mod drawn;
pub(super) mod trial;

use std::collections::BTreeMap;
use std::time::Instant;

use anyhow::Result;
use serde_json::{Value, json};

use self::drawn::TrialParameters;
use self::trial::{TrialBench, TrialOutcome};
use crate::lab::Lab;
use crate::report::Report;

/// Runs the experiment.
pub fn run(lab: &Lab) -> Result<Report> {
    let mut report = lab.vm_report("exactness");
    let bench = TrialBench::new(lab)?;
    let mut tally = TrialCounts::default();
    for number in 0..lab.extent.runs(6, 216) {
        let drawn = TrialParameters::from_seed(lab.extent.seed + number as u64);
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

/// Counts over all runs.
#[derive(Default)]
struct TrialCounts {
    runs: u64,
    sums: BTreeMap<&'static str, u64>,
    drawn: BTreeMap<String, u64>,
    /// Seeds of runs that were not exact.
    not_exact: Vec<u64>,
}

impl TrialCounts {
    fn count_run(&mut self, drawn: &TrialParameters, outcome: &Result<TrialOutcome>) {
        self.runs += 1;
        for label in drawn.figure_labels() {
            *self.drawn.entry(label).or_default() += 1;
        }
        for (key, value) in figure_values(outcome) {
            *self.sums.entry(key).or_default() += value;
        }
        if !outcome.as_ref().is_ok_and(TrialOutcome::is_exact) {
            self.not_exact.push(drawn.seed);
        }
    }

    fn add_numbers(&self, report: &mut Report) {
        report.add_number("runs", self.runs as f64);
        for (key, value) in self.sums.iter().map(|(key, value)| (*key, value)) {
            report.add_number(key, *value as f64);
        }
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
fn figure_values(outcome: &Result<TrialOutcome>) -> [(&'static str, u64); 6] {
    let none = TrialOutcome::default();
    let found = outcome.as_ref().unwrap_or(&none);
    [
        ("differing_blocks", found.differing_blocks),
        ("wrong_pages", found.wrong_pages),
        ("wrong_echoes", found.wrong_echoes),
        ("runs_exact", u64::from(outcome.is_ok() && found.is_exact())),
        ("results_equal", u64::from(found.results_equal)),
        ("in_the_middle", u64::from(found.in_the_middle)),
    ]
}

fn to_repetition(drawn: &TrialParameters, outcome: &Result<TrialOutcome>, took_s: f64) -> Value {
    let mut run = json!({ "seed": drawn.seed, "took_s": took_s, "drawn": drawn.to_facts() });
    match outcome {
        Ok(found) => {
            figure_values(outcome).into_iter().for_each(|(key, value)| run[key] = json!(value));
            run["facts"] = found.facts.clone();
        }
        Err(error) => run["error"] = json!(format!("{error:#}")),
    }
    run
}

fn describe_run(drawn: &TrialParameters, outcome: &Result<TrialOutcome>, took_s: f64) -> String {
    let came = match outcome {
        Ok(found) if found.is_exact() => "exact".to_owned(),
        Ok(found) => format!("NOT EXACT: {found:?}"),
        Err(error) => format!("FAILED: {error:#}"),
    };
    let (mib, vcpus, mode) = (drawn.ram.total_kib() >> 10, drawn.vcpus, drawn.mode);
    format!("seed {}: {vcpus} vCPUs, {mib} MiB, {mode}: {came}, {took_s:.0} s", drawn.seed)
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
