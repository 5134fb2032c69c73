//! Reported run: a run record, and the numbers computed from it.

use std::collections::BTreeMap;

use firn_measure::{StallInterval, VcpuWaitingTime, time_to_responsiveness};
use firn_restore::{FaultRecord, RestoreMode, RunRecord};
use serde::Serialize;

/// The windows of TTR(w, u), in microseconds.
pub(crate) const WINDOWS_US: [u64; 3] = [100_000, 1_000_000, 10_000_000];
/// The utilizations for which TTR is reported as a number.
const UTILIZATIONS: [f64; 4] = [0.5, 0.8, 0.9, 0.99];

/// One restore.
#[derive(Clone, Debug)]
pub struct ReportedRun {
    /// Its name in the report.
    pub name: String,
    /// The record of the restore.
    pub record: RunRecord,
}

/// The numbers about one restore. Times are seconds since the command.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct RunFacts {
    /// Its name in the report.
    pub name: String,
    /// The order in which memory was restored.
    pub mode: RestoreMode,
    /// When the vCPUs began to run.
    pub running_s: Option<f64>,
    /// When all memory was there.
    pub complete_s: Option<f64>,
    /// From when on the VM had 90 % of its speed: TTR(1, 0.9), or the time at which the vCPUs began
    /// to run if that is later. `None` if the record does not have it.
    pub responsive_s: Option<f64>,
    /// TTR(w, u) by window in seconds, by utilization.
    pub ttr_s: BTreeMap<String, BTreeMap<String, f64>>,
    /// The time that the vCPUs waited for pages, summed over them.
    pub waited_s: f64,
    /// Page faults.
    pub faults: u64,
    /// Pages that the guest waited for.
    pub on_demand_pages: u64,
    /// Pages that were installed before the guest touched them: the working set, and neighbours of
    /// requested pages.
    pub prefetched_pages: u64,
    /// Pages that were installed in the background.
    pub background_pages: u64,
    /// Reads from storage.
    pub reads: u64,
    /// Bytes read from storage.
    pub read_bytes: u64,
    /// Whether prefetching ended because the guest used other pages than predicted.
    pub diverged: bool,
}

impl ReportedRun {
    /// When vCPUs did not run: before they were started, and while they waited for pages.
    pub fn vcpu_waiting_time(&self) -> VcpuWaitingTime {
        let record = &self.record;
        let start = record.resumed_us.unwrap_or_default();
        let before = record.vcpus.iter().map(|it| StallInterval {
            vcpu: it.vcpu.0,
            start_us: 0,
            end_us: start,
        });
        let all: Vec<StallInterval> = before.chain(vcpu_waits(record)).collect();
        VcpuWaitingTime::new(record.vcpus.len().max(1) as u16, &all)
    }

    /// The numbers.
    pub fn compute_facts(&self) -> RunFacts {
        let (record, stalls) = (&self.record, self.vcpu_waiting_time());
        let counts = &record.counts;
        let waits = vcpu_waits(record).map(|wait| wait.end_us - wait.start_us);
        let waited_us = waits.fold(0, u64::saturating_add);
        RunFacts {
            name: self.name.clone(),
            mode: record.mode,
            running_s: record.resumed_us.map(to_seconds),
            complete_s: record.finished_us.map(to_seconds),
            responsive_s: self.responsive_s(),
            ttr_s: WINDOWS_US
                .iter()
                .map(|&window| (window_name(window), ttr_by_utilization(&stalls, window)))
                .collect(),
            waited_s: to_seconds(waited_us),
            faults: counts.faults,
            on_demand_pages: counts.on_demand_pages,
            prefetched_pages: counts.beside_pages + counts.ahead_pages,
            background_pages: counts.fill_pages,
            reads: record.reads.len() as u64 + record.reads_left_out,
            read_bytes: record.reads.iter().map(|read| u64::from(read.len)).sum(),
            diverged: counts.diverged,
        }
    }
}

/// The waits of vCPUs for pages. Waits of threads that are no vCPUs (devices, and kernel workers
/// under KVM) delay no vCPU as far as the record shows, and do not count.
pub fn vcpu_waits(record: &RunRecord) -> impl Iterator<Item = StallInterval> + '_ {
    let vcpu_of = |tid| record.vcpus.iter().find(|thread| thread.tid == tid);
    record.faults.iter().filter_map(move |fault: &FaultRecord| {
        let end_us = fault.answered_us();
        vcpu_of(fault.tid).map(|thread| StallInterval {
            vcpu: thread.vcpu.0,
            start_us: fault.t_us,
            end_us,
        })
    })
}

fn ttr_by_utilization(stalls: &VcpuWaitingTime, window_us: u64) -> BTreeMap<String, f64> {
    let at = |&utilization: &f64| {
        (utilization.to_string(), time_to_responsiveness(stalls, window_us, utilization))
    };
    UTILIZATIONS.iter().map(at).collect()
}

/// A window in seconds, as it is written.
pub(crate) fn window_name(window_us: u64) -> String {
    to_seconds(window_us).to_string()
}

pub(crate) fn to_seconds(us: u64) -> f64 {
    us as f64 / 1e6
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use firn_restore::RUN_RECORD_VERSION;
    use serde_json::json;

    /// Two vCPUs, threads 10 and 11, that start after 0.1 s; one waits from 0.2 to 0.7 s.
    pub(crate) fn run() -> ReportedRun {
        let record = json!({
            "version": RUN_RECORD_VERSION, "mode": "lazy", "ram_pages": 1024, "stored_pages": 512,
            "vcpus": [{ "tid": 10, "vcpu": 0 }, { "tid": 11, "vcpu": 1 }],
            "prefilled_us": null, "resumed_us": 100_000, "finished_us": 900_000,
            "counts": firn_restore::RunCounts::default(),
            "faults": [
                { "t_us": 200_000, "page": 7, "tid": 10, "wait_us": 500_000, "answered": "storage" },
                { "t_us": 300_000, "page": 9, "tid": 99, "wait_us": 500_000, "answered": "storage" },
            ],
            "faults_left_out": 0,
            "reads": [{ "t_us": 200_000, "offset": 4096, "len": 65_536, "us": 499_000, "why": "demand" }],
            "reads_left_out": 0, "prefetched": [[16, 8]],
        });
        ReportedRun { name: "web".into(), record: serde_json::from_value(record).unwrap() }
    }

    #[test]
    fn a_vcpu_that_has_not_been_started_or_waits_does_not_run() {
        let stalls = run().vcpu_waiting_time();
        assert_eq!(stalls.window_utilization(0, 100_000), 0.0);
        assert_eq!(stalls.window_utilization(100_000, 100_000), 1.0);
        assert_eq!(stalls.window_utilization(200_000, 500_000), 0.5);
        assert_eq!(stalls.window_utilization(700_000, 500_000), 1.0);
    }

    #[test]
    fn facts_are_those_of_the_record() {
        let facts = run().compute_facts();
        assert_eq!((facts.running_s, facts.complete_s), (Some(0.1), Some(0.9)));
        assert_eq!((facts.waited_s, facts.reads, facts.read_bytes), (0.5, 1, 65_536));
        assert!((0.6..=0.7).contains(&facts.ttr_s["0.1"]["0.9"]), "{facts:?}");
        assert!(facts.ttr_s["1"]["0.5"] <= facts.ttr_s["1"]["0.9"]);
    }
}
