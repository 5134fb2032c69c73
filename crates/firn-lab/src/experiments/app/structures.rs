//! `app-structures`: operations on thirteen data structures, each a transaction, or five in one.
//!
//! Reproduces Table 2 and Figures 11 to 18 of "Hypervisor-Assisted Application Checkpointing in Virtualized Environments"
//! (section VI), natively: trackers in user space and assisted by the operating system.
//!
//! **What varies**: the tracker, the structure and its operation (the 20 pairs of Table 2), operations per transaction
//! (OPT, 1 or 5). **What is held equal**: keys and their order, the size of the area (what 10,000 elements need), 10,000
//! operations. Insertions begin with an empty structure, deletions with all elements, and delete the last inserted first.
//!
//! **What is measured**: microseconds per transaction, the operations included (Figures 11 and 13; `us_per_transaction`);
//! the same with a copy of what changed (Figure 17; `us_with_copy`); bytes that changed, as told (Figures 15 and 16;
//! `bytes`). `pt_assisted` is what sessions do by default: words, by comparing pages with the last committed copy;
//! `pt_assisted_pages` tells pages, as PT does. Speedups (Figures 12, 14, 18) are PT over these, and emulation over
//! `pt_assisted` (`emul_assisted`), which tells words as well: natively no layer below sees single stores.

use anyhow::{Context as _, Result};
use firn_app::Kind;
use firn_report::plot::BarPlot;
use firn_structures::Structure;
use serde_json::json;

use super::tracked::{System, Taken, measure};
use crate::lab::{Lab, interleaved};
use crate::report::Report;
use crate::stats::Sample;

/// Operations on each structure, in quick and in full runs. Areas have room for 10,000 elements in either.
const OPERATIONS: (usize, usize) = (2000, 10_000);
const ELEMENTS: usize = 10_000;
/// Rounds, in quick and in full runs.
const ROUNDS: (usize, usize) = (3, 7);
/// Operations per transaction.
const OPT: [usize; 2] = [1, 5];

/// A structure and an operation on it.
#[derive(Clone, Copy, Debug)]
struct Workload {
    structure: Structure,
    deletes: bool,
}

impl Workload {
    /// The pairs of Table 2.
    fn all() -> Vec<Self> {
        let both = |structure: Structure| {
            let deletions = structure.deletes.then_some(true);
            [Some(false), deletions]
                .into_iter()
                .flatten()
                .map(move |deletes| Self { structure, deletes })
        };
        firn_structures::ALL.into_iter().flat_map(both).collect()
    }

    fn name(self) -> String {
        let operation = if self.deletes { "delete" } else { "insert" };
        format!("{}-{operation}", self.structure.name)
    }

    fn fill(self, words: &mut [u64]) {
        (self.structure.create)(words);
        if self.deletes {
            (0..ELEMENTS).for_each(|number| (self.structure.insert)(words, key(number)));
        }
    }

    fn operate(self, words: &mut [u64], number: usize) {
        match self.deletes {
            true => (self.structure.delete)(words, key(ELEMENTS - 1 - number)),
            false => (self.structure.insert)(words, key(number)),
        }
    }

    fn measure(self, system: System, operations: usize, opt: usize) -> Result<Taken> {
        let words = (self.structure.words)(ELEMENTS);
        let work = |words: &mut [u64], transaction: usize| {
            (0..opt).for_each(|number| self.operate(words, transaction * opt + number));
        };
        measure(system, words, operations / opt, |words| self.fill(words), work)
    }
}

/// Distinct, in no order.
fn key(number: usize) -> u64 {
    (number as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 1
}

/// All runs of one cell.
#[derive(Clone, Debug)]
struct Cell {
    workload: Workload,
    system: System,
    opt: usize,
    runs: Vec<Taken>,
}

impl Cell {
    fn median(&self, of: impl Fn(&Taken) -> f64) -> Result<f64> {
        Ok(Sample::new(self.runs.iter().map(of)).context("nothing was measured")?.median())
    }
}

/// Runs it.
pub fn run(lab: &Lab) -> Result<Report> {
    let mut report = lab.report("app-structures");
    let operations = lab.extent.pick(OPERATIONS.0, OPERATIONS.1);
    let mut cells = Vec::new();
    for workload in Workload::all() {
        lab.say(&workload.name());
        let mut row = cells_of(workload);
        let numbers: Vec<usize> = (0..row.len()).collect();
        interleaved(lab.extent.runs(ROUNDS.0, ROUNDS.1), &numbers, |_, &number| {
            let cell = &mut row[number];
            cell.runs.push(workload.measure(cell.system, operations, cell.opt)?);
            Ok(())
        })?;
        cells.append(&mut row);
    }
    for cell in &cells {
        tell(&mut report, cell, operations)?;
    }
    for opt in OPT {
        speedups(&mut report, opt);
        draw(&mut report, opt)?;
    }
    report.note("speedup.emul_assisted is emul over pt_assisted: nothing below tells single stores here, and comparing pages \
        with the last committed copy gives their words");
    Ok(report)
}

fn cells_of(workload: Workload) -> Vec<Cell> {
    let cell = |system, opt| Cell { workload, system, opt, runs: Vec::new() };
    OPT.iter().flat_map(|&opt| System::ALL.map(|system| cell(system, opt))).collect()
}

/// What distinguishes the keys of five operations per transaction.
fn suffix(opt: usize) -> String {
    if opt == 1 { String::new() } else { format!(".opt{opt}") }
}

fn us_key(workload: Workload, system: System, opt: usize, figure: &str) -> String {
    format!("native.{figure}{}.{}.{}", suffix(opt), workload.name(), system.name())
}

fn tell(report: &mut Report, cell: &Cell, operations: usize) -> Result<()> {
    let Cell { workload, system, opt, .. } = *cell;
    let key = |figure| us_key(workload, system, opt, figure);
    report.sample(key("us_per_transaction"), cell.runs.iter().map(|taken| taken.us));
    report.sample(key("us_with_copy"), cell.runs.iter().map(|taken| taken.us_with_copy));
    let bytes = cell.median(|taken| taken.bytes)?;
    report.number(format!("bytes{}.{}.{}", suffix(opt), workload.name(), system.name()), bytes);
    report.repetition(json!({ "workload": workload.name(), "tracker": system.name(), "opt": opt,
        "operations": operations, "us": cell.runs.iter().map(|taken| taken.us).collect::<Vec<_>>(),
        "runs_per_transaction": cell.median(|taken| taken.runs)? / (operations / opt) as f64 }));
    Ok(())
}

/// Mean and best of one system over another, over all workloads.
fn speedups(report: &mut Report, opt: usize) {
    let pairs = [
        ("pt_assisted", Kind::Pages, System::Assisted),
        ("pt_assisted_pages", Kind::Pages, System::Plain(Kind::Assisted)),
        ("emul_assisted", Kind::Emulate, System::Assisted),
        ("scan", Kind::Pages, System::Plain(Kind::Scan)),
        ("compare", Kind::Pages, System::Plain(Kind::Compare)),
    ];
    for (name, slow, quick) in pairs {
        for (figure, key) in
            [("us_per_transaction", "speedup"), ("us_with_copy", "speedup_with_copy")]
        {
            let ratios = ratios(report, opt, figure, System::Plain(slow), quick);
            let Some(ratios) = Sample::new(ratios) else { continue };
            report.number(format!("native.{key}{}.{name}.mean", suffix(opt)), ratios.mean());
            report.number(format!("native.{key}{}.{name}.max", suffix(opt)), ratios.max());
        }
    }
}

fn ratios(report: &Report, opt: usize, figure: &str, slow: System, quick: System) -> Vec<f64> {
    let value = |workload, system| report.value(&us_key(workload, system, opt, figure));
    let ratio = |workload: &Workload| Some(value(*workload, slow)? / value(*workload, quick)?);
    Workload::all().iter().filter_map(ratio).collect()
}

fn draw(report: &mut Report, opt: usize) -> Result<()> {
    let workloads = Workload::all();
    let series = |system: System| {
        let value = |workload: &Workload| {
            report.value(&us_key(*workload, system, opt, "us_per_transaction")).unwrap_or(0.0)
        };
        (system.name().to_owned(), workloads.iter().map(value).collect())
    };
    let plot = BarPlot {
        title: format!("Transactions of {opt} operation(s) on data structures"),
        y: "microseconds per transaction".into(),
        groups: workloads.iter().map(|workload| workload.name()).collect(),
        series: System::ALL.iter().map(|&system| series(system)).collect(),
    };
    let svg = plot.svg().context("Figures 11 and 13")?;
    report.drawing(format!("app-structures-opt{opt}"), svg);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_papers_pairs_are_measured() {
        let names: Vec<_> = Workload::all().into_iter().map(Workload::name).collect();
        assert_eq!(names.len(), 20);
        assert!(names.contains(&"leftheap-delete".to_owned()));
        assert!(!names.contains(&"avl-delete".to_owned()));
    }

    #[test]
    fn every_workload_changes_something_in_every_transaction() {
        for workload in Workload::all() {
            let taken = workload.measure(System::Plain(Kind::Compare), 20, 5).unwrap();
            assert!(taken.bytes >= 4.0 * 8.0, "{}", workload.name());
        }
    }
}
