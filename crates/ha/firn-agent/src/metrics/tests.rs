use std::collections::BTreeSet;

use serde_json::{Value, json};

use super::*;

fn protection() -> Value {
    json!({
        "to": "x", "interval_ms": 100, "epoch": 12, "complete": 11, "committed": 10,
        "downtime_ms": { "p50": 2.5, "p95": 8.0 }, "copied_pages": { "p50": 0.0, "p95": 0.0 },
        "sent_pages": { "p50": 0.0, "p95": 0.0 }, "sent_bytes": 4096, "predicted": 0, "faulted": 0,
        "unchanged": 0, "lag_ms": 125.0, "newest_downtime_ms": 3.0,
    })
}

/// A host with a protected VM, a standby, a VM without protection, and one that has ended.
fn sources() -> MetricSources {
    let card = json!({ "id": "net0", "uplink": "/s", "connected": true, "open": false,
        "held_frames": 3, "held_bytes": 4500, "delay_ms": { "p50": 50.0, "p95": 110.0 },
        "frames_out": 9, "frames_in": 8 });
    let checkpoints = json!({ "saved": 7, "failed": 2, "newest": [
        { "at": 900, "image": "/i/1.firn", "total_ms": 1.0 },
        { "at": 940, "image": "/i/2.firn", "total_ms": 1500.0, "downtime_ms": 4.0,
          "image_bytes": 65536 } ] });
    let vms = json!([
        { "host": "a", "name": "web", "state": "protected", "protection": protection(),
          "network": [card], "recoveries": 1, "supervised": true, "lease": 2, "lease_held": true },
        { "host": "a", "name": "db", "state": "standby", "committed": 5, "supervised": true },
        { "host": "a", "name": "ci", "state": "running", "checkpoints": checkpoints },
        { "host": "a", "name": "old", "state": "ended" },
    ]);
    let peers = json!([
        { "name": "b", "address": "b:1", "health": "alive", "since_s": 1.0, "round_trip_ms": 0.25 },
        { "name": "c", "address": "c:1", "health": "lost", "since_s": 1.0 },
    ]);
    let lanes = json!([{ "name": "lan", "socket": "/s", "addresses": 2, "lanes": [
        { "to": "host b", "connected": 1, "frames_in": 7, "frames_out": 8, "dropped": 9 },
    ] }]);
    MetricSources {
        vms: serde_json::from_value(vms).unwrap(),
        peers: serde_json::from_value(peers).unwrap(),
        networks: serde_json::from_value(lanes).unwrap(),
        refused: BTreeMap::from([("time".to_owned(), 3)]),
        membership: Some(MembershipHealth { leader: Some("c".to_owned()), trouble: None }),
        takeovers: TakeoverCounts::default(),
        drained: true,
        now_s: 1000,
    }
}

#[test]
fn each_number_has_its_line() {
    let text = render_metrics(&sources()).unwrap();
    let lines = [
        "firn_vm_state{vm=\"web\",state=\"protected\"} 1.0",
        "firn_vm_state{vm=\"old\",state=\"ended\"} 1.0",
        "firn_supervisor_up{vm=\"web\"} 1.0",
        "firn_supervisor_up{vm=\"ci\"} 0.0",
        "firn_supervisor_restarts_total{vm=\"web\"} 1",
        "firn_checkpoints_total{vm=\"ci\"} 7",
        "firn_checkpoint_failures_total{vm=\"ci\"} 2",
        "firn_checkpoints_total{vm=\"web\"} 0",
        "firn_checkpoint_age_seconds{vm=\"ci\"} 60.0",
        "firn_checkpoint_duration_seconds{vm=\"ci\"} 1.5",
        "firn_checkpoint_pause_seconds{vm=\"ci\"} 0.004",
        "firn_checkpoint_size_bytes{vm=\"ci\"} 65536.0",
        "firn_epoch{vm=\"web\"} 12.0",
        "firn_epoch_committed{vm=\"web\"} 10.0",
        "firn_epoch_downtime_seconds{vm=\"web\",quantile=\"0.5\"} 0.0025",
        "firn_epoch_downtime_seconds{vm=\"web\",quantile=\"0.95\"} 0.008",
        "firn_epoch_lag_seconds{vm=\"web\"} 0.125",
        "firn_epoch_interval_seconds{vm=\"web\"} 0.1",
        "firn_sent_bytes_total{vm=\"web\"} 4096",
        "firn_standby_committed{vm=\"db\"} 5.0",
        "firn_output_held_frames{vm=\"web\",card=\"net0\"} 3.0",
        "firn_output_held_bytes{vm=\"web\",card=\"net0\"} 4500.0",
        "firn_output_delay_seconds{vm=\"web\",card=\"net0\",quantile=\"0.95\"} 0.11",
        "firn_output_connected{vm=\"web\",card=\"net0\"} 1.0",
        "firn_lease_held{vm=\"web\"} 1.0",
        "firn_failovers_total{vm=\"web\"} 0",
        "firn_moves_total{vm=\"db\"} 0",
        "firn_leader{host=\"c\"} 1.0",
        "firn_membership_up 1.0",
        "firn_drained 1.0",
        "firn_peer_up{peer=\"b\"} 1.0",
        "firn_peer_lost{peer=\"c\"} 1.0",
        "firn_peer_round_trip_seconds{peer=\"b\"} 0.00025",
        "firn_network_ports{network=\"lan\",to=\"host b\"} 1.0",
        "firn_network_frames_total{network=\"lan\",to=\"host b\",direction=\"in\"} 7",
        "firn_network_frames_total{network=\"lan\",to=\"host b\",direction=\"out\"} 8",
        "firn_network_dropped_total{network=\"lan\",to=\"host b\"} 9",
        "firn_refused_total{reason=\"time\"} 3",
        "# EOF",
    ];
    for line in lines {
        assert!(text.lines().any(|it| it == line), "{line} is not in:\n{text}");
    }
    for absent in [
        "round_trip_seconds{peer=\"c\"",
        "supervisor_up{vm=\"old\"",
        "checkpoint_age_seconds{vm=\"web\"",
        "checkpoints_total{vm=\"db\"",
        "lease_held{vm=\"ci\"",
    ] {
        assert!(!text.contains(absent), "{absent} is in:\n{text}");
    }
}

#[test]
fn failovers_and_moves_are_counted() {
    let mut sources = sources();
    let standby = sources.vms[1].clone();
    let runs = VmView { state: "running".to_owned(), committed: None, ..standby.clone() };
    sources.takeovers.observe_vms(&[standby]);
    sources.takeovers.observe_vms(&[runs]);
    let text = render_metrics(&sources).unwrap();
    assert!(text.contains("firn_failovers_total{vm=\"db\"} 1"), "{text}");
    assert!(text.contains("firn_moves_total{vm=\"db\"} 0"), "{text}");
}

#[test]
fn a_host_without_membership_has_no_metrics_of_it() {
    let text = render_metrics(&MetricSources { membership: None, ..sources() }).unwrap();
    assert!(!text.contains("firn_membership_up 1") && !text.contains("firn_leader{"), "{text}");
}

/// The manual lists each metric, and no other.
#[test]
fn the_manual_lists_all_metrics() {
    let manual = include_str!(concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/../../../docs/manual/src/reference/metrics.md"
    ));
    let rows = manual.lines().filter_map(|line| line.strip_prefix("| `firn_")?.split_once('`'));
    let listed: BTreeSet<String> = rows.map(|(name, _)| format!("firn_{name}")).collect();
    assert_eq!(listed, metric_names());
}

/// The names of all metrics, as queries use them.
fn metric_names() -> BTreeSet<String> {
    let text = render_metrics(&sources()).unwrap();
    let types = text.lines().filter_map(|line| line.strip_prefix("# TYPE ")?.split_once(' '));
    let named = types.map(|(name, kind)| match kind {
        "counter" => format!("{name}_total"),
        _ => name.to_owned(),
    });
    named.collect()
}

const DASHBOARD: &str =
    include_str!(concat!(env!("CARGO_MANIFEST_DIR"), "/../../../packaging/grafana/firn.json"));
const RULES: &str = include_str!(concat!(
    env!("CARGO_MANIFEST_DIR"),
    "/../../../packaging/prometheus/firn.rules.yml"
));

/// The names of Firn's metrics in a query.
fn names_in(query: &str) -> BTreeSet<String> {
    let is_part = |letter: char| letter.is_ascii_alphanumeric() || letter == '_';
    let words = query.split(|letter| !is_part(letter));
    words.filter(|word| word.starts_with("firn_")).map(str::to_owned).collect()
}

/// All strings under this key, in a document.
fn strings_of<'a>(document: &'a Value, key: &str, found: &mut Vec<&'a str>) {
    match document {
        Value::Object(fields) => {
            found.extend(fields.get(key).and_then(Value::as_str));
            fields.values().for_each(|value| strings_of(value, key, found));
        }
        Value::Array(values) => values.iter().for_each(|value| strings_of(value, key, found)),
        _ => {}
    }
}

#[test]
fn the_dashboard_shows_metrics_that_there_are() {
    let dashboard: Value = serde_json::from_str(DASHBOARD).unwrap();
    let (mut queries, known) = (Vec::new(), metric_names());
    strings_of(&dashboard, "expr", &mut queries);
    strings_of(&dashboard, "query", &mut queries);
    let used: BTreeSet<String> = queries.iter().copied().flat_map(names_in).collect();
    assert!(queries.len() > 30 && used.len() > 20, "{used:?}");
    assert_eq!(used.difference(&known).collect::<Vec<_>>(), Vec::<&String>::new());
    // Every panel that is no heading has a query; and no two have one number.
    let panels = dashboard["panels"].as_array().unwrap();
    let ids: BTreeSet<u64> = panels.iter().map(|it| it["id"].as_u64().unwrap()).collect();
    assert_eq!(ids.len(), panels.len());
    for panel in panels.iter().filter(|it| it["type"] != "row") {
        assert!(!panel["targets"].as_array().unwrap().is_empty(), "{}", panel["title"]);
    }
}

/// One alert of the rules.
#[derive(Debug, Default)]
struct AlertRule {
    name: String,
    expr: String,
    severity: String,
    summary: String,
}

/// Reads the rules, which have one form: a field per line. `promtool` reads all of YAML.
fn read_rules() -> Vec<AlertRule> {
    let mut rules: Vec<AlertRule> = Vec::new();
    for line in RULES.lines().map(str::trim).filter(|line| !line.starts_with('#')) {
        let (field, value) = line.split_once(':').unwrap();
        let value = value.trim().trim_matches('"').to_owned();
        match (field, rules.last_mut()) {
            ("- alert", _) => rules.push(AlertRule { name: value, ..AlertRule::default() }),
            ("expr", Some(rule)) => rule.expr = value,
            ("severity", Some(rule)) => rule.severity = value,
            ("summary", Some(rule)) => rule.summary = value,
            (
                "groups" | "- name" | "rules" | "for" | "labels" | "annotations" | "description",
                _,
            ) => {}
            (other, _) => panic!("{other} is no field that this test knows"),
        }
    }
    rules
}

#[test]
fn each_alert_uses_metrics_that_there_are_and_has_a_summary() {
    let (rules, known) = (read_rules(), metric_names());
    assert!(rules.len() > 10, "{rules:?}");
    let names: BTreeSet<&str> = rules.iter().map(|rule| rule.name.as_str()).collect();
    assert_eq!(names.len(), rules.len(), "two have one name");
    for rule in &rules {
        let used = names_in(&rule.expr);
        // `up` is Prometheus's own.
        assert!(!used.is_empty() || rule.expr.starts_with("up{"), "{rule:?}");
        assert!(used.is_subset(&known), "{rule:?}");
        assert!(rule.summary.len() > 20, "{rule:?}");
        assert!(["critical", "warning"].contains(&rule.severity.as_str()), "{rule:?}");
    }
}
