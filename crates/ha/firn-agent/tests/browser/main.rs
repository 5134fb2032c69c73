//! The agent's page in a browser: `scripts/test-report` installs a browser and runs this.
//!
//! With `FIRN_REPORT_PICTURES=DIRECTORY` the tests also write pictures of what they check.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test that fails says where")]

#[path = "../../../../lab/firn-report/tests/browser/chromium.rs"]
mod chromium;
mod sample;

use std::path::PathBuf;

use chromium::{Browser, View};
use firn_agent::page::{SCRIPT, STYLE, render_page};
use serde_json::{Value, json};

const WIDTHS: [u32; 3] = [390, 800, 1600];

/// The smallest text, and the smallest button, that people can read and hit, in pixels.
const TEXT_PX_MIN: f64 = 11.0;
const BUTTON_PX_MIN: f64 = 24.0;

fn numbers(value: &Value) -> Vec<f64> {
    value.as_array().unwrap().iter().map(|it| it.as_f64().unwrap()).collect()
}

fn list(value: &Value) -> &[Value] {
    value.as_array().unwrap()
}

/// The page as one file: with its style sheet, and without its script, which needs an agent.
fn page_alone() -> String {
    let page = render_page(&sample::sample_view());
    let link = "<link rel=\"stylesheet\" href=\"page/style.css\">";
    assert!(page.contains(link), "{page}");
    let page = page.replace(link, &format!("<style>{STYLE}</style>"));
    page.replace("<script src=\"page/script.js\" defer></script>", "")
}

#[test]
#[ignore = "needs Chromium: scripts/test-report"]
fn the_page_can_be_read_at_each_width_in_light_and_dark() {
    let (dir, page) = (tempfile::tempdir().unwrap(), page_alone());
    for width in WIDTHS {
        for is_dark in [false, true] {
            let view = View { width, is_dark };
            let browser = Browser::new(dir.path(), &page, include_str!("probe.js"));
            let found = browser.measure(view);
            if let Some(pictures) = std::env::var_os("FIRN_REPORT_PICTURES") {
                let pictures = PathBuf::from(pictures).join("page");
                std::fs::create_dir_all(&pictures).unwrap();
                browser.take_screenshot(view, &pictures);
            }
            assert_eq!((&found["dark"], &found["width"]), (&json!(is_dark), &json!(width)));
            check_layout(&found);
            check_colors(&found);
            check_parts(&found);
        }
    }
}

/// Nothing exceeds the window, and text and buttons have a size.
fn check_layout(found: &Value) {
    let width = found["width"].as_f64().unwrap();
    assert!(found["scrollWidth"].as_f64().unwrap() <= width, "the page is wider than {width}");
    assert!(list(&found["texts"]).len() > 80, "{}", found["texts"]);
    for text in list(&found["texts"]) {
        let place = numbers(&text["box"]);
        assert!(place[0] >= -0.5 && place[1] <= width + 0.5, "{width}: {text}");
        assert!(text["px"].as_f64().unwrap() >= TEXT_PX_MIN, "{width}: {text}");
    }
    for button in list(&found["buttons"]) {
        let place = numbers(&button["box"]);
        assert!(place[3] - place[2] >= BUTTON_PX_MIN, "{width}: {button}");
    }
    // On a phone a row is a list, whose entries need their names.
    let has_names = list(&found["labels"]).iter().all(|label| label != "none" && label != "\"\"");
    assert_eq!(has_names, width < 700.0, "{}", found["labels"]);
}

/// Text and lines differ enough from what they are on (WCAG 2.1: 4.5 and 3 to 1).
fn check_colors(found: &Value) {
    for (kind, least) in [("texts", 4.5), ("lines", 3.0)] {
        for it in list(&found[kind]) {
            let (ink, on) = (numbers(&it["ink"]), numbers(&it["on"]));
            assert!(contrast(&ink, &on) >= least, "{it}");
        }
    }
}

/// Charts have names, each name of an element is there once, and the question is not open.
fn check_parts(found: &Value) {
    let titles = ["Hosts", "Virtual machines", "Checkpoints", "Restores at host1"];
    for title in titles {
        assert!(list(&found["sections"]).contains(&json!(title)), "{title}");
    }
    assert_eq!(list(&found["figures"]).len(), 4, "lag and pause of two VMs");
    for figure in list(&found["figures"]) {
        let (name, place) = (figure["name"].as_str().unwrap(), numbers(&figure["box"]));
        assert!(figure["role"] == "img" && name.contains(", now "), "{figure}");
        assert!(place[1] - place[0] > 300.0, "{figure}");
    }
    // Three lines each: the series has a gap.
    assert_eq!(list(&found["lines"]).len(), 4 * 2, "{}", found["lines"]);
    let buttons: Vec<&str> =
        list(&found["buttons"]).iter().map(|it| it["text"].as_str().unwrap()).collect();
    for label in ["Move to host2", "Move to host1", "Fail over", "Drain"] {
        assert!(buttons.contains(&label), "{buttons:?}");
    }
    let mut ids: Vec<&str> = list(&found["ids"]).iter().map(|it| it.as_str().unwrap()).collect();
    let count = ids.len();
    ids.sort_unstable();
    ids.dedup();
    assert_eq!(ids.len(), count, "two elements have one name");
    assert_eq!(found["dialog"], false);
}

/// Relative luminance (WCAG 2.1) of a color.
fn luminance(rgb: &[f64]) -> f64 {
    let linear = |channel: f64| match channel / 255.0 {
        low if low <= 0.03928 => low / 12.92,
        high => ((high + 0.055) / 1.055).powf(2.4),
    };
    0.2126 * linear(rgb[0]) + 0.7152 * linear(rgb[1]) + 0.0722 * linear(rgb[2])
}

fn contrast(a: &[f64], b: &[f64]) -> f64 {
    let (a, b) = (luminance(a), luminance(b));
    (a.max(b) + 0.05) / (a.min(b) + 0.05)
}

/// The question before an action, and the request that follows from the answer. A function takes the
/// place of the network.
#[test]
#[ignore = "needs Chromium: scripts/test-report"]
fn an_action_is_asked_for_and_sent_once_it_is_confirmed() {
    let dir = tempfile::tempdir().unwrap();
    let mut page = page_alone();
    let fake = include_str!("network.js");
    let scripts = format!("<script>{fake}</script><script>{SCRIPT}</script></body>");
    page = page.replace("</body>", &scripts);
    let browser = Browser::new(dir.path(), &page, include_str!("clicks.js"));
    let found = browser.measure(View { width: 390, is_dark: true });
    assert_eq!(found["question"], "Move web from host1 to host2?");
    assert_eq!((&found["asks"], &found["closed"]), (&json!(true), &json!(true)));
    assert_eq!(found["afterCancel"], json!([]), "nothing is sent without a yes");
    let sent = &list(&found["afterYes"])[0];
    assert_eq!(list(&found["afterYes"]).len(), 1, "{found}");
    assert_eq!((&sent["url"], &sent["method"]), (&json!("page/move"), &json!("POST")));
    let request: Value = serde_json::from_str(sent["body"].as_str().unwrap()).unwrap();
    assert_eq!(request, json!({ "vm": "web", "to": "host2" }));
    let headers = &sent["headers"];
    assert_eq!(headers["content-type"], "application/json");
    assert_eq!(headers["x-firn-token"].as_str().unwrap().len(), 64);
    assert_eq!(found["notice"], "Move to host2: host host2 is <b>gone</b> (look there)");
    assert_eq!(found["bold"], 0, "an answer is text");
}
