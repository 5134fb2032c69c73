//! Guest time: the share of each second in which a restored guest could run (Halite, Figure 3).
//!
//! A vCPU that waits for a page does not run. The run record contains every wait. The guest's time
//! in a second is the share of that second in which no page was awaited, averaged over all vCPUs.

use firn_measure::{StallInterval, VcpuWaitingTime};
use firn_restore::RunRecord;

/// A second, in microseconds.
const SECOND_US: u64 = 1_000_000;

/// Percent of each second, from the first recorded fault on, in which the guest's vCPUs did not
/// wait for pages.
///
/// Waits of threads that are not vCPUs (devices, and kernel workers under KVM) do not count:
/// according to the record they block no vCPU.
pub fn percent_per_second(record: &RunRecord, seconds: usize) -> Vec<f64> {
    let stalls = recorded_stalls(record);
    let start = record.faults.iter().map(|fault| fault.t_us).min().unwrap_or(0);
    let second = |number| start + number as u64 * SECOND_US;
    (0..seconds)
        .map(|number| 100.0 * stalls.window_utilization(second(number), SECOND_US))
        .collect()
}

fn recorded_stalls(record: &RunRecord) -> VcpuWaitingTime {
    let waits: Vec<StallInterval> = firn_report::vcpu_waits(record).collect();
    VcpuWaitingTime::new(record.vcpus.len() as u16, &waits)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Two vCPUs, threads 10 and 11; one waits for half of the first second.
    fn record() -> RunRecord {
        let fault = |t_us: u64, tid: i32, wait_us: u64| {
            serde_json::json!({ "t_us": t_us, "page": 1, "tid": tid, "wait_us": wait_us,
                "answered": "storage" })
        };
        let faults = [fault(5_000_000, 10, 500_000), fault(6_500_000, 99, 400_000)];
        serde_json::from_value(serde_json::json!({
            "version": 1, "mode": "lazy", "ram_pages": 10, "stored_pages": 10,
            "vcpus": [{ "tid": 10, "vcpu": 0 }, { "tid": 11, "vcpu": 1 }],
            "prefilled_us": null, "finished_us": null,
            "counts": firn_restore::RunCounts::default(),
            "faults": faults, "faults_left_out": 0, "reads": [], "reads_left_out": 0,
        }))
        .unwrap()
    }

    #[test]
    fn half_a_second_of_one_of_two_vcpus_is_a_quarter() {
        assert_eq!(percent_per_second(&record(), 2), [75.0, 100.0]);
    }

    #[test]
    fn a_restore_without_faults_leaves_all_time_to_the_guest() {
        let record = RunRecord { faults: Vec::new(), ..record() };
        assert_eq!(percent_per_second(&record, 1), [100.0]);
    }
}
