//! What the page shows in these tests: three hosts, one of them lost, with VMs in several states.

use std::sync::Arc;
use std::time::Duration;

use firn_agent::MembershipHealth;
use firn_agent::history::ProtectionHistory;
use firn_agent::page::{ChainFile, PageToken, PageView, RestoreSummary, VmFiles};
use firn_control::api::AgentStatus;
use serde_json::{Value, json};

/// When the page is shown, in seconds since 1970, and by the clock of the history.
const NOW_S: u64 = 1_700_000_000;
const NOW: Duration = Duration::from_secs(900);

fn protection(to: &str, epoch: u64, lag_ms: f64, pause_ms: f64) -> Value {
    json!({
        "to": to, "interval_ms": 100, "epoch": epoch, "complete": epoch - 1, "committed": epoch - 1,
        "downtime_ms": { "p50": pause_ms, "p95": 2.4 * pause_ms }, "newest_downtime_ms": pause_ms,
        "lag_ms": lag_ms, "copied_pages": { "p50": 400.0, "p95": 900.0 },
        "sent_pages": { "p50": 500.0, "p95": 1000.0 }, "sent_bytes": 900_000_000, "predicted": 1,
        "faulted": 2, "unchanged": 3,
    })
}

fn status(lag_ms: f64, pause_ms: f64) -> AgentStatus {
    let card = json!({ "id": "net0", "uplink": "/run/lan.sock", "connected": true, "open": false,
        "held_frames": 12, "held_bytes": 18_400, "delay_ms": { "p50": 64.0, "p95": 131.0 },
        "frames_out": 90_000, "frames_in": 80_000 });
    let note = |number: u64, hours: u64| {
        json!({ "at": NOW_S - 3600 * hours, "image": format!("/srv/images/ci-{number}.firn"),
            "parent": format!("/srv/images/ci-{}.firn", number - 1), "total_ms": 2100.0,
            "downtime_ms": 3.8, "image_bytes": 190_000_000 })
    };
    let checkpoints = json!({ "saved": 31, "failed": 1, "newest": [note(30, 2), note(31, 1)],
        "failure": { "at": NOW_S - 600, "text": "saving to /srv/images/ci-32.firn: No space left on device" } });
    let vms = json!([
        { "host": "host1", "name": "web", "state": "protected", "backup": "host2", "lease": 4,
          "lease_held": true, "protection": protection("host2", 52_311, lag_ms, pause_ms),
          "network": [card], "supervised": true, "recoveries": 1 },
        { "host": "host2", "name": "web", "state": "standby", "primary": "host1", "committed": 52_310 },
        { "host": "host2", "name": "db", "state": "protected", "backup": "host1", "lease": 1,
          "lease_held": true, "protection": protection("host1", 7_204, 2.0 * lag_ms, 1.5 * pause_ms),
          "supervised": true },
        { "host": "host1", "name": "db", "state": "standby", "primary": "host2", "committed": 7_203 },
        { "host": "host1", "name": "ci", "state": "running", "checkpoints": checkpoints,
          "supervised": true },
        { "host": "host1", "name": "a-vm-with-a-name-of-the-greatest-length-48-bytes", "state": "waiting",
          "advice": "memory can't be read from /srv/images/old.firn: `firn status` shows more" },
    ]);
    let peers = json!([
        { "name": "host2", "address": "10.0.0.2:7415", "health": "alive", "since_s": 86_400.0,
          "round_trip_ms": 0.4 },
        { "name": "host3", "address": "10.0.0.3:7415", "health": "lost", "since_s": 310.0,
          "trouble": "connecting to 10.0.0.3:7415: Connection refused (os error 111)" },
    ]);
    let status = json!({ "host": "host1", "listen": "10.0.0.1:7415", "peers": peers, "vms": vms,
        "refused": {}, "drained": false });
    serde_json::from_value(status).unwrap()
}

/// Ten minutes, in the middle of which the agent was not running for a minute.
fn history() -> ProtectionHistory {
    let mut history = ProtectionHistory::default();
    for second in (300..900).step_by(2).filter(|second| !(560..620).contains(second)) {
        let wave = (f64::from(second) / 40.0).sin().abs();
        let peak = if second == 760 { 900.0 } else { 0.0 };
        let vms = status(110.0 + 60.0 * wave + peak, 2.5 + 3.0 * wave * wave).vms;
        history.add_sample(Duration::from_secs(second as u64), &vms);
    }
    history
}

pub fn sample_view() -> PageView {
    let file = |number: u64, bytes: u64| ChainFile {
        path: format!("/srv/images/ci-{number}.firn").into(),
        size: Ok(bytes),
        is_sealed: false,
    };
    let chain = vec![file(31, 190_000_000), file(30, 185_000_000), file(0, 2_100_000_000)];
    let chains = [("/srv/images/ci-31.firn".to_owned(), chain)].into();
    let restore = RestoreSummary::sample("/run/firn/ci/restore.json", NOW_S - 7000);
    PageView {
        status: Arc::new(status(128.0, 3.1)),
        membership: Some(MembershipHealth { leader: Some("host2".to_owned()), trouble: None }),
        history: history(),
        now: NOW,
        now_s: NOW_S,
        files: Arc::new(VmFiles { chains, restores: [("ci".parse().unwrap(), restore)].into() }),
        token: Some(PageToken::sample()),
    }
}
