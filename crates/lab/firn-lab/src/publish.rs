//! The page of measured figures: made from the JSON of experiments, never by hand.
//!
//! ```text
//!   target/lab/*.json  ---->  one Markdown page:
//!                               ## vpc-move
//!                               what it measures; commit, day, host, accelerator, quick or full
//!                               | figure | median | smallest | largest | n |
//!                               figures that are missing, with their reasons; remarks
//! ```

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, ensure};
use serde_json::{Map, Value};

use crate::experiments;
use crate::stats::format_short;

/// Keys of a report that are no figures.
const FACTS: [&str; 6] = ["experiment", "quick", "missing", "notes", "host", "repetitions"];
/// Endings of keys that belong to the figure without them.
const SPREADS: [&str; 3] = [".min", ".max", ".n"];
/// Ending of the first of several percentiles that were computed from the same values.
const MEDIAN: &str = ".p50";
/// Maximum number of elements of a series on the page.
const SHOWN_MAX: usize = 12;

/// What a section begins with.
const SECTION: &str = "\n## ";

const HEAD: &str = "# Measured

Made by `firn-lab publish` from what `firn-lab run` has written; nothing here is written by hand. `make
bench` runs all experiments, with few repetitions, and makes this page for your machine. Each section
says what the machine was. Where the accelerator is `tcg`, QEMU emulated the guest's processors, so
absolute times are not those of KVM: compare figures of one section with each other. Each experiment is
described in the documentation of its file in `crates/lab/firn-lab/src/experiments`.
";

/// Writes the page from all reports in a directory; returns their number. A page that exists keeps the
/// sections of other experiments.
///
/// # Errors
/// If there is no report, or a file is no report.
pub fn publish_reports(from: &Path, page: &Path) -> Result<usize> {
    let reports = read_reports(from)?;
    ensure!(
        !reports.is_empty(),
        "{}: no report of an experiment; `firn-lab run NAME` writes one",
        from.display()
    );
    let mut sections = read_sections(page)?;
    let count = reports.len();
    sections.extend(reports.into_iter().map(|(name, report)| (name, describe_report(&report))));
    let sections: String = sections.values().map(|section| format!("\n{section}")).collect();
    fs::write(page, format!("{HEAD}{sections}")).with_context(|| page.display().to_string())?;
    Ok(count)
}

/// The sections of a page, by experiment; none if there is no page.
fn read_sections(page: &Path) -> Result<BTreeMap<String, String>> {
    if !page.exists() {
        return Ok(BTreeMap::new());
    }
    let text = fs::read_to_string(page).with_context(|| page.display().to_string())?;
    let sections = text.split(SECTION).skip(1);
    let name_of = |section: &str| section.lines().next().unwrap_or_default().trim().to_owned();
    Ok(sections.map(|it| (name_of(it), format!("{}{}\n", &SECTION[1..], it.trim_end()))).collect())
}

/// The reports in a directory, by experiment. Other JSON files are ignored.
fn read_reports(from: &Path) -> Result<BTreeMap<String, Map<String, Value>>> {
    let entries = fs::read_dir(from).with_context(|| from.display().to_string())?;
    let mut reports = BTreeMap::new();
    for entry in entries {
        let path: PathBuf = entry?.path();
        if path.extension().is_none_or(|it| it != "json") {
            continue;
        }
        let reading = || path.display().to_string();
        let text = fs::read_to_string(&path).with_context(reading)?;
        let value: Value = serde_json::from_str(&text).with_context(reading)?;
        if let (Value::Object(report), Some(name)) = (&value, value["experiment"].as_str()) {
            reports.insert(name.to_owned(), report.clone());
        }
    }
    Ok(reports)
}

fn describe_report(report: &Map<String, Value>) -> String {
    let name = report["experiment"].as_str().unwrap_or("?");
    let about = experiments::ALL.iter().find(|it| it.name == name).map_or("", |it| it.about);
    let mut text = format!("## {name}\n\n{about}\n\n{}\n\n", describe_host(report));
    text += "| figure | value | smallest | largest | n |\n|---|---|---|---|---|\n";
    for key in report.keys().filter(|key| is_figure(report, key)) {
        let _ = writeln!(text, "{}", describe_figure(report, key));
    }
    if let Some(missing) = report.get("missing").and_then(Value::as_object) {
        let lines =
            missing.iter().map(|(key, why)| format!("- `{key}` is missing: {}", one_line(why)));
        text += &paragraph(lines.collect());
    }
    if let Some(notes) = report.get("notes").and_then(Value::as_array) {
        text += &paragraph(notes.iter().map(|note| format!("- {}", one_line(note))).collect());
    }
    text
}

fn paragraph(lines: Vec<String>) -> String {
    match lines.is_empty() {
        true => String::new(),
        false => format!("\n{}\n", lines.join("\n")),
    }
}

fn describe_host(report: &Map<String, Value>) -> String {
    let host = &report["host"];
    let fact = |key: &str| match &host[key] {
        Value::String(text) => text.clone(),
        Value::Null => "unknown".to_owned(),
        other => other.to_string(),
    };
    let extent = if report.get("quick") == Some(&Value::Bool(true)) { "quick" } else { "full" };
    format!(
        "A {extent} run at commit `{}`, {}: {} processors, Linux {}, accelerator `{}`, seed {}.",
        fact("commit"),
        fact("day"),
        fact("cores"),
        fact("kernel"),
        fact("accel"),
        fact("seed"),
    )
}

/// Whether a key is a figure by itself, and not the spread of another one.
fn is_figure(report: &Map<String, Value>, key: &str) -> bool {
    let is_spread = SPREADS.iter().any(|end| {
        let of = key.strip_suffix(end);
        of.is_some_and(|of| {
            report.contains_key(of) || report.contains_key(&format!("{of}{MEDIAN}"))
        })
    });
    !FACTS.contains(&key) && !is_spread
}

fn describe_figure(report: &Map<String, Value>, key: &str) -> String {
    let base = key.strip_suffix(MEDIAN).unwrap_or(key);
    let spread = |end: &str| {
        let value =
            report.get(&format!("{key}{end}")).or_else(|| report.get(&format!("{base}{end}")));
        value.map(format_value).unwrap_or_default()
    };
    format!(
        "| `{key}` | {} | {} | {} | {} |",
        format_value(&report[key]),
        spread(".min"),
        spread(".max"),
        spread(".n")
    )
}

fn format_value(value: &Value) -> String {
    match value {
        Value::Null => "-".to_owned(),
        Value::Number(number) => number.as_f64().map_or_else(String::new, format_short),
        Value::Array(values) => {
            let shown: Vec<String> = values.iter().take(SHOWN_MAX).map(format_value).collect();
            let more = if values.len() > SHOWN_MAX { " ..." } else { "" };
            format!("{}{more}", shown.join(" "))
        }
        other => one_line(other),
    }
}

/// Text that stays in its line, and in its cell of a table.
fn one_line(value: &Value) -> String {
    let text = value.as_str().map_or_else(|| value.to_string(), str::to_owned);
    text.split_whitespace().collect::<Vec<_>>().join(" ").replace('|', "\\|")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::Report;

    fn report() -> Report {
        let mut report = Report::new("vpc-move", true);
        report.set_host_fact("commit", "0123abcd");
        report.set_host_fact("accel", "tcg");
        report.add_sample("ttr_s.auto", [0.2, 0.4, 0.3]);
        report.add_number("wait_ms.ep.p50", 223.4);
        report.add_number("wait_ms.ep.n", 50.0);
        report.add_missing("pause_ms.ep", "no KVM\nhere");
        report.mark_failed("a | b");
        report
    }

    #[test]
    fn each_figure_has_its_spread_in_one_row() {
        let dir = tempfile::tempdir().unwrap();
        report().write_files(dir.path()).unwrap();
        fs::write(dir.path().join("other.json"), "[1]").unwrap();
        let page = dir.path().join("measured.md");
        assert_eq!(publish_reports(dir.path(), &page).unwrap(), 1);
        let text = fs::read_to_string(page).unwrap();
        for line in [
            "## vpc-move",
            "| `ttr_s.auto` | 0.300 | 0.200 | 0.400 | 3 |",
            "| `wait_ms.ep.p50` | 223 |  |  | 50 |",
            "| `pause_ms.ep` | - |  |  |  |",
            "- `pause_ms.ep` is missing: no KVM here",
            "- a \\| b",
        ] {
            assert!(text.lines().any(|it| it == line), "{line:?} is not in\n{text}");
        }
        assert!(text.contains("A quick run at commit `0123abcd`"), "{text}");
        assert!(!text.contains("ttr_s.auto.min"), "{text}");
    }

    #[test]
    fn a_page_keeps_the_sections_of_other_experiments() {
        let dir = tempfile::tempdir().unwrap();
        let page = dir.path().join("measured.md");
        let publish = |name: &str, value: f64| {
            let reports = tempfile::tempdir().unwrap();
            let mut report = Report::new(name, true);
            report.add_number("ratio", value);
            report.write_files(reports.path()).unwrap();
            publish_reports(reports.path(), &page).unwrap();
            fs::read_to_string(&page).unwrap()
        };
        let first = publish("vpc-move", 1.5);
        let both = publish("sealed", 2.5);
        assert!(both.ends_with(first.strip_prefix(HEAD).unwrap()), "{both}");
        assert_eq!(both.matches("## ").count(), 2, "in the order of their names: {both}");
        assert_eq!(publish("sealed", 2.5), both);
        let later = publish("vpc-move", 3.5);
        assert!(later.contains("| 2.50 |") && later.contains("| 3.50 |"), "{later}");
        assert!(!later.contains("| 1.50 |"), "{later}");
    }

    #[test]
    fn a_directory_without_reports_is_an_error() {
        let dir = tempfile::tempdir().unwrap();
        let error = publish_reports(dir.path(), &dir.path().join("m.md")).unwrap_err();
        assert!(error.to_string().contains("no report"), "{error}");
        fs::write(dir.path().join("x.json"), "{").unwrap();
        let error = publish_reports(dir.path(), &dir.path().join("m.md")).unwrap_err();
        assert!(error.to_string().contains("x.json"), "{error}");
    }
}
