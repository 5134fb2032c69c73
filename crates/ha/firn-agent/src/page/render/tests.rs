use std::sync::Arc;
use std::time::Duration;

use firn_control::api::AgentStatus;
use serde_json::json;

use super::*;
use crate::history::ProtectionHistory;
use crate::membership::MembershipHealth;
use crate::page::access::PageToken;
use crate::page::{ChainFile, RestoreSummary, VmFiles};

/// What a file, a peer or a VM could be called.
const HOSTILE: &str = "\"><script>alert(1)</script><img src=x onerror=alert(2)>' &amp; \u{202e}";

fn view(text: &str) -> PageView {
    let protection = json!({
        "to": text, "interval_ms": 100, "epoch": 12, "complete": 11, "committed": 10,
        "downtime_ms": { "p50": 2.5, "p95": 8.0 }, "copied_pages": { "p50": 0.0, "p95": 0.0 },
        "sent_pages": { "p50": 0.0, "p95": 0.0 }, "sent_bytes": 4096, "predicted": 0, "faulted": 0,
        "unchanged": 0, "lag_ms": 130.0, "newest_downtime_ms": 3.0,
    });
    let card = json!({ "id": text, "uplink": text, "connected": true, "open": false,
        "held_frames": 3, "held_bytes": 4500, "delay_ms": { "p50": 50.0, "p95": 110.0 },
        "frames_out": 9, "frames_in": 8 });
    let checkpoints = json!({ "saved": 2, "failed": 1, "failure": { "at": 990, "text": text },
        "newest": [{ "at": 940, "image": text, "parent": text, "total_ms": 900.0 }] });
    let status: AgentStatus = serde_json::from_value(json!({
        "host": "a", "listen": "10.0.0.1:7415", "refused": {},
        "peers": [
            { "name": "b", "address": text, "health": "lost", "since_s": 300.0, "trouble": text },
            { "name": "c", "address": "c:1", "health": "alive", "since_s": 1.0, "round_trip_ms": 0.4 },
        ],
        "vms": [
            { "host": "a", "name": "web", "state": text, "backup": "b", "lease": 2,
              "lease_held": true, "protection": protection, "network": [card], "advice": text,
              "checkpoints": checkpoints, "recoveries": 2 },
            { "host": "a", "name": "db", "state": "standby", "committed": 5, "primary": "c" },
            { "host": "c", "name": "db", "state": "protected" },
        ],
    }))
    .unwrap();
    let mut history = ProtectionHistory::default();
    history.add_sample(Duration::from_secs(3), &status.vms);
    let chain = ["/i/2.firn", text].map(|path| ChainFile {
        path: path.into(),
        size: Err(text.to_owned()),
        is_sealed: false,
    });
    let restores = [("web".parse().unwrap(), RestoreSummary::sample(text, 900))].into();
    let files = VmFiles { chains: [(text.to_owned(), chain.to_vec())].into(), restores };
    PageView {
        status: Arc::new(status),
        membership: Some(MembershipHealth { leader: Some(text.to_owned()), trouble: None }),
        history,
        now: Duration::from_secs(5),
        now_s: 1000,
        files: Arc::new(files),
        token: None,
    }
}

fn with_actions(view: PageView) -> PageView {
    PageView { token: Some(PageToken::sample()), ..view }
}

#[test]
fn the_page_shows_what_protects_what() {
    let page = render_page(&view("protected"));
    for text in [
        "Firn at a",
        "2 VMs run, 1 protected.",
        "1 host lost.",
        "epoch 10 committed of 12",
        "lease of generation 2 held",
        "130 ms",
        "standby of db",
        "a chain of 2 images",
        "2 saved, 1 failed",
        "its supervisor was restarted, 2 times",
        "after 180 ms",
        "firn report protected",
        "<polyline",
    ] {
        assert!(page.contains(text), "{text} is not in {page}");
    }
}

#[test]
fn whatever_a_name_is_it_is_text() {
    for view in [view(HOSTILE), with_actions(view(HOSTILE))] {
        let page = render_page(&view);
        assert!(page.matches("&lt;script&gt;").count() >= 8, "{page}");
        // The page has one script of its own, and no handlers, styles or addresses of others.
        assert_eq!(page.matches("<script").count(), 1, "{page}");
        for markup in ["<img", " style=", "javascript:", "http://", "https://"] {
            assert!(!page.contains(markup), "{markup} is in {page}");
        }
        assert!(!page.contains("\"><script>alert"), "{page}");
    }
}

/// Elements and quotes balance, so nothing that is text ends an attribute.
#[test]
fn text_ends_no_attribute() {
    let (plain, hostile) =
        (render_page(&with_actions(view("x"))), render_page(&with_actions(view(HOSTILE))));
    let count = |page: &str, letter: char| page.matches(letter).count();
    // A state that is not known is shown without a color, which is the only other difference.
    for letter in ['<', '>', '"'] {
        assert_eq!(count(&plain, letter), count(&hostile, letter), "{letter}");
    }
}

#[test]
fn actions_are_there_only_where_they_are_allowed() {
    let page = render_page(&view("protected"));
    assert!(!page.contains("data-action") && !page.contains("firn-token"), "{page}");
    let page = render_page(&with_actions(view("protected")));
    let token = "ab".repeat(32);
    assert!(page.contains(&format!("<meta name=\"firn-token\" content=\"{token}\">")), "{page}");
    for action in ["move", "failover", "drain"] {
        assert!(page.contains(&format!("data-action=\"{action}\"")), "{action}: {page}");
    }
    // The standby of another host fails over there.
    assert_eq!(page.matches("data-action=\"failover\"").count(), 1);
    // Without consensus nothing here decides about a move.
    let page = render_page(&PageView { membership: None, ..with_actions(view("protected")) });
    assert!(!page.contains("\"failover\"") && !page.contains("\"drain\""), "{page}");
}

#[test]
fn a_host_alone_has_a_page() {
    let status =
        json!({ "host": "a", "listen": "10.0.0.1:7415", "refused": {}, "peers": [], "vms": [] });
    let status: AgentStatus = serde_json::from_value(status).unwrap();
    let view = PageView {
        status: Arc::new(status),
        membership: None,
        history: ProtectionHistory::default(),
        files: Arc::default(),
        ..view("x")
    };
    let page = render_page(&view);
    assert!(page.contains("There are none.") && page.contains("No VM is protected."), "{page}");
}
