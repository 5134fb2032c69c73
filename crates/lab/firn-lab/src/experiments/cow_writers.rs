//! `cow-writers`: the pause and the stalls of a checkpoint, by the guest's RAM and its write rate.
//!
//! Extends Sun and Blough ("Fast, Lightweight Virtual Machine Checkpointing"), who measure a guest
//! of 512 MB: a good pause must not grow with either.
//!
//! **What varies**: RAM (256 MiB to 8 GiB), and the load of the guest's two vCPUs: none, a thousand
//! random page writes a second each, or writes as fast as they can, in half of RAM, 1 GiB at most.
//! **What is held equal**: Firn's default strategy and options; and the *floor*, nothing but stop,
//! device state and cont on a monitor connection, which is measured alternately with it. All guests
//! exist all the time and run alternately, one at a time: so other load of the machine affects all
//! of them alike.
//!
//! **What is measured**: `downtime_ms.CASE`, the pause as Firn reports it; `longest_stall_ms`, over
//! all cases: the longest stall around each checkpoint. That is the longer of two times: for which
//! the guest's own clock stopped, by heartbeats; and by which one of its vCPUs was late for a write
//! of a page. A program on each vCPU, with priority over all others in the guest, writes a page
//! each millisecond. `longest_stall_ms.floor` is the same around the floor's pauses, which take
//! less time. `flatness_p95` is the longest pause of a case (p95) against that of the shortest;
//! `flatness_to_floor_p95` is the same for the time that Firn takes beyond the floor of the same
//! case, which is the part that Firn determines. The rows `typical` are of VMs as managers of VMs make
//! them ([`typical`]; `--only typical`).

use anyhow::{Context as _, Result};
use firn_report::plot::BarPlot;

use crate::experiments::pauses::{
    GuestLoad, LoadedGuest, PauseCase, PauseSystem, add_percentiles, measured_values,
};
use crate::experiments::typical;
use crate::lab::{Lab, run_interleaved};
use crate::report::Report;

/// RAM in MiB, in quick and in full runs.
const SIZES: (&[u32], &[u32]) = (&[256, 2048], &[256, 1024, 4096, 8192]);
/// The same of VMs as managers of VMs make them.
const TYPICAL_SIZES: (&[u32], &[u32]) = (&[256, 512], &[256, 1024, 2048, 4096, 8192]);
/// Pages per second on each vCPU.
const RATE: u32 = 1000;
/// Maximum memory that is written to, in MiB: filling it takes long under emulation.
const WRITTEN_MIB_MAX: u32 = 1024;
/// Pauses of either kind in each case, in quick and in full runs.
const ROUNDS: (usize, usize) = (6, 40);
const PERCENTILES: [(&str, f64); 2] = [("p50", 50.0), ("p95", 95.0)];
const STALLS: [(&str, f64); 3] = [("p50", 50.0), ("p95", 95.0), ("p999", 99.9)];

/// Runs the experiment.
pub fn run(lab: &Lab) -> Result<Report> {
    let mut report = lab.vm_report("cow-writers");
    let (has_typical, is_alone) = typical::is_wanted(&lab.extent);
    if has_typical {
        let sizes = lab.extent.pick(TYPICAL_SIZES.0, TYPICAL_SIZES.1);
        let rounds = lab.extent.runs(ROUNDS.0, ROUNDS.1);
        typical::measure_typical(lab, sizes, rounds, &mut report)?;
    }
    if !is_alone {
        measure_cases(lab, &mut report)?;
    }
    Ok(report)
}

/// Measures the guests that Firn starts.
fn measure_cases(lab: &Lab, report: &mut Report) -> Result<()> {
    let sizes: &[u32] = if lab.extent.quick { SIZES.0 } else { SIZES.1 };
    let all: Vec<PauseCase> = sizes.iter().flat_map(|&mib| cases_for(mib)).collect();
    let everyone: Vec<usize> = (0..all.len()).collect();
    let wanted = lab.extent.select_wanted(&everyone, |number| all[number].name.clone());
    let cases: Vec<PauseCase> = wanted.into_iter().map(|number| all[number].clone()).collect();
    let mut guests = Vec::new();
    for case in &cases {
        report.add_remark(format!("{}: {}", case.name, case.load.describe_load()));
        let mut guest = LoadedGuest::boot_under_load(lab, case.clone())?;
        guest.stop_guest()?;
        guests.push(guest);
    }
    let numbers: Vec<usize> = (0..guests.len()).collect();
    run_interleaved(lab.extent.runs(ROUNDS.0, ROUNDS.1), &numbers, |_, &number| {
        let guest = &mut guests[number];
        guest.resume_guest()?;
        PauseSystem::ALL.into_iter().try_for_each(|system| guest.measure_pause(system, report))?;
        guest.stop_guest()
    })?;
    guests.into_iter().for_each(LoadedGuest::end_guest);
    add_numbers(&cases, report);
    let drawing = draw_plot(sizes, report)?;
    report.add_drawing("cow-writers", drawing);
    Ok(())
}

fn cases_for(mib: u32) -> impl Iterator<Item = PauseCase> {
    let written = (mib / 2).min(WRITTEN_MIB_MAX);
    let loads = [
        ("idle", GuestLoad::Idle),
        ("paced", GuestLoad::Paced { mib: written, rate: RATE }),
        ("flat-out", GuestLoad::FlatOut { mib: written }),
    ];
    loads.into_iter().map(move |(name, load)| PauseCase {
        name: format!("{mib}MiB-{name}"),
        mib,
        load,
    })
}

fn add_numbers(cases: &[PauseCase], report: &mut Report) {
    for PauseCase { name, .. } in cases {
        for (key, system) in [("downtime_ms", PauseSystem::Firn), ("floor_ms", PauseSystem::Floor)]
        {
            let values = measured_values(report, name, system, "pause_ms");
            add_percentiles(&format!("{key}.{name}"), values, &PERCENTILES, report);
        }
    }
    for (key, system) in
        [("longest_stall_ms", PauseSystem::Firn), ("longest_stall_ms.floor", PauseSystem::Floor)]
    {
        add_percentiles(key, longest_stalls(cases, system, report), &STALLS, report);
    }
    let p95 =
        |key: &str, case: &PauseCase| report.figure_value(&format!("{key}.{}.p95", case.name));
    let pauses = cases.iter().filter_map(|case| p95("downtime_ms", case));
    let ratios =
        cases.iter().filter_map(|case| Some(p95("downtime_ms", case)? / p95("floor_ms", case)?));
    let (flat, beyond) = (max_to_min(pauses), max_to_min(ratios));
    report.add_number("flatness_p95", flat);
    report.add_number("flatness_to_floor_p95", beyond);
}

/// For each pause of a system, the longest time for which the guest's clock or one of its vCPUs
/// stopped.
fn longest_stalls(cases: &[PauseCase], system: PauseSystem, report: &Report) -> Vec<f64> {
    let of = |case: &PauseCase| {
        let field = |field| measured_values(report, &case.name, system, field);
        let longer = |(pause, stall): (f64, f64)| pause.max(stall);
        field("still_ms").into_iter().zip(field("stall_ms")).map(longer).collect::<Vec<_>>()
    };
    cases.iter().flat_map(of).collect()
}

/// The ratio of the largest value to the smallest.
fn max_to_min(values: impl Iterator<Item = f64>) -> f64 {
    let (low, high) = values
        .fold((f64::INFINITY, 0.0_f64), |(low, high), value| (low.min(value), high.max(value)));
    high / low
}

fn draw_plot(sizes: &[u32], report: &Report) -> Result<String> {
    let p95 = |load: &str| {
        let value = |mib: &u32| report.figure_value(&format!("downtime_ms.{mib}MiB-{load}.p95"));
        (load.to_owned(), sizes.iter().map(|mib| value(mib).unwrap_or(f64::NAN)).collect())
    };
    let plot = BarPlot {
        title: "Pause of a checkpoint by RAM and load, 95th percentile".into(),
        y: "milliseconds".into(),
        groups: sizes.iter().map(|mib| format!("{mib} MiB")).collect(),
        series: ["idle", "paced", "flat-out"].map(p95).into(),
    };
    plot.to_svg().context("the pauses")
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn the_longest_pause_is_set_against_the_shortest() {
        let mut report = Report::new("cow-writers", true);
        let cases: Vec<PauseCase> = cases_for(256).collect();
        for (case, pause_ms) in cases.iter().zip([2.0, 3.0, 8.0]) {
            for (system, pause_ms) in
                [(PauseSystem::Firn, pause_ms), (PauseSystem::Floor, pause_ms / 2.0)]
            {
                report.add_repetition(json!({ "system": system.name(), "case": case.name,
                    "pause_ms": pause_ms, "still_ms": pause_ms, "stall_ms": pause_ms * 2.0 }));
            }
        }
        add_numbers(&cases, &mut report);
        assert_eq!(report.figure_value("flatness_p95"), Some(4.0));
        assert_eq!(report.figure_value("flatness_to_floor_p95"), Some(1.0));
        assert_eq!(report.figure_value("longest_stall_ms.p999"), Some(16.0));
        assert_eq!(report.figure_value("downtime_ms.256MiB-idle.p50"), Some(2.0));
    }
}
