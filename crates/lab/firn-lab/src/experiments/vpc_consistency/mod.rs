//! `vpc-consistency`: the consistency that clients outside observe in VMs that fail over as a
//! cluster.
//!
//! Two VMs of two hosts run a bank (`firn-guest bank`) and pass a token round (`firn-guest ring`);
//! a third host is their backup. Clients outside transfer money and read accounts, over connections
//! of their own. Then a component is lost, one kind after another; the component and the time are
//! drawn from the seed:
//!
//! | kind | what happens |
//! |---|---|
//! | `vm` | a hypervisor is killed |
//! | `supervisor` | a VM's supervisor and its guards are killed |
//! | `agent` | the agent of a primary's host is killed |
//! | `keeper` | the agent of the backup is killed |
//! | `host` | all processes of a primary's host are killed |
//! | `link` | a primary's host is cut off, and connected again later, or after its replacement |
//! | `frozen` | all processes of a primary's host are stopped, and continue later, or after that |
//!
//! **How it is recovered** (`--only VARIANT` runs one of these):
//!
//! - `holding`, by an operator: where global checkpoints continue, nothing is done. Otherwise all
//!   processes of the primaries' hosts are ended, so that no VM runs anywhere, and `firn cluster
//!   failover` runs all VMs at the third host. (After `keeper`, half of the times, its agent is
//!   started again, and the cluster is released and protected anew.)
//! - `by-record`, without a person: the hosts agree, by a raft of their agents, and the cluster
//!   fails over by itself if it has to. Nothing is ended. A host that was cut off or stopped until
//!   it was replaced returns, and its VM, which has been replaced, may try to send. (After
//!   `keeper`, half of the times, its agent is started again.)
//!
//! The clients continue, and then all results are checked. The keys of `by-record` begin with
//! `by_record`:
//!
//! - `lost_transfers`: acknowledged, and not in the books of both VMs; `doubled_transfers`: twice
//!   in the books of one.
//! - `sum_wrong`: the accounts hold more or less in total than in the beginning.
//! - `not_linearizable`: the clients' observations have no order (`firn-linear`); the reason is
//!   among the notes. `undecided`: the check took too long.
//! - `ring_wrong`: the token came twice, went back or was lost, a report of a VM on it to the
//!   outside was undone, or it does not move.
//! - `broken_connections`: of the VMs, with each other, and of patient clients. None has to break.
//! - `failed`: a step could not be done, or a client got no answer.
//! - `gap_s`: the longest time without an answer to any client, the operator's time included.
//!
//! Each trial restores the VMs from the same images, so that it can be repeated alone: its own seed
//! is among the repetitions, and `--seed` with `--runs 1` draws it first.
//!
//! **The control**: the same with output commit switched off (fault point `net.hold`): frames leave
//! when they are sent. Its keys begin with `without_holding`, and it has to detect an error.

mod audit;
mod clients;
mod fault;
mod ring;
mod trial;
mod vms;

use std::time::Duration;

use anyhow::Result;
use serde_json::{Value, json};

use crate::experiments::pauses::add_percentiles;
use crate::lab::Lab;
use crate::report::Report;
use crate::site::{ConsensusKind, HostSite, SitePlan};
use fault::{FaultPlan as Fault, LossKind};
use trial::FaultTrial;
use vms::SavedVms;

const PERCENTILES: [(&str, f64); 2] = [("p50", 50.0), ("p95", 95.0)];
const HOSTS: [&str; 3] = ["a", "b", "c"];
/// Duration of a lease, where there are leases.
const LEASE: Duration = Duration::from_millis(800);
/// The counts of each trial, besides the number of trials.
const COUNTS: [&str; 8] = [
    "lost_transfers",
    "doubled_transfers",
    "sum_wrong",
    "not_linearizable",
    "undecided",
    "ring_wrong",
    "broken_connections",
    "failed",
];
/// Counts that must be zero. A connection that breaks is reported, but clients do not observe an
/// error.
const WRONG: [&str; 7] = [
    "lost_transfers",
    "doubled_transfers",
    "sum_wrong",
    "not_linearizable",
    "undecided",
    "ring_wrong",
    "failed",
];

/// How the VMs are recovered, and whether output commit is on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ConsistencyVariant {
    Holding,
    ByRecord,
    WithoutHolding,
}

impl ConsistencyVariant {
    const ALL: [Self; 3] = [Self::Holding, Self::ByRecord, Self::WithoutHolding];

    fn name(self) -> &'static str {
        match self {
            Self::Holding => "holding",
            Self::ByRecord => "by-record",
            Self::WithoutHolding => "without-holding",
        }
    }

    /// The number of faults in quick and in full runs.
    fn fault_counts(self) -> (usize, usize) {
        match self {
            Self::Holding => (7, 400),
            Self::ByRecord => (7, 100),
            Self::WithoutHolding => (2, 20),
        }
    }

    fn site_plan(self) -> SitePlan<'static> {
        let agreement = (self == Self::ByRecord).then_some(ConsensusKind::Embedded);
        SitePlan { hosts: &HOSTS, agreement, lease: LEASE }
    }

    /// The fault that is armed in the supervisors of the primaries.
    fn armed_fault(self) -> Option<&'static str> {
        match self {
            Self::Holding | Self::ByRecord => None,
            Self::WithoutHolding => Some("net.hold=EIO"),
        }
    }

    fn report_key(self, key: &str) -> String {
        match self {
            Self::Holding => key.to_owned(),
            Self::ByRecord => format!("by_record.{key}"),
            Self::WithoutHolding => format!("without_holding.{key}"),
        }
    }
}

/// Runs the experiment.
pub fn run(lab: &Lab) -> Result<Report> {
    let mut report = lab.vm_report("vpc-consistency");
    let vms = SavedVms::prepare_images(
        lab,
        &HostSite::build_site(lab, &ConsistencyVariant::Holding.site_plan())?,
    )?;
    for variant in
        lab.extent.select_wanted(&ConsistencyVariant::ALL, |variant| variant.name().to_owned())
    {
        let mut site = HostSite::build_site(lab, &variant.site_plan())?;
        let (quick, full) = variant.fault_counts();
        let faults = lab.extent.runs(quick, full);
        for number in 0..faults {
            let seed = lab.extent.seed + number as u64;
            let facts = run_trial(lab, &mut site, &vms, variant, seed);
            lab.log_progress(&format!("{}, {} of {faults}: {facts}", variant.name(), number + 1));
            report.add_repetition(facts);
        }
        add_numbers(variant, &mut report);
    }
    Ok(report)
}

/// Runs the trial of one fault.
fn run_trial(
    lab: &Lab,
    site: &mut HostSite,
    vms: &SavedVms,
    variant: ConsistencyVariant,
    seed: u64,
) -> Value {
    let plan = Fault::draw_plan(seed);
    let mut facts = json!({ "way": variant.name(), "seed": seed, "kind": plan.kind.name() });
    let life = FaultTrial::begin_trial(lab, site, vms, variant, seed);
    match life.and_then(|life| life.run_to_end(&plan)) {
        Ok(found) => merge_facts(&mut facts, found),
        Err(error) => {
            merge_facts(&mut facts, json!({ "failed": 1, "why": [format!("{error:#}")] }))
        }
    }
    facts
}

fn merge_facts(facts: &mut Value, more: Value) {
    if let (Some(facts), Value::Object(more)) = (facts.as_object_mut(), more) {
        facts.extend(more);
    }
}

fn add_numbers(variant: ConsistencyVariant, report: &mut Report) {
    let of_variant = |fault: &&Value| fault["way"] == variant.name();
    let faults: Vec<Value> = report.repetitions().iter().filter(of_variant).cloned().collect();
    report.add_number(variant.report_key("faults"), faults.len() as f64);
    for kind in LossKind::ALL {
        let count = faults.iter().filter(|fault| fault["kind"] == kind.name()).count();
        report.add_number(variant.report_key(&format!("faults.{}", kind.name())), count as f64);
    }
    let sum = |key: &str| faults.iter().filter_map(|fault| fault[key].as_f64()).sum::<f64>();
    for key in ["failovers", "operations", "transfers"] {
        report.add_number(variant.report_key(key), sum(key));
    }
    for key in COUNTS {
        report.add_number(variant.report_key(key), sum(key));
    }
    let is_wrong = |fault: &&Value| WRONG.iter().any(|&key| fault[key].as_u64() > Some(0));
    let wrong: Vec<&Value> = faults.iter().filter(is_wrong).collect();
    report.add_number(variant.report_key("wrong"), wrong.len() as f64);
    for fault in &wrong {
        report.add_remark(format!(
            "{}, seed {}: {}",
            variant.name(),
            fault["seed"],
            error_text(fault)
        ));
    }
    let gaps = faults.iter().filter_map(|fault| fault["gap_s"].as_f64()).collect();
    add_percentiles(&variant.report_key("gap_s"), gaps, &PERCENTILES, report);
    match (variant, wrong.len()) {
        (ConsistencyVariant::Holding | ConsistencyVariant::ByRecord, 1..) => {
            report.mark_failed("clients observed errors, see above")
        }
        (ConsistencyVariant::WithoutHolding, 0) => {
            report
                .mark_failed("without output commit there was no error: the test can't detect any");
        }
        _ => (),
    }
}

fn error_text(fault: &Value) -> String {
    let lines = fault["why"].as_array().into_iter().flatten().filter_map(Value::as_str);
    format!(
        "{}: {}",
        fault["kind"].as_str().unwrap_or_default(),
        lines.collect::<Vec<_>>().join("; ")
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report(variant: ConsistencyVariant, lost: u64) -> Report {
        let mut report = Report::new("vpc-consistency", true);
        for (seed, lost) in [(1, 0), (2, lost)] {
            report.add_repetition(
                json!({ "way": variant.name(), "seed": seed, "kind": "host", "gap_s": 1.5,
                "lost_transfers": lost, "why": ["transfer 7 is lost"] }),
            );
        }
        add_numbers(variant, &mut report);
        report
    }

    #[test]
    fn a_lost_transfer_fails_a_run_and_is_expected_in_the_control() {
        assert!(report(ConsistencyVariant::Holding, 0).is_complete());
        let wrong = report(ConsistencyVariant::Holding, 1);
        assert!(
            !wrong.is_complete() && wrong.to_table().contains("seed 2: host: transfer 7 is lost")
        );
        assert_eq!(wrong.figure_value("lost_transfers"), Some(1.0));
        assert_eq!(wrong.figure_value("faults.host"), Some(2.0));
        assert!(!report(ConsistencyVariant::ByRecord, 1).is_complete());
        assert!(report(ConsistencyVariant::WithoutHolding, 1).is_complete());
        assert!(!report(ConsistencyVariant::WithoutHolding, 0).is_complete());
    }
}
