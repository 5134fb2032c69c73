//! Waiting times of vCPUs: from the intervals in which each waited (its stalls).

use serde::{Deserialize, Serialize};

/// An interval in which one vCPU waited for a page, or had not been started.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct StallInterval {
    /// The vCPU, from 0.
    pub vcpu: u16,
    /// When it began to wait, in microseconds since the command.
    pub start_us: u64,
    /// When it continued. A stall that does not end after it began has no length.
    pub end_us: u64,
}

/// The waiting time of the vCPUs of one restore, as a function of time: how long all vCPUs together
/// waited before any instant.
#[derive(Clone, Debug, PartialEq)]
pub struct VcpuWaitingTime {
    vcpus: u16,
    /// The instants at which the number of waiting vCPUs changes: the instant, the waiting time of
    /// all vCPUs before it, and the number that wait from it on. Sorted by instant; after the last
    /// one no vCPU waits.
    steps: Vec<StallStep>,
}

#[derive(Clone, Copy, Debug, PartialEq)]
struct StallStep {
    at: u64,
    waited: u64,
    waiting: u64,
}

impl VcpuWaitingTime {
    /// The waiting time of a VM with `vcpus` vCPUs (at least one). Overlapping stalls of one vCPU
    /// count once; stalls of vCPUs that it does not have are left out.
    pub fn new(vcpus: u16, stalls: &[StallInterval]) -> Self {
        let vcpus = vcpus.max(1);
        let mut changes: Vec<(u64, i64)> = Vec::with_capacity(stalls.len() * 2);
        for vcpu in 0..vcpus {
            for (start, end) in merge_intervals(stalls.iter().filter(|stall| stall.vcpu == vcpu)) {
                changes.push((start, 1));
                changes.push((end, -1));
            }
        }
        changes.sort_unstable();
        Self { vcpus, steps: accumulate_steps(&changes) }
    }

    /// The share of `[start, start + window)` in which vCPUs did not wait; `window` above 0.
    pub fn window_utilization(&self, start_us: u64, window_us: u64) -> f64 {
        let waited = self.waited_before(start_us + window_us) - self.waited_before(start_us);
        1.0 - waited as f64 / (window_us as f64 * f64::from(self.vcpus))
    }

    /// When the last stall ended.
    pub fn end_us(&self) -> u64 {
        self.steps.last().map_or(0, |step| step.at)
    }

    pub(crate) fn vcpu_count(&self) -> u16 {
        self.vcpus
    }

    /// Instants at which the number of waiting vCPUs changes.
    pub(crate) fn change_instants(&self) -> impl Iterator<Item = u64> + '_ {
        self.steps.iter().map(|step| step.at)
    }

    /// The summed waiting time of all vCPUs before an instant.
    pub(crate) fn waited_before(&self, at: u64) -> u64 {
        let after = self.steps.partition_point(|step| step.at <= at);
        let Some(step) = after.checked_sub(1).and_then(|index| self.steps.get(index)) else {
            return 0;
        };
        step.waited + (at - step.at) * step.waiting
    }
}

/// One vCPU's stalls without overlap, by time.
fn merge_intervals<'a>(stalls: impl Iterator<Item = &'a StallInterval>) -> Vec<(u64, u64)> {
    let lasting = stalls.filter(|stall| stall.start_us < stall.end_us);
    let mut intervals: Vec<_> = lasting.map(|stall| (stall.start_us, stall.end_us)).collect();
    intervals.sort_unstable();
    let mut merged: Vec<(u64, u64)> = Vec::with_capacity(intervals.len());
    for (start, end) in intervals {
        match merged.last_mut() {
            Some(last) if start <= last.1 => last.1 = last.1.max(end),
            _ => merged.push((start, end)),
        }
    }
    merged
}

fn accumulate_steps(changes: &[(u64, i64)]) -> Vec<StallStep> {
    let mut steps: Vec<StallStep> = Vec::with_capacity(changes.len());
    let mut now = StallStep { at: 0, waited: 0, waiting: 0 };
    for &(at, change) in changes {
        let waited = now.waited + (at - now.at) * now.waiting;
        now = StallStep { at, waited, waiting: now.waiting.saturating_add_signed(change) };
        match steps.last_mut() {
            Some(last) if last.at == at => *last = now,
            _ => steps.push(now),
        }
    }
    steps
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stall(vcpu: u16, start_us: u64, end_us: u64) -> StallInterval {
        StallInterval { vcpu, start_us, end_us }
    }

    #[test]
    fn half_a_window_of_waiting_is_half_utilization() {
        let stalls = VcpuWaitingTime::new(1, &[stall(0, 10, 15)]);
        assert_eq!(stalls.window_utilization(10, 10), 0.5);
        assert_eq!(stalls.window_utilization(15, 10), 1.0);
    }

    #[test]
    fn one_of_two_vcpus_waiting_is_half_utilization() {
        let stalls = VcpuWaitingTime::new(2, &[stall(1, 0, 100)]);
        assert_eq!(stalls.window_utilization(0, 100), 0.5);
    }

    #[test]
    fn overlapping_stalls_of_a_vcpu_count_once() {
        let stalls = VcpuWaitingTime::new(1, &[stall(0, 0, 10), stall(0, 5, 12), stall(0, 12, 14)]);
        assert_eq!(stalls.waited_before(100), 14);
        assert_eq!(stalls.end_us(), 14);
    }
}
