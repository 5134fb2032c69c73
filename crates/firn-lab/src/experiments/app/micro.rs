//! `app-micro`: transactions that write so many words of so many pages.
//!
//! Reproduces Figures 6 to 10 of "Hypervisor-Assisted Application Checkpointing in Virtualized Environments" (section V),
//! natively: trackers in user space and assisted by the operating system.
//!
//! **What varies**: the tracker; pages per transaction (PPT), writes per page (WPP), the size of the critical data area.
//! **What is held equal**: pages are drawn at random, the same ones for every tracker; all pages have been touched before.
//!
//! **What is measured**: microseconds per transaction, the writes included, nothing copied. Break-even points are where two
//! trackers cost the same, between the two measured values around it, on a straight line; `null` where there is none within
//! what was measured.

use anyhow::{Context as _, Result};
use firn_app::Kind;
use firn_report::plot::LinePlot;
use firn_transactions::{Calls, Shape, System, measure};
use serde_json::json;

use crate::lab::{Lab, interleaved};
use crate::report::Report;

/// Transactions of a run, in quick and in full runs. (The paper: 100,000.)
const TRANSACTIONS: (usize, usize) = (1000, 100_000);
/// At most so many writes in a run, where each may be a signal.
const WRITES_MAX: usize = 400_000;
/// Rounds, in quick and in full runs.
const ROUNDS: (usize, usize) = (3, 5);
/// Pages of the area where its size does not vary: 1 MiB.
const PAGES: usize = 256;

/// One figure: what runs to the right, and the shapes along it.
struct Sweep {
    name: &'static str,
    title: &'static str,
    x: &'static str,
    at: fn(usize) -> Shape,
    values: &'static [usize],
}

const SWEEPS: [Sweep; 3] = [
    Sweep {
        name: "ppt",
        title: "Pages per transaction (WPP 4, 1 MiB)",
        x: "pages per transaction",
        at: |ppt| Shape { ppt, wpp: 4, pages: PAGES },
        values: &[1, 2, 4, 8, 16, 32],
    },
    Sweep {
        name: "wpp",
        title: "Writes per page (PPT 2, 1 MiB)",
        x: "writes per page",
        at: |wpp| Shape { ppt: 2, wpp, pages: PAGES },
        values: &[1, 2, 4, 8, 16],
    },
    Sweep {
        name: "cda_kib",
        title: "Size of the critical data area (PPT 4, WPP 4)",
        x: "KiB",
        at: |kib| Shape { ppt: 4, wpp: 4, pages: kib / 4 },
        values: &[64, 256, 1024, 4096],
    },
];

/// Runs it.
pub fn run(lab: &Lab) -> Result<Report> {
    let mut report = lab.report("app-micro");
    for sweep in &SWEEPS {
        lab.say(sweep.title);
        for &value in sweep.values {
            measure_at(lab, &mut report, sweep, value)?;
        }
        draw(&mut report, sweep)?;
    }
    let (pt, emulate) = (System::Plain(Kind::Pages), System::Plain(Kind::Emulate));
    let (assisted, pages) = (System::Assisted, System::Plain(Kind::Assisted));
    let (scan, compare) = (System::Plain(Kind::Scan), System::Plain(Kind::Compare));
    break_even(&mut report, "wpp", "emul_pt", emulate, pt);
    break_even(&mut report, "wpp", "emul_pt_assisted", emulate, assisted);
    for (name, whole) in [("scan", scan), ("compare", compare)] {
        break_even(&mut report, "ppt", &format!("{name}_pt"), pt, whole);
        break_even(&mut report, "ppt", &format!("{name}_pt_assisted"), pages, whole);
        break_even(&mut report, "cda_kib", &format!("{name}_pt"), whole, pt);
    }
    Ok(report)
}

fn key(sweep: &str, value: usize, system: System) -> String {
    format!("native.us_per_transaction.{sweep}{value}.{}", system.name())
}

fn measure_at(lab: &Lab, report: &mut Report, sweep: &Sweep, value: usize) -> Result<()> {
    let shape = (sweep.at)(value);
    let most = lab.extent.pick(TRANSACTIONS.0, TRANSACTIONS.1);
    let transactions = most.min(WRITES_MAX / (shape.ppt * shape.wpp));
    let mut times = vec![Vec::new(); System::NATIVE.len()];
    let numbers: Vec<usize> = (0..System::NATIVE.len()).collect();
    interleaved(lab.extent.runs(ROUNDS.0, ROUNDS.1), &numbers, |_, &number| {
        let work = |words: &mut [u64], transaction: usize| shape.write(words, transaction);
        let (system, calls) = (System::NATIVE[number], Calls::default());
        let taken = measure(system, &calls, shape.words(), transactions, |_| {}, work)?;
        times[number].push(taken.us);
        Ok(())
    })?;
    for (system, times) in System::NATIVE.into_iter().zip(times) {
        report.repetition(json!({ "sweep": sweep.name, "value": value, "tracker": system.name(),
            "transactions": transactions, "us": times }));
        report.sample(key(sweep.name, value, system), times);
    }
    Ok(())
}

/// Where the first system stops being the cheaper one.
fn break_even(report: &mut Report, sweep: &str, name: &str, first: System, second: System) {
    let values =
        SWEEPS.iter().find(|known| known.name == sweep).map_or(&[][..], |sweep| sweep.values);
    let points = values.iter().filter_map(|&value| {
        let cost = |system| report.value(&key(sweep, value, system));
        Some((value as f64, cost(first)? - cost(second)?))
    });
    let points: Vec<_> = points.collect();
    let key = format!("native.break_even.{sweep}.{name}");
    match crossing(&points) {
        Some(at) => report.number(key, at),
        None => report.note(format!("{key}: none within what was measured")),
    }
}

/// Where a line through points first goes from below zero to above.
fn crossing(points: &[(f64, f64)]) -> Option<f64> {
    points.windows(2).find_map(|pair| {
        let [(x0, y0), (x1, y1)] = [pair[0], pair[1]];
        (y0 < 0.0 && y1 >= 0.0).then(|| x0 + (x1 - x0) * -y0 / (y1 - y0))
    })
}

fn draw(report: &mut Report, sweep: &Sweep) -> Result<()> {
    let line = |system: System| {
        let point =
            |&value: &usize| Some((value as f64, report.value(&key(sweep.name, value, system))?));
        (system.name().to_owned(), sweep.values.iter().filter_map(point).collect())
    };
    let plot = LinePlot {
        title: sweep.title.into(),
        x: sweep.x.into(),
        y: "microseconds per transaction".into(),
        lines: System::NATIVE.into_iter().map(line).collect(),
    };
    report.drawing(format!("app-micro-{}", sweep.name), plot.svg().context("Figures 6 to 10")?);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_cross_where_they_do() {
        assert_eq!(crossing(&[(1.0, -1.0), (2.0, 1.0)]), Some(1.5));
        assert_eq!(crossing(&[(1.0, 1.0), (2.0, 2.0)]), None);
    }
}
