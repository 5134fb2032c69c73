//! The report page in a browser: `scripts/test-report` installs a browser and runs this.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test that fails says where")]

use std::collections::BTreeSet;
use std::path::Path;
use std::process::Command;

use firn_report::{ReportedRun, render_page};
use serde_json::{Value, json};

/// The measurements that a script in a copy of the page makes once everything is laid out.
const PROBE: &str = r#"
<script>
  const box = (it) => { const r = it.getBoundingClientRect(); return [r.left, r.right, r.width, r.height]; };
  const rgb = (it, name) => getComputedStyle(it)[name].match(/[\d.]+/g).map(Number);
  const svgs = [...document.querySelectorAll("svg")];
  const found = {
    dark: matchMedia("(prefers-color-scheme: dark)").matches,
    canvas: rgb(document.body.appendChild(Object.assign(document.createElement("p"),
      { style: "background: canvas" })), "backgroundColor"),
    ink: rgb(document.querySelector("h1"), "color"),
    figures: svgs.map(box),
    marks: svgs.map((svg) => svg.querySelectorAll("polyline, path, circle, rect, line").length),
    labels: svgs.map((svg) => [...svg.querySelectorAll("text")].map((text) => box(text)[2])),
    page: [innerWidth, document.documentElement.scrollWidth],
    head: [...document.querySelectorAll("th")].map((cell) => cell.innerText),
    rows: [...document.querySelectorAll("tbody tr")].map((row) => [...row.cells].map((cell) => cell.innerText)),
    facts: JSON.parse(document.getElementById("facts").textContent),
    loaded: performance.getEntriesByType("resource").map((it) => it.name),
  };
  const said = document.createElement("pre");
  said.id = "found";
  said.textContent = JSON.stringify(found);
  document.body.append(said);
</script>
"#;

fn run(name: &str, mode: &str, waits: u64) -> ReportedRun {
    let fault = |number: u64| {
        json!({ "t_us": 200_000 + number * 9_000, "page": number * 37 % 4096, "tid": 10 + number % 2,
            "wait_us": 7_000, "answered": "storage" })
    };
    let read = |number: u64| {
        json!({ "t_us": 200_000 + number * 9_000, "offset": 4096 + number * 65_536, "len": 65_536,
            "us": 6_500, "why": "demand" })
    };
    let record = json!({
        "version": firn_restore::RUN_RECORD_VERSION, "mode": mode, "ram_pages": 4096, "stored_pages": 3000,
        "vcpus": [{ "tid": 10, "vcpu": 0 }, { "tid": 11, "vcpu": 1 }],
        "prefilled_us": null, "resumed_us": 100_000, "finished_us": 2_900_000,
        "counts": firn_restore::RunCounts { faults: waits, on_demand_pages: waits, ..Default::default() },
        "faults": (0..waits).map(fault).collect::<Vec<_>>(), "faults_left_out": 0,
        "reads": (0..waits).map(read).collect::<Vec<_>>(), "reads_left_out": 0, "prefetched": [[16, 800]],
    });
    ReportedRun { name: name.into(), record: serde_json::from_value(record).unwrap() }
}

/// The measurements of the browser.
fn shown(browser: &str, dir: &Path, page: &str, is_dark: bool) -> Value {
    let file = dir.join("probed.html");
    std::fs::write(&file, page.replace("</body>", &format!("{PROBE}</body>"))).unwrap();
    // 0 is dark, 1 is light (Blink's `mojom::PreferredColorScheme`).
    let scheme = format!("--blink-settings=preferredColorScheme={}", u8::from(!is_dark));
    let said = Command::new(browser)
        .args(["--headless", "--no-sandbox", "--disable-gpu", "--window-size=1280,900", &scheme])
        .arg(format!("--user-data-dir={}", dir.join("profile").display()))
        .arg("--dump-dom")
        .arg(format!("file://{}", file.display()))
        .output()
        .unwrap();
    let dom = String::from_utf8(said.stdout).unwrap();
    let found =
        dom.split_once("<pre id=\"found\">").and_then(|(_, rest)| rest.split_once("</pre>"));
    let (found, _) = found.unwrap_or_else(|| panic!("{}", String::from_utf8_lossy(&said.stderr)));
    let text = found.replace("&lt;", "<").replace("&gt;", ">").replace("&amp;", "&");
    serde_json::from_str(&text).unwrap()
}

fn numbers(value: &Value) -> Vec<f64> {
    value.as_array().unwrap().iter().map(|it| it.as_f64().unwrap()).collect()
}

/// Relative luminance (WCAG 2.1) of a colour.
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

/// With all numbers as a script has them: 0 and 0.0 are the same.
fn plain(value: &Value) -> Value {
    match value {
        Value::Number(number) => json!(number.as_f64()),
        Value::Array(all) => all.iter().map(plain).collect(),
        Value::Object(all) => all.iter().map(|(key, it)| (key.clone(), plain(it))).collect(),
        other => other.clone(),
    }
}

/// Everything has a position and a size, nothing exceeds the edge, and text can be read.
fn is_laid_out(found: &Value) {
    let page = numbers(&found["page"]);
    assert!(page[1] <= page[0], "the page is wider than the window: {page:?}");
    for (figure, marks) in found["figures"].as_array().unwrap().iter().zip(numbers(&found["marks"]))
    {
        let place = numbers(figure);
        assert!(place[2] > 300.0 && place[3] > 150.0 && place[1] <= page[0], "{place:?}");
        assert!(marks > 5.0, "an empty figure");
    }
    for labels in found["labels"].as_array().unwrap() {
        let widths = numbers(labels);
        assert!(widths.len() > 5 && widths.iter().all(|&width| width > 0.0), "{widths:?}");
    }
    let (ink, canvas) = (numbers(&found["ink"]), numbers(&found["canvas"]));
    assert!(contrast(&ink, &canvas) >= 7.0, "{ink:?} on {canvas:?}");
}

#[test]
#[ignore = "needs Chromium: scripts/test-report"]
fn the_page_shows_what_the_records_say() {
    let browser = std::env::var("CHROMIUM").unwrap_or_else(|_| "chromium".to_owned());
    let runs = [run("lazy", "lazy", 200), run("auto", "auto", 12)];
    let dir = tempfile::tempdir().unwrap();
    let page = render_page(&runs).unwrap();
    let schemes = [false, true].map(|is_dark| shown(&browser, dir.path(), &page, is_dark));
    assert_eq!(schemes.each_ref().map(|found| &found["dark"]), [false, true]);
    assert_ne!(schemes[0]["canvas"], schemes[1]["canvas"]);
    for found in &schemes {
        is_laid_out(found);
        assert_eq!(found["loaded"], json!([]));
        // Utilization, three TTR curves, reads; a map for each run.
        assert_eq!(found["figures"].as_array().unwrap().len(), 7);
        for (run, (row, facts)) in runs
            .iter()
            .zip(found["rows"].as_array().unwrap().iter().zip(found["facts"].as_array().unwrap()))
        {
            assert_eq!(plain(facts), plain(&serde_json::to_value(run.compute_facts()).unwrap()));
            is_in_the_table(run, &found["head"], row);
        }
    }
}

/// Each column of the table has its number of the run, as it is written there.
fn is_in_the_table(run: &ReportedRun, head: &Value, row: &Value) {
    let facts = run.compute_facts();
    let cell = |name: &str| {
        let at = head.as_array().unwrap().iter().position(|it| it == name).unwrap();
        row[at].as_str().unwrap().to_owned()
    };
    let seconds = |it: f64| format!("{it:.3}");
    let ttr = |window: &str, utilization: &str| seconds(facts.ttr_s[window][utilization]);
    assert_eq!(cell("run"), run.name);
    assert_eq!(cell("running"), seconds(run.record.resumed_us.unwrap() as f64 / 1e6));
    assert_eq!(cell("all memory there"), seconds(run.record.finished_us.unwrap() as f64 / 1e6));
    assert_eq!(cell("TTR(0.1, 0.9)"), ttr("0.1", "0.9"));
    assert_eq!(cell("TTR(1, 0.8)"), ttr("1", "0.8"));
    assert_eq!(cell("TTR(1, 0.9)"), ttr("1", "0.9"));
    assert_eq!(cell("vCPUs waited"), seconds(run.record.faults.len() as f64 * 0.007));
    assert_eq!(cell("pages on demand"), run.record.counts.on_demand_pages.to_string());
    assert_eq!(cell("reads"), run.record.reads.len().to_string());
    let distinct: BTreeSet<&str> =
        head.as_array().unwrap().iter().filter_map(Value::as_str).collect();
    assert_eq!(distinct.len(), row.as_array().unwrap().len());
}
