//! Pauses and lags of protected VMs over the last ten minutes, for the agent's page. Pure, and
//! bounded: 300 points of each of at most 256 VMs.

use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

use firn_control::HostName;
use firn_control::api::VmView;
use firn_supervisor::VmName;

/// How long a point is kept.
pub const HISTORY_WINDOW: Duration = Duration::from_secs(600);

/// The most points of one VM, and the most VMs.
const POINTS_MAX: usize = 300;
const SERIES_MAX: usize = 256;

/// One observation of a protected VM.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct HistoryPoint {
    /// When it was made, by the clock of the caller.
    pub at: Duration,
    /// The length of the VM's newest pause, in milliseconds.
    pub pause_ms: f64,
    /// How far its standby was behind, in milliseconds.
    pub lag_ms: Option<f64>,
}

/// The observations of all VMs.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ProtectionHistory {
    series: BTreeMap<(HostName, VmName), VecDeque<HistoryPoint>>,
}

impl ProtectionHistory {
    /// Adds what these VMs report, and drops what is too old.
    pub fn add_sample(&mut self, at: Duration, vms: &[VmView]) {
        let oldest = at.saturating_sub(HISTORY_WINDOW);
        self.series.retain(|_, points| {
            points.retain(|point| point.at >= oldest);
            !points.is_empty()
        });
        for vm in vms {
            let Some(protection) = &vm.protection else { continue };
            let key = (vm.host.clone(), vm.name.clone());
            if self.series.len() >= SERIES_MAX && !self.series.contains_key(&key) {
                continue;
            }
            let points = self.series.entry(key).or_default();
            if points.len() >= POINTS_MAX {
                points.pop_front();
            }
            let (pause_ms, lag_ms) = (protection.newest_downtime_ms, protection.lag_ms);
            points.push_back(HistoryPoint { at, pause_ms, lag_ms });
        }
    }

    /// The points of a VM, the oldest first.
    pub fn points(&self, host: &HostName, vm: &VmName) -> impl Iterator<Item = &HistoryPoint> {
        self.series.get(&(host.clone(), vm.clone())).into_iter().flatten()
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn view(name: &str, lag_ms: f64) -> VmView {
        let protection = json!({
            "to": "x", "interval_ms": 100, "epoch": 12, "complete": 11, "committed": 10,
            "downtime_ms": { "p50": 2.5, "p95": 8.0 }, "copied_pages": { "p50": 0.0, "p95": 0.0 },
            "sent_pages": { "p50": 0.0, "p95": 0.0 }, "sent_bytes": 4096, "predicted": 0, "faulted": 0,
            "unchanged": 0, "lag_ms": lag_ms, "newest_downtime_ms": 3.0,
        });
        let view =
            json!({ "host": "a", "name": name, "state": "protected", "protection": protection });
        serde_json::from_value(view).unwrap()
    }

    fn lags(history: &ProtectionHistory, vm: &str) -> Vec<f64> {
        let (host, vm) = (HostName::new("a").unwrap(), VmName::new(vm).unwrap());
        history.points(&host, &vm).filter_map(|point| point.lag_ms).collect()
    }

    #[test]
    fn old_points_are_dropped() {
        let mut history = ProtectionHistory::default();
        let at = Duration::from_secs;
        history.add_sample(at(0), &[view("web", 1.0), view("db", 5.0)]);
        history.add_sample(at(300), &[view("web", 2.0)]);
        history.add_sample(at(600), &[view("web", 3.0)]);
        assert_eq!(lags(&history, "web"), [1.0, 2.0, 3.0]);
        assert_eq!(lags(&history, "db"), [5.0]);
        history.add_sample(at(601), &[view("web", 4.0)]);
        assert_eq!(lags(&history, "web"), [2.0, 3.0, 4.0]);
        assert_eq!(history.series.len(), 1, "db is not protected any more");
    }

    #[test]
    fn memory_is_bounded() {
        let mut history = ProtectionHistory::default();
        for ms in 0..1000 {
            history.add_sample(Duration::from_millis(ms), &[view("web", ms as f64)]);
        }
        assert_eq!(lags(&history, "web").len(), POINTS_MAX);
        assert_eq!(lags(&history, "web")[0], 700.0);
        let many: Vec<VmView> = (0..1000).map(|number| view(&format!("vm{number}"), 1.0)).collect();
        history.add_sample(Duration::from_secs(1), &many);
        assert_eq!(history.series.len(), SERIES_MAX);
    }
}
