//! Pause of a checkpoint, by the size of the guest's RAM.

use anyhow::{Context as _, Result};
use firn_report::plot::BarPlot;

use crate::experiments::pauses::{
    GuestLoad, LoadedGuest, PauseCase, PauseSystem, add_percentiles, measured_values,
};
use crate::lab::{Lab, run_interleaved};
use crate::report::Report;

/// The size of a guest's RAM, with its load and number of rounds.
#[derive(Clone, Copy, Debug)]
struct GuestSize {
    name: &'static str,
    mib: u32,
    /// How much of it is written all the time, in quick and in full runs.
    written_mib: (u32, u32),
    /// Pauses of either kind, in quick and in full runs.
    rounds: (usize, usize),
}

const SIZES: [GuestSize; 4] = [
    GuestSize { name: "256MiB", mib: 256, written_mib: (128, 128), rounds: (20, 40) },
    GuestSize { name: "1GiB", mib: 1024, written_mib: (512, 768), rounds: (12, 40) },
    GuestSize { name: "4GiB", mib: 4096, written_mib: (2048, 3072), rounds: (9, 40) },
    GuestSize { name: "8GiB", mib: 8192, written_mib: (4096, 6144), rounds: (8, 40) },
];

const PERCENTILES: [(&str, f64); 2] = [("p50", 50.0), ("p95", 95.0)];

/// The key of a system's pauses.
fn pause_key(system: PauseSystem) -> &'static str {
    match system {
        PauseSystem::Firn => "downtime_ms",
        PauseSystem::Floor => "floor_ms",
    }
}

/// The key of a system's pauses by the guest's clock.
fn still_key(system: PauseSystem) -> &'static str {
    match system {
        PauseSystem::Firn => "stood_still_ms",
        PauseSystem::Floor => "floor_stood_still_ms",
    }
}

/// Measures every size, and adds the figures to the report.
pub(super) fn run_downtime(lab: &Lab, report: &mut Report) -> Result<()> {
    for size in SIZES {
        let load =
            GuestLoad::FlatOut { mib: lab.extent.pick(size.written_mib.0, size.written_mib.1) };
        let mut guest = LoadedGuest::boot_under_load(
            lab,
            PauseCase { name: size.name.to_owned(), mib: size.mib, load },
        )?;
        let (quick, full) = size.rounds;
        let rounds = lab.extent.runs(quick, full);
        report.add_remark(format!("{}: {}", size.name, load.describe_load()));
        run_interleaved(rounds, &PauseSystem::ALL, |_, &system| {
            guest.measure_pause(system, report)
        })?;
        guest.end_guest();
        add_numbers(size, report);
    }
    let drawing = draw_plot(report)?;
    report.add_drawing("halite-save-downtime", drawing);
    Ok(())
}

fn add_numbers(size: GuestSize, report: &mut Report) {
    let name = size.name;
    for system in PauseSystem::ALL {
        for (key, field) in [(pause_key(system), "pause_ms"), (still_key(system), "still_ms")] {
            let values = measured_values(report, name, system, field);
            add_percentiles(&format!("{key}.{name}"), values, &PERCENTILES, report);
        }
    }
    for (key, of, to) in [
        ("downtime_to_floor_p95", pause_key(PauseSystem::Firn), pause_key(PauseSystem::Floor)),
        ("stood_still_to_floor_p95", still_key(PauseSystem::Firn), still_key(PauseSystem::Floor)),
    ] {
        let p95 = |key: &str| report.figure_value(&format!("{key}.{name}.p95")).unwrap_or(f64::NAN);
        report.add_number(format!("{key}.{name}"), p95(of) / p95(to));
    }
}

fn draw_plot(report: &Report) -> Result<String> {
    let p95 = |system: PauseSystem| {
        let value = |size: GuestSize| {
            report.figure_value(&format!("{}.{}.p95", pause_key(system), size.name))
        };
        (system.name().to_owned(), SIZES.map(|size| value(size).unwrap_or(f64::NAN)).into())
    };
    let plot = BarPlot {
        title: "Pause of a write-heavy guest by RAM size, 95th percentile".into(),
        y: "milliseconds".into(),
        groups: SIZES.map(|size| size.name.to_owned()).into(),
        series: PauseSystem::ALL.map(p95).into(),
    };
    plot.to_svg().context("the pauses")
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn report(floor_still_ms: Option<f64>) -> Report {
        let mut report = Report::new("halite-save", true);
        for pause_ms in [3.0, 1.0, 2.0] {
            report.add_repetition(json!({ "system": "firn", "case": SIZES[0].name,
                "pause_ms": pause_ms, "still_ms": pause_ms / 2.0 }));
            report.add_repetition(json!({ "system": "floor", "case": SIZES[0].name,
                "pause_ms": 2.0 * pause_ms, "still_ms": floor_still_ms }));
        }
        add_numbers(SIZES[0], &mut report);
        report
    }

    #[test]
    fn percentiles_of_both_are_compared() {
        let report = report(Some(1.5));
        assert_eq!(report.figure_value("downtime_ms.256MiB.p50"), Some(2.0));
        assert_eq!(report.figure_value("floor_ms.256MiB.p95"), Some(6.0));
        assert_eq!(report.figure_value("downtime_to_floor_p95.256MiB"), Some(0.5));
        assert_eq!(report.figure_value("stood_still_to_floor_p95.256MiB"), Some(1.0));
        assert!(report.is_complete());
    }

    #[test]
    fn a_clock_that_could_not_be_read_is_missing() {
        let json = report(None).to_json();
        assert!(json["floor_stood_still_ms.256MiB.p95"].is_null());
        assert!(json["stood_still_to_floor_p95.256MiB"].is_null());
        assert_eq!(json["downtime_to_floor_p95.256MiB"], 0.5);
    }
}
