//! Records of restores in each mode, with the order of events that real restores have.

use firn_report::ReportedRun;
use firn_restore::{RUN_RECORD_VERSION, RunCounts};
use serde_json::{Value, json};

/// A wait of 7 ms of each of two vCPUs in turns, every 9 ms from 0.2 s on.
fn fault(number: u64) -> Value {
    json!({ "t_us": 200_000 + number * 9_000, "page": number * 37 % 4096, "tid": 10 + number % 2,
        "wait_us": 7_000, "answered": "storage" })
}

fn read(t_us: u64, number: u64, why: &str) -> Value {
    json!({ "t_us": t_us, "offset": 4096 + number * 65_536, "len": 65_536, "us": 6_500, "why": why })
}

fn make_run(
    mode: &str,
    resumed_us: u64,
    finished_us: u64,
    waits: u64,
    reads: Vec<Value>,
) -> ReportedRun {
    let counts = RunCounts { faults: waits, on_demand_pages: waits, ..Default::default() };
    let prefetched =
        if ["lazy", "locality"].contains(&mode) { json!([]) } else { json!([[16, 800]]) };
    let record = json!({
        "version": RUN_RECORD_VERSION, "mode": mode, "ram_pages": 4096, "stored_pages": 3000,
        "vcpus": [{ "tid": 10, "vcpu": 0 }, { "tid": 11, "vcpu": 1 }],
        "prefilled_us": resumed_us - 10_000, "resumed_us": resumed_us, "finished_us": finished_us,
        "recorded_us": finished_us, "counts": counts, "prefetched": prefetched,
        "faults": (0..waits).map(fault).collect::<Vec<_>>(), "faults_left_out": 0,
        "reads": reads, "reads_left_out": 0,
    });
    ReportedRun { name: format!("{mode}-run"), record: serde_json::from_value(record).unwrap() }
}

/// Reads in the order in which earlier versions recorded them: the first reads of the page server,
/// then those of the prefill, which ended before.
fn prefill_last(prefill: u64, others: u64) -> Vec<Value> {
    let server = |number| read(100_000 + number * 9_000, 100 + number, "ahead");
    let prefill = (0..prefill).map(|number| read(20_000 + number * 2_000, number, "ahead"));
    (0..2).map(server).chain(prefill).chain((2..others).map(server)).collect()
}

/// A run of each mode.
pub fn runs_of_all_modes() -> Vec<ReportedRun> {
    let on_demand = |waits| (0..waits).map(|it| read(200_000 + it * 9_000, it, "demand")).collect();
    vec![
        make_run("lazy", 150_000, 2_900_000, 200, on_demand(200)),
        make_run("locality", 160_000, 1_200_000, 60, on_demand(60)),
        make_run("working-set", 400_000, 1_100_000, 3, prefill_last(30, 60)),
        make_run("auto", 170_000, 900_000, 12, prefill_last(30, 40)),
        make_run("eager", 740_000, 700_000, 0, prefill_last(40, 60)),
    ]
}
