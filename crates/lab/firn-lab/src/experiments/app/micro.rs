//! `app-micro`: transactions that write a count of words in a count of pages.
//!
//! Reproduces Figures 6 to 10 of "Hypervisor-Assisted Application Checkpointing in Virtualized
//! Environments" (section V), natively: trackers in user space and assisted by the operating
//! system; and in a guest, where Firn on the host is a tracker too (see `app-structures`).
//!
//! **What varies**: the tracker; pages per transaction (PPT), writes per page (WPP), the size of
//! the critical data area. **What is equal**: pages are chosen at random, the same ones for every
//! tracker; all pages have been touched before.
//!
//! **What is measured**: microseconds per transaction, the writes included, nothing copied. A
//! break-even point is the value at which two trackers cost the same, by linear interpolation
//! between the two measured values around it; there is none (`null`) if it is not within the
//! measured values.

use anyhow::{Context as _, Result};
use firn_app::TrackerKind;
use firn_report::plot::LinePlot;
use firn_transactions::{GuestCallIdentity, TrackerSystem, WriteShape};
use serde_json::json;

use super::environment::TestEnvironment;
use super::guest::{GuestSize, TransactionGuest};
use crate::lab::{Lab, run_interleaved};
use crate::report::Report;

/// Transactions per run, in quick and in full runs. (The paper: 100,000.)
const TRANSACTIONS: (usize, usize) = (1000, 100_000);
const TRANSACTIONS_IN_GUEST: (usize, usize) = (200, 5000);
/// The maximum count of writes in a run, in which each may be a signal; in a guest that is slower.
const WRITES_MAX: usize = 400_000;
const WRITES_MAX_IN_GUEST: usize = 20_000;
/// Rounds, in quick and in full runs.
const ROUNDS: (usize, usize) = (3, 5);
const ROUNDS_IN_GUEST: (usize, usize) = (1, 3);
/// Pages of the area if its size does not vary: 1 MiB.
const PAGES: usize = 256;

/// One figure: the varied parameter, and the shapes for its values.
struct ParameterSweep {
    name: &'static str,
    title: &'static str,
    x: &'static str,
    at: fn(usize) -> WriteShape,
    values: &'static [usize],
}

const SWEEPS: [ParameterSweep; 3] = [
    ParameterSweep {
        name: "ppt",
        title: "Pages per transaction (WPP 4, 1 MiB)",
        x: "pages per transaction",
        at: |ppt| WriteShape { ppt, wpp: 4, pages: PAGES, areas: 1 },
        values: &[1, 2, 4, 8, 16, 32],
    },
    ParameterSweep {
        name: "wpp",
        title: "Writes per page (PPT 2, 1 MiB)",
        x: "writes per page",
        at: |wpp| WriteShape { ppt: 2, wpp, pages: PAGES, areas: 1 },
        values: &[1, 2, 4, 8, 16],
    },
    ParameterSweep {
        name: "cda_kib",
        title: "Size of the critical data area (PPT 4, WPP 4)",
        x: "KiB",
        at: |kib| WriteShape { ppt: 4, wpp: 4, pages: kib / 4, areas: 1 },
        values: &[64, 256, 1024, 4096],
    },
];

/// Runs the experiment.
pub fn run(lab: &Lab) -> Result<Report> {
    let mut report = lab.vm_report("app-micro");
    for environment in lab
        .extent
        .select_wanted(&[TestEnvironment::Native, TestEnvironment::Guest], |environment| {
            environment.name().to_owned()
        })
    {
        let guest = (environment == TestEnvironment::Guest)
            .then(|| TransactionGuest::boot_guest(lab, environment.systems(), GuestSize::SMALL))
            .transpose()?;
        for sweep in &SWEEPS {
            lab.log_progress(&format!("{}, {}", sweep.title, environment.name()));
            for &value in sweep.values {
                let shape = (sweep.at)(value);
                let runs = match &guest {
                    None => measure_natively(lab, shape)?,
                    Some(guest) => measure_in_guest(lab, guest, shape)?,
                };
                add_times(&mut report, environment, (sweep.name, value), runs);
            }
            draw_plot(&mut report, environment, sweep)?;
        }
    }
    add_break_evens(&mut report);
    Ok(report)
}

/// Adds the break-even points, natively and in a guest.
fn add_break_evens(report: &mut Report) {
    let (pt, emulate) =
        (TrackerSystem::Plain(TrackerKind::Pages), TrackerSystem::Plain(TrackerKind::Emulate));
    let (assisted, pages) = (TrackerSystem::Assisted, TrackerSystem::Plain(TrackerKind::Assisted));
    let (scan, compare) =
        (TrackerSystem::Plain(TrackerKind::Scan), TrackerSystem::Plain(TrackerKind::Compare));
    let mut native = |sweep, name: &str, first, second| {
        add_break_even(report, TestEnvironment::Native, sweep, name, (first, second));
    };
    native("wpp", "emul_pt", emulate, pt);
    native("wpp", "emul_pt_assisted", emulate, assisted);
    for (name, whole) in [("scan", scan), ("compare", compare)] {
        native("ppt", &format!("{name}_pt"), pt, whole);
        native("ppt", &format!("{name}_pt_assisted"), pages, whole);
        native("cda_kib", &format!("{name}_pt"), whole, pt);
    }
    let (noted_words, noted_pages) =
        (TrackerSystem::Plain(TrackerKind::Stores), TrackerSystem::PagesRecorded);
    let mut guest = |name: &str, first, second| {
        add_break_even(report, TestEnvironment::Guest, "wpp", name, (first, second));
    };
    guest("emul_pt", emulate, pt);
    guest("emul_assisted_pt_assisted", noted_words, noted_pages);
}

fn report_key(
    environment: TestEnvironment,
    sweep: &str,
    value: usize,
    system: TrackerSystem,
) -> String {
    format!("{}.us_per_transaction.{sweep}{value}.{}", environment.name(), system.name())
}

/// Microseconds per transaction, by system.
type SystemTimes = Vec<(TrackerSystem, Vec<f64>)>;

fn measure_natively(lab: &Lab, shape: WriteShape) -> Result<SystemTimes> {
    let most = lab.extent.pick(TRANSACTIONS.0, TRANSACTIONS.1);
    let transactions = most.min(WRITES_MAX / (shape.ppt * shape.wpp));
    let mut runs: SystemTimes = TrackerSystem::NATIVE.map(|system| (system, Vec::new())).into();
    let numbers: Vec<usize> = (0..runs.len()).collect();
    run_interleaved(lab.extent.runs(ROUNDS.0, ROUNDS.1), &numbers, |_, &number| {
        let (system, times) = &mut runs[number];
        times.push(shape.measure_tracker(*system, &GuestCallIdentity::default(), transactions)?.us);
        Ok(())
    })?;
    Ok(runs)
}

fn measure_in_guest(
    lab: &Lab,
    guest: &TransactionGuest<'_>,
    shape: WriteShape,
) -> Result<SystemTimes> {
    let most = lab.extent.pick(TRANSACTIONS_IN_GUEST.0, TRANSACTIONS_IN_GUEST.1);
    let transactions = most.min(WRITES_MAX_IN_GUEST / (shape.ppt * shape.wpp));
    let rounds = lab.extent.runs(ROUNDS_IN_GUEST.0, ROUNDS_IN_GUEST.1);
    let measured =
        guest.measure_systems(&["--shape", &shape.name()], &[1], transactions, rounds)?;
    let of = |system: TrackerSystem| {
        let own = measured.iter().filter(|it| it.system == system.name());
        (system, own.map(|it| it.taken.us).collect())
    };
    Ok(TestEnvironment::Guest.systems().iter().map(|&system| of(system)).collect())
}

fn add_times(
    report: &mut Report,
    environment: TestEnvironment,
    (sweep, value): (&str, usize),
    runs: SystemTimes,
) {
    for (system, times) in runs {
        report.add_repetition(json!({ "place": environment.name(), "sweep": sweep, "value": value,
            "tracker": system.name(), "us": times }));
        report.add_sample(report_key(environment, sweep, value, system), times);
    }
}

/// Adds the value at which the first system stops being the cheaper one.
fn add_break_even(
    report: &mut Report,
    environment: TestEnvironment,
    sweep: &str,
    name: &str,
    (first, second): (TrackerSystem, TrackerSystem),
) {
    let values =
        SWEEPS.iter().find(|known| known.name == sweep).map_or(&[][..], |sweep| sweep.values);
    let points = values.iter().filter_map(|&value| {
        let cost = |system| report.figure_value(&report_key(environment, sweep, value, system));
        Some((value as f64, cost(first)? - cost(second)?))
    });
    let points: Vec<_> = points.collect();
    if points.is_empty() {
        return;
    }
    let key = format!("{}.break_even.{sweep}.{name}", environment.name());
    match find_crossing(&points) {
        Some(at) => report.add_number(key, at),
        None => report.add_remark(format!("{key}: none within the measured values")),
    }
}

/// The position at which a line through points first crosses zero upwards.
fn find_crossing(points: &[(f64, f64)]) -> Option<f64> {
    points.windows(2).find_map(|pair| {
        let [(x0, y0), (x1, y1)] = [pair[0], pair[1]];
        (y0 < 0.0 && y1 >= 0.0).then(|| x0 + (x1 - x0) * -y0 / (y1 - y0))
    })
}

fn draw_plot(
    report: &mut Report,
    environment: TestEnvironment,
    sweep: &ParameterSweep,
) -> Result<()> {
    let line = |system: TrackerSystem| {
        let point = |&value: &usize| {
            Some((
                value as f64,
                report.figure_value(&report_key(environment, sweep.name, value, system))?,
            ))
        };
        (system.name().to_owned(), sweep.values.iter().filter_map(point).collect())
    };
    let plot = LinePlot {
        title: format!("{}, {}", sweep.title, environment.name()),
        x: sweep.x.into(),
        y: "microseconds per transaction".into(),
        lines: environment.systems().iter().map(|&system| line(system)).collect(),
    };
    report.add_drawing(
        format!("app-micro-{}-{}", environment.name(), sweep.name),
        plot.to_svg().context("Figures 6 to 10")?,
    );
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_cross_where_they_do() {
        assert_eq!(find_crossing(&[(1.0, -1.0), (2.0, 1.0)]), Some(1.5));
        assert_eq!(find_crossing(&[(1.0, 1.0), (2.0, 2.0)]), None);
    }
}
