//! Pause of a checkpoint, by the size of the guest's RAM.

use anyhow::{Context as _, Result};
use firn_report::plot::BarPlot;

use crate::experiments::pauses::{Case, Guest, Load, System, measured, percentiles};
use crate::lab::{Lab, interleaved};
use crate::report::Report;

/// The size of a guest's RAM, with its load and number of rounds.
#[derive(Clone, Copy, Debug)]
struct Size {
    name: &'static str,
    mib: u32,
    /// How much of it is written all the time, in quick and in full runs.
    written_mib: (u32, u32),
    /// Pauses of either kind, in quick and in full runs.
    rounds: (usize, usize),
}

const SIZES: [Size; 4] = [
    Size { name: "256MiB", mib: 256, written_mib: (128, 128), rounds: (20, 40) },
    Size { name: "1GiB", mib: 1024, written_mib: (512, 768), rounds: (12, 40) },
    Size { name: "4GiB", mib: 4096, written_mib: (2048, 3072), rounds: (9, 40) },
    Size { name: "8GiB", mib: 8192, written_mib: (4096, 6144), rounds: (8, 40) },
];

const PERCENTILES: [(&str, f64); 2] = [("p50", 50.0), ("p95", 95.0)];

/// The key of a system's pauses.
fn pause_key(system: System) -> &'static str {
    match system {
        System::Firn => "downtime_ms",
        System::Floor => "floor_ms",
    }
}

/// The key of a system's pauses by the guest's clock.
fn still_key(system: System) -> &'static str {
    match system {
        System::Firn => "stood_still_ms",
        System::Floor => "floor_stood_still_ms",
    }
}

/// Measures every size, and adds the figures to the report.
pub(super) fn run(lab: &Lab, report: &mut Report) -> Result<()> {
    for size in SIZES {
        let load = Load::FlatOut { mib: lab.extent.pick(size.written_mib.0, size.written_mib.1) };
        let mut guest =
            Guest::start(lab, Case { name: size.name.to_owned(), mib: size.mib, load })?;
        let (quick, full) = size.rounds;
        let rounds = lab.extent.runs(quick, full);
        report.note(format!("{}: {}", size.name, load.said()));
        interleaved(rounds, &System::ALL, |_, &system| guest.pause(system, report))?;
        guest.stop();
        figures(size, report);
    }
    let drawing = drawing(report)?;
    report.drawing("halite-save-downtime", drawing);
    Ok(())
}

fn figures(size: Size, report: &mut Report) {
    let name = size.name;
    for system in System::ALL {
        for (key, field) in [(pause_key(system), "pause_ms"), (still_key(system), "still_ms")] {
            let values = measured(report, name, system, field);
            percentiles(&format!("{key}.{name}"), values, &PERCENTILES, report);
        }
    }
    for (key, of, to) in [
        ("downtime_to_floor_p95", pause_key(System::Firn), pause_key(System::Floor)),
        ("stood_still_to_floor_p95", still_key(System::Firn), still_key(System::Floor)),
    ] {
        let p95 = |key: &str| report.value(&format!("{key}.{name}.p95")).unwrap_or(f64::NAN);
        report.number(format!("{key}.{name}"), p95(of) / p95(to));
    }
}

fn drawing(report: &Report) -> Result<String> {
    let p95 = |system: System| {
        let value = |size: Size| report.value(&format!("{}.{}.p95", pause_key(system), size.name));
        (system.name().to_owned(), SIZES.map(|size| value(size).unwrap_or(f64::NAN)).into())
    };
    let plot = BarPlot {
        title: "Pause of a write-heavy guest by RAM size, 95th percentile".into(),
        y: "milliseconds".into(),
        groups: SIZES.map(|size| size.name.to_owned()).into(),
        series: System::ALL.map(p95).into(),
    };
    plot.svg().context("the pauses")
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn report(floor_still_ms: Option<f64>) -> Report {
        let mut report = Report::new("halite-save", true);
        for pause_ms in [3.0, 1.0, 2.0] {
            report.repetition(json!({ "system": "firn", "case": SIZES[0].name,
                "pause_ms": pause_ms, "still_ms": pause_ms / 2.0 }));
            report.repetition(json!({ "system": "floor", "case": SIZES[0].name,
                "pause_ms": 2.0 * pause_ms, "still_ms": floor_still_ms }));
        }
        figures(SIZES[0], &mut report);
        report
    }

    #[test]
    fn percentiles_of_both_are_compared() {
        let report = report(Some(1.5));
        assert_eq!(report.value("downtime_ms.256MiB.p50"), Some(2.0));
        assert_eq!(report.value("floor_ms.256MiB.p95"), Some(6.0));
        assert_eq!(report.value("downtime_to_floor_p95.256MiB"), Some(0.5));
        assert_eq!(report.value("stood_still_to_floor_p95.256MiB"), Some(1.0));
        assert!(report.is_complete());
    }

    #[test]
    fn a_clock_that_could_not_be_read_is_missing() {
        let json = report(None).json();
        assert!(json["floor_stood_still_ms.256MiB.p95"].is_null());
        assert!(json["stood_still_to_floor_p95.256MiB"].is_null());
        assert_eq!(json["downtime_to_floor_p95.256MiB"], 0.5);
    }
}
