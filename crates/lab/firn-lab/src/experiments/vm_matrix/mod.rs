//! `vm-matrix`: which operations work on which kinds of VMs, and whether the guest agrees.
//!
//! Reproduces no figure of a paper: it tests the promise that Firn works on the VMs that people
//! have. Each VM is started by hand, as its users start it, and Firn attaches to it.
//!
//! **What varies**: the kind of VM ([`configurations`]): machine types, memory, disks, cards, consoles,
//! the command lines of libvirt, OpenStack, KubeVirt and Proxmox VE, and what happens during the save.
//!
//! **What is held equal**: the guest writes memory and a disk during every save.
//!
//! **What is measured**: `matrix.CONFIGURATION.OPERATION`:
//!
//! ```text
//!   ok           the command worked, and the guest found its memory and its disk right
//!   refused      the command refused the VM, as `firn doctor` announced
//!   unforeseen   the command refused the VM, although `firn doctor` announced that it works
//!   failed       another error
//!   wrong        the guest found memory or disk wrong
//! ```
//!
//! `configurations`, `ok`, `refused`, `unforeseen`, `failed`, `wrong` count them. A configuration
//! that this host can't have is a remark and is counted as `skipped`. The experiment fails if
//! anything is `unforeseen`, `failed` or `wrong`, or if a VM that libvirt, OpenStack, KubeVirt or
//! Proxmox VE make by default is refused a live checkpoint, an incremental one, or a restore.

mod configurations;
mod events;
mod trial;

use std::collections::BTreeMap;
use std::time::Instant;

use anyhow::Result;
use serde_json::json;

use self::configurations::{MatrixConfiguration, all_configurations};
use self::trial::{MatrixBench, OperationOutcome, OperationResult};
use crate::lab::Lab;
use crate::report::Report;

/// Operations that have to work on the VMs that others make by default.
const NEEDED: [&str; 3] = ["checkpoint", "incremental", "restore"];

/// Configurations of a quick run: one of each maker.
const QUICK: [&str; 5] =
    ["plain-q35", "libvirt-private", "proxmox-pc", "openstack", "balloon-inflates"];

/// Runs the experiment.
pub fn run(lab: &Lab) -> Result<Report> {
    let mut report = lab.vm_report("vm-matrix");
    let bench = MatrixBench::new(lab)?;
    let all = all_configurations();
    let names: Vec<&str> = all.iter().map(|it| it.name).collect();
    let wanted = lab.extent.select_wanted(&names, str::to_owned);
    let mut counts = MatrixCounts::default();
    for configuration in all.iter().filter(|it| is_wanted(lab, &wanted, it.name)) {
        let since = Instant::now();
        match bench.try_configuration(configuration) {
            Ok(results) => {
                counts.add_results(configuration, &results, &mut report);
                lab.log_progress(&describe_results(configuration.name, &results, since));
            }
            Err(why) => {
                counts.skipped += 1;
                lab.log_progress(&format!("{}: skipped: {why:#}", configuration.name));
                report.add_remark(format!("{} is skipped: {why:#}", configuration.name));
            }
        }
    }
    counts.add_numbers(&mut report);
    Ok(report)
}

fn is_wanted(lab: &Lab, wanted: &[&str], name: &str) -> bool {
    let is_quick = lab.extent.quick && lab.extent.only.is_empty();
    wanted.contains(&name) && (!is_quick || QUICK.contains(&name))
}

/// Counts over all configurations.
#[derive(Default)]
struct MatrixCounts {
    configurations: u64,
    skipped: u64,
    by_verdict: BTreeMap<&'static str, u64>,
    /// Descriptions of results that must not be.
    bad: Vec<String>,
}

impl MatrixCounts {
    fn add_results(
        &mut self,
        configuration: &MatrixConfiguration,
        results: &[OperationResult],
        report: &mut Report,
    ) {
        self.configurations += 1;
        let name = configuration.name;
        for OperationResult { operation, outcome } in results {
            *self.by_verdict.entry(outcome.verdict()).or_default() += 1;
            report.add_verdict(format!("matrix.{name}.{operation}"), outcome.verdict());
            let is_needed = configuration.is_default && NEEDED.contains(operation);
            if outcome.is_bad() || (is_needed && !matches!(outcome, OperationOutcome::Ok)) {
                self.bad.push(format!("{name}, {operation}: {outcome}"));
            }
            let why = outcome.reason();
            let verdict = outcome.verdict();
            report.add_repetition(json!({
                "configuration": name, "operation": operation, "verdict": verdict, "why": why
            }));
        }
    }

    fn add_numbers(&self, report: &mut Report) {
        report.add_number("configurations", self.configurations as f64);
        report.add_number("skipped", self.skipped as f64);
        for verdict in OperationOutcome::VERDICTS {
            let count = self.by_verdict.get(verdict).copied().unwrap_or_default();
            report.add_number(verdict, count as f64);
        }
        self.bad.iter().for_each(|bad| report.mark_failed(bad.clone()));
    }
}

fn describe_results(name: &str, results: &[OperationResult], since: Instant) -> String {
    let cells =
        results.iter().map(|OperationResult { operation, outcome }| match outcome.is_bad() {
            true => format!("{operation} {outcome}"),
            false => format!("{operation} {}", outcome.verdict()),
        });
    let cells: Vec<String> = cells.collect();
    format!("{name}: {}, {:.0} s", cells.join(", "), since.elapsed().as_secs_f64())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn result(operation: &'static str, outcome: OperationOutcome) -> OperationResult {
        OperationResult { operation, outcome }
    }

    fn count(is_default: bool, results: &[OperationResult]) -> Report {
        let all = all_configurations();
        let configuration = all.iter().find(|it| it.is_default == is_default).unwrap();
        let (mut counts, mut report) = (MatrixCounts::default(), Report::new("vm-matrix", true));
        counts.add_results(configuration, results, &mut report);
        counts.add_numbers(&mut report);
        report
    }

    #[test]
    fn a_default_vm_that_is_refused_fails_the_experiment() {
        let refused = || [result("restore", OperationOutcome::Refused("why".into()))];
        assert!(!count(true, &refused()).is_complete());
        assert!(count(false, &refused()).is_complete());
        assert!(
            count(true, &[result("protect", OperationOutcome::Refused("why".into()))])
                .is_complete()
        );
    }

    #[test]
    fn what_is_wrong_is_counted_and_named() {
        let wrong = OperationOutcome::Wrong("3 pages".into());
        let report =
            count(false, &[result("restore", wrong), result("suspend", OperationOutcome::Ok)]);
        assert_eq!(report.figure_value("wrong"), Some(1.0));
        assert_eq!(report.figure_value("ok"), Some(1.0));
        assert!(report.to_table().contains("restore: wrong: 3 pages"), "{}", report.to_table());
        assert!(!report.is_complete());
    }

    #[test]
    fn names_are_used_once() {
        let mut names: Vec<&str> = all_configurations().iter().map(|it| it.name).collect();
        let count = names.len();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), count);
        assert!(count >= 45, "{count} configurations");
        assert!(QUICK.iter().all(|name| names.contains(name)));
    }
}
