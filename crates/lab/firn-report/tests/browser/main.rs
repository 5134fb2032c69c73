//! The report page in a browser: `scripts/test-report` installs a browser and runs this.
//!
//! With `FIRN_REPORT_PICTURES=DIRECTORY` the test also writes pictures of what it checks.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test that fails says where")]

mod chromium;
mod records;

use std::path::Path;

use chromium::{Browser, View};
use firn_report::{ReportedRun, render_page};
use serde_json::{Value, json};

const WIDTHS: [u32; 3] = [390, 800, 1600];
/// The area of the data in a figure, in its own pixels: left, right, top, bottom.
const AREA: [f64; 4] = [44.0, 352.0, 22.0, 196.0];
/// A tenth of such a pixel is lost by rounding.
const PIXEL: f64 = 0.11;

fn numbers(value: &Value) -> Vec<f64> {
    value.as_array().unwrap().iter().map(|it| it.as_f64().unwrap()).collect()
}

fn list(value: &Value) -> &[Value] {
    value.as_array().unwrap()
}

fn views() -> impl Iterator<Item = View> {
    WIDTHS.into_iter().flat_map(|width| [false, true].map(|is_dark| View { width, is_dark }))
}

#[test]
#[ignore = "needs Chromium: scripts/test-report"]
fn the_page_shows_the_values_of_the_records() {
    let runs = records::runs_of_all_modes();
    let dir = tempfile::tempdir().unwrap();
    let page = render_page(&runs);
    for view in views() {
        let browser = Browser::new(dir.path(), &page, include_str!("probe.js"));
        let found = browser.measure(view);
        if let Some(pictures) = std::env::var_os("FIRN_REPORT_PICTURES") {
            browser.take_screenshot(view, Path::new(&pictures));
        }
        assert_eq!((&found["dark"], &found["width"]), (&json!(view.is_dark), &json!(view.width)));
        assert_eq!(found["loaded"], json!([]));
        // Utilization, three TTR curves, reads; a map for each run.
        assert_eq!(list(&found["figures"]).len(), 5 + runs.len());
        check_layout(&found);
        check_colors(&found);
        check_figures(&runs, &found);
        check_numbers(&runs, &found);
    }
}

/// Nothing exceeds the window or covers anything else, and text has a size to read.
fn check_layout(found: &Value) {
    let width = found["width"].as_f64().unwrap();
    assert!(found["scrollWidth"].as_f64().unwrap() <= width, "the page is wider than the window");
    for figure in list(&found["figures"]) {
        let (title, place) = (&figure["title"], numbers(&figure["box"]));
        assert!(place[0] >= 0.0 && place[1] <= width && place[1] - place[0] > 300.0, "{place:?}");
        let legend = numbers(&figure["legend"]);
        assert!(legend[3] <= place[2] && legend[3] - legend[2] > 10.0, "{title}: {legend:?}");
        assert!(figure["fontPx"].as_f64().unwrap() >= 11.0, "{title}: {}", figure["fontPx"]);
        let labels: Vec<Vec<f64>> = list(&figure["labels"]).iter().map(numbers).collect();
        assert!(labels.len() > 6, "{title}: {labels:?}");
        for (number, label) in labels.iter().enumerate() {
            let is_inside = label[0] >= place[0] - 0.5 && label[3] <= place[3] + 0.5;
            assert!(is_inside && label[1] <= place[1] + 8.0, "{title}: {label:?} in {place:?}");
            let covered = labels[..number].iter().find(|other| do_overlap(label, other));
            assert_eq!(covered, None, "{title}: {label:?}");
        }
    }
}

fn do_overlap(one: &[f64], other: &[f64]) -> bool {
    one[0] < other[1] && other[0] < one[1] && one[2] + 2.0 < other[3] && other[2] + 2.0 < one[3]
}

/// Text and marks differ enough from the background (WCAG 2.1: 4.5 and 3 to 1).
fn check_colors(found: &Value) {
    let canvas = numbers(&found["canvas"]);
    let inks = list(&found["inks"]).iter().chain([&found["svgInk"]]);
    for ink in inks.map(numbers) {
        assert!(contrast(&ink, &canvas) >= 4.5, "text in {ink:?} on {canvas:?}");
    }
    for color in list(&found["figures"]).iter().flat_map(|it| list(&it["colors"])).map(numbers) {
        assert!(contrast(&color, &canvas) >= 3.0, "{color:?} on {canvas:?}");
    }
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

/// A line in the units of its axes.
struct Curve {
    name: String,
    points: Vec<(f64, f64)>,
    /// The size of [`PIXEL`] on both axes.
    exactness: (f64, f64),
}

fn curves_of(figure: &Value) -> Vec<Curve> {
    let ends = numbers(&figure["ends"]);
    let per_x = ends[0] / (AREA[1] - AREA[0]);
    let per_y = ends[1] / (AREA[3] - AREA[2]);
    let value = |point: Vec<f64>| ((point[0] - AREA[0]) * per_x, (AREA[3] - point[1]) * per_y);
    let curve = |line: &Value| Curve {
        name: line["name"].as_str().unwrap().to_owned(),
        points: list(&line["points"]).iter().map(numbers).map(value).collect(),
        exactness: (PIXEL * per_x, PIXEL * per_y),
    };
    list(&figure["lines"]).iter().map(curve).collect()
}

/// Figures have names and descriptions, no curve runs backwards, and curves end where the records
/// end.
fn check_figures(runs: &[ReportedRun], found: &Value) {
    let figures = list(&found["figures"]);
    for figure in figures {
        assert_eq!((&figure["role"], &figure["name"]), (&json!("img"), &figure["title"]));
        assert!(figure["text"].as_str().unwrap().len() > 20, "{figure}");
        for curve in curves_of(figure) {
            assert!(curve.points.len() > 2, "{} in {}", curve.name, figure["title"]);
            let is_sorted = curve.points.is_sorted_by_key(|point| point.0);
            assert!(is_sorted, "{} runs backwards in {}", curve.name, figure["title"]);
        }
    }
    for (number, run) in runs.iter().enumerate() {
        check_utilization(run, &curves_of(&figures[0])[number]);
        for (figure, window) in figures[1..4].iter().zip(["0.1", "1", "10"]) {
            check_ttr(run, window, &curves_of(figure)[number]);
        }
        check_reads(run, &curves_of(&figures[4])[number]);
        assert_eq!(figures[5 + number]["title"], format!("{}: requested pages", run.name));
        assert_eq!(figures[5 + number]["ends"], figures[5]["ends"], "maps share their axes");
        assert_eq!(figures[5 + number]["ends"][0], figures[0]["ends"][0]);
    }
}

/// 0 % until a window reaches the instant at which the vCPUs began to run, 100 % at the end.
fn check_utilization(run: &ReportedRun, curve: &Curve) {
    let resumed_s = run.record.resumed_us.unwrap() as f64 / 1e6;
    assert_eq!(curve.name, run.name);
    assert!(curve.points[0].0.abs() < 1e-9 && curve.points[0].1 < 1e-9, "{:?}", curve.points[0]);
    let first = curve.points.iter().find(|point| point.1 > curve.exactness.1).unwrap();
    assert!(first.0 >= resumed_s - 0.1 - curve.exactness.0, "{}: {first:?}", run.name);
    let last = curve.points.last().unwrap();
    assert!((last.1 - 100.0).abs() <= curve.exactness.1, "{}: {last:?}", run.name);
}

fn check_ttr(run: &ReportedRun, window: &str, curve: &Curve) {
    let facts = run.compute_facts();
    assert!(curve.points.is_sorted_by_key(|point| (point.1 * 1e6) as i64), "TTR grows with u");
    for (utilization, ttr) in &facts.ttr_s[window] {
        let percent = 100.0 * utilization.parse::<f64>().unwrap();
        let is_it = |point: &&(f64, f64)| (point.0 - percent).abs() <= 2.0 * curve.exactness.0;
        let point = curve.points.iter().find(is_it).unwrap();
        assert!((point.1 - ttr).abs() <= curve.exactness.1, "{}: {point:?} {ttr}", run.name);
    }
}

/// From nothing to the sum of all reads, at the time at which the last one ended.
fn check_reads(run: &ReportedRun, curve: &Curve) {
    let reads = &run.record.reads;
    let end_s = reads.iter().map(|read| read.ended_us()).max().unwrap() as f64 / 1e6;
    let mib = reads.iter().map(|read| f64::from(read.len)).sum::<f64>() / f64::from(1 << 20);
    assert_eq!(curve.name, run.name);
    assert!(curve.points[0].0.abs() < 1e-9 && curve.points[0].1.abs() < 1e-9);
    assert!(curve.points.is_sorted_by_key(|point| point.1), "{}: bytes are unread", run.name);
    let last = curve.points.last().unwrap();
    assert!((last.0 - end_s).abs() <= curve.exactness.0, "{}: {last:?} {end_s}", run.name);
    assert!((last.1 - mib).abs() <= curve.exactness.1, "{}: {last:?} {mib}", run.name);
}

/// The headlines, the table and the JSON have the numbers of the records.
fn check_numbers(runs: &[ReportedRun], found: &Value) {
    for (number, run) in runs.iter().enumerate() {
        let facts = run.compute_facts();
        let written = &found["facts"][number];
        assert!(is_same(written, &serde_json::to_value(&facts).unwrap()), "{written} {facts:?}");
        let headline = found["headlines"][number].as_str().unwrap();
        let claimed = headline.strip_prefix("90 % of its speed from ").unwrap();
        let claimed: f64 = claimed.strip_suffix("\u{a0}s on").unwrap().parse().unwrap();
        assert!(claimed >= run.record.resumed_us.unwrap() as f64 / 1e6, "{headline}");
        assert!(claimed + 1e-9 >= facts.ttr_s["1"]["0.9"], "{headline}");
        assert!(claimed - facts.responsive_s.unwrap() < 0.01, "{headline}");
        assert_eq!(found["head"][number + 1], run.name);
        let cell = |name: &str| {
            let row = list(&found["rows"]).iter().find(|row| row[0] == name).unwrap();
            row[number + 1].as_str().unwrap().to_owned()
        };
        let seconds = |us: u64| format!("{:.3}", us as f64 / 1e6);
        assert_eq!(cell("mode"), run.record.mode.to_string());
        assert_eq!(cell("vCPUs run, s"), seconds(run.record.resumed_us.unwrap()));
        assert_eq!(cell("all memory loaded, s"), seconds(run.record.finished_us.unwrap()));
        assert_eq!(cell("TTR(1, 0.9), s"), format!("{:.3}", facts.ttr_s["1"]["0.9"]));
        assert_eq!(cell("vCPUs waited, s"), seconds(run.record.faults.len() as u64 * 7_000));
        assert_eq!(cell("pages on demand"), run.record.counts.on_demand_pages.to_string());
        assert_eq!(cell("reads"), run.record.reads.len().to_string());
    }
}

/// Equal, except that a script has no integers, and reading a number may change its last digit.
fn is_same(one: &Value, other: &Value) -> bool {
    match (one, other) {
        (Value::Number(_), Value::Number(_)) => {
            (one.as_f64().unwrap() - other.as_f64().unwrap()).abs() < 1e-9
        }
        (Value::Object(all), Value::Object(others)) => {
            all.keys().eq(others.keys()) && all.iter().all(|(key, it)| is_same(it, &others[key]))
        }
        _ => one == other,
    }
}
