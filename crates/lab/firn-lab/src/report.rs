//! Experiment report: the figures of an experiment as one JSON object with flat keys, and as a
//! table.
//!
//! ```text
//!   halite-organization (quick)                  1 experiment, its figures
//!     disk_reads.lazy         22975 (22901 .. 23040)      n=3     median (smallest .. largest)
//!     overhead_s.locality     -                                   missing; the table's end says why
//!
//!   {"experiment":"halite-organization","quick":true,
//!    "disk_reads.lazy":22975,"disk_reads.lazy.min":22901,"disk_reads.lazy.max":23040,"disk_reads.lazy.n":3,
//!    "overhead_s.locality":null,
//!    "missing":{"overhead_s.locality":"..."},"notes":["..."],"host":{...},"repetitions":[{...},{...}]}
//! ```
//!
//! A key that could not be measured is present and `null`, with the reason beside it: a silently
//! absent figure reads like one that was never promised. `repetitions` contains every single run as
//! it was measured.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use serde_json::{Map, Value, json};

use crate::stats::{Sample, format_short};

/// One figure of an experiment.
#[derive(Clone, Debug, PartialEq)]
pub enum Figure {
    /// A single number: a ratio, a percentile over many.
    Number(f64),
    /// Repeated measurements; the JSON has their median under the key.
    Sample(Sample),
    /// A value per second, or per step.
    Series(Vec<f64>),
    /// A verdict.
    Text(String),
    /// The figure could not be measured here; the text is the reason.
    Missing(String),
}

/// The outcome of one experiment.
#[derive(Clone, Debug, Default)]
pub struct Report {
    experiment: String,
    quick: bool,
    figures: Vec<(String, Figure)>,
    notes: Vec<String>,
    repetitions: Vec<Value>,
    files: Vec<(String, String)>,
    host: BTreeMap<String, Value>,
    failed: bool,
}

impl Report {
    /// An empty report.
    pub fn new(experiment: &str, quick: bool) -> Self {
        Self { experiment: experiment.to_owned(), quick, ..Self::default() }
    }

    /// The experiment's name.
    pub fn experiment(&self) -> &str {
        &self.experiment
    }

    /// Records a fact about the machine: cores, kernel, hypervisor.
    pub fn set_host_fact(&mut self, key: &str, value: impl Into<Value>) {
        self.host.insert(key.to_owned(), value.into());
    }

    /// Adds a figure, or replaces the figure that has this key.
    pub fn add_figure(&mut self, key: impl Into<String>, figure: Figure) {
        let key = key.into();
        match self.figures.iter_mut().find(|(known, _)| *known == key) {
            Some((_, old)) => *old = figure,
            None => self.figures.push((key, figure)),
        }
    }

    /// Adds a single number.
    pub fn add_number(&mut self, key: impl Into<String>, value: f64) {
        let figure = match value.is_finite() {
            true => Figure::Number(value),
            false => Figure::Missing(format!("it came out as {value}")),
        };
        self.add_figure(key, figure);
    }

    /// Adds repeated measurements; without any, the figure is missing.
    pub fn add_sample(&mut self, key: impl Into<String>, values: impl IntoIterator<Item = f64>) {
        let figure = match Sample::new(values) {
            Some(sample) => Figure::Sample(sample),
            None => Figure::Missing("no run of it succeeded".to_owned()),
        };
        self.add_figure(key, figure);
    }

    /// Adds a verdict.
    pub fn add_verdict(&mut self, key: impl Into<String>, verdict: impl Into<String>) {
        self.add_figure(key, Figure::Text(verdict.into()));
    }

    /// Adds a figure that could not be measured.
    pub fn add_missing(&mut self, key: impl Into<String>, why: impl Into<String>) {
        self.add_figure(key, Figure::Missing(why.into()));
    }

    /// Adds a note that a reader of the figures needs.
    pub fn add_remark(&mut self, note: impl Into<String>) {
        self.notes.push(note.into());
    }

    /// Marks the report as failed because something came out wrong, whatever its figures are.
    pub fn mark_failed(&mut self, why: impl Into<String>) {
        self.failed = true;
        self.add_remark(why);
    }

    /// Records one run as it was measured.
    pub fn add_repetition(&mut self, run: Value) {
        self.repetitions.push(run);
    }

    /// Every run recorded so far.
    pub fn repetitions(&self) -> &[Value] {
        &self.repetitions
    }

    /// Adds a file that is written beside the report.
    pub fn add_file(&mut self, name: impl Into<String>, text: impl Into<String>) {
        self.files.push((name.into(), text.into()));
    }

    /// Adds a drawing.
    pub fn add_drawing(&mut self, name: impl Into<String>, svg: String) {
        self.add_file(format!("{}.svg", name.into()), svg);
    }

    /// The value under a key: the number, or the median.
    pub fn figure_value(&self, key: &str) -> Option<f64> {
        match self.figures.iter().find(|(known, _)| known == key)?.1 {
            Figure::Number(value) => Some(value),
            Figure::Sample(ref sample) => Some(sample.median()),
            Figure::Series(_) | Figure::Text(_) | Figure::Missing(_) => None,
        }
    }

    /// Whether every figure was measured, and nothing came out wrong.
    pub fn is_complete(&self) -> bool {
        !self.failed && self.missing_figures().next().is_none()
    }

    fn missing_figures(&self) -> impl Iterator<Item = (&str, &str)> {
        self.figures.iter().filter_map(|(key, figure)| match figure {
            Figure::Missing(why) => Some((key.as_str(), why.as_str())),
            _ => None,
        })
    }

    /// The whole report as one JSON object.
    pub fn to_json(&self) -> Value {
        let mut object = Map::new();
        object.insert("experiment".to_owned(), json!(self.experiment));
        object.insert("quick".to_owned(), json!(self.quick));
        for (key, figure) in &self.figures {
            insert_figure(&mut object, key, figure);
        }
        let missing: BTreeMap<_, _> = self.missing_figures().collect();
        object.insert("missing".to_owned(), json!(missing));
        object.insert("notes".to_owned(), json!(self.notes));
        object.insert("host".to_owned(), json!(self.host));
        object.insert("repetitions".to_owned(), json!(self.repetitions));
        Value::Object(object)
    }

    /// The figures as a table, then the missing ones with their reasons, and the notes.
    pub fn to_table(&self) -> String {
        let quick = if self.quick { " (quick)" } else { "" };
        let mut text = format!("{}{quick}\n", self.experiment);
        let width = self.figures.iter().map(|(key, _)| key.len()).max().unwrap_or(0);
        for (key, figure) in &self.figures {
            let _ = writeln!(text, "  {key:width$}  {}", format_figure(figure));
        }
        for (key, why) in self.missing_figures() {
            let _ = writeln!(text, "  missing: {key}: {why}");
        }
        for note in &self.notes {
            let _ = writeln!(text, "  note: {note}");
        }
        text
    }

    /// Writes `NAME.json` and the other files into a directory, which it creates. Returns the paths
    /// it wrote.
    pub fn write_files(&self, dir: &Path) -> io::Result<Vec<PathBuf>> {
        fs::create_dir_all(dir)?;
        let json = dir.join(format!("{}.json", self.experiment));
        fs::write(&json, format!("{:#}\n", self.to_json()))?;
        let mut written = vec![json];
        for (name, text) in &self.files {
            let path = dir.join(name);
            fs::write(&path, text)?;
            written.push(path);
        }
        Ok(written)
    }
}

fn insert_figure(object: &mut Map<String, Value>, key: &str, figure: &Figure) {
    let value = match figure {
        Figure::Number(value) => json!(value),
        Figure::Sample(sample) => json!(sample.median()),
        Figure::Series(values) => json!(values),
        Figure::Text(text) => json!(text),
        Figure::Missing(_) => Value::Null,
    };
    object.insert(key.to_owned(), value);
    if let Figure::Sample(sample) = figure {
        object.insert(format!("{key}.min"), json!(sample.min()));
        object.insert(format!("{key}.max"), json!(sample.max()));
        object.insert(format!("{key}.n"), json!(sample.count()));
    }
}

fn format_figure(figure: &Figure) -> String {
    match figure {
        Figure::Number(value) => format_short(*value),
        Figure::Sample(sample) => format!("{sample}  n={}", sample.count()),
        Figure::Series(values) => format_series(values),
        Figure::Text(text) => text.clone(),
        Figure::Missing(_) => "-".to_owned(),
    }
}

/// The first values of a series.
fn format_series(values: &[f64]) -> String {
    const SHOWN: usize = 12;
    let shown: Vec<String> = values.iter().take(SHOWN).map(|value| format!("{value:.0}")).collect();
    let more = if values.len() > SHOWN { " ..." } else { "" };
    format!("{}{more}", shown.join(" "))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report() -> Report {
        let mut report = Report::new("halite-organization", true);
        report.add_sample("disk_reads.lazy", [10.0, 30.0, 20.0]);
        report.add_number("prefetched_used.locality", 0.83);
        report.add_figure("guest_time_percent.lazy", Figure::Series(vec![1.0, 99.5]));
        report.add_sample("overhead_s.locality", []);
        report.add_repetition(json!({ "system": "lazy", "disk_reads": 10 }));
        report
    }

    #[test]
    fn keys_are_flat_and_have_their_spread() {
        let json = report().to_json();
        assert_eq!(json["disk_reads.lazy"], 20.0);
        assert_eq!(json["disk_reads.lazy.min"], 10.0);
        assert_eq!(json["disk_reads.lazy.n"], 3);
        assert_eq!(json["guest_time_percent.lazy"][1], 99.5);
        assert_eq!(json["repetitions"][0]["system"], "lazy");
    }

    #[test]
    fn a_missing_figure_is_null_with_a_reason() {
        let report = report();
        let json = report.to_json();
        assert!(json["overhead_s.locality"].is_null());
        assert!(json["missing"]["overhead_s.locality"].is_string());
        assert!(report.to_table().contains("missing: overhead_s.locality: no run"));
        assert!(!report.is_complete());
    }

    #[test]
    fn a_ratio_over_nothing_is_missing() {
        let mut report = Report::new("x", false);
        report.add_number("ratio", 1.0 / 0.0);
        assert!(report.to_json()["ratio"].is_null());
    }

    #[test]
    fn a_key_is_there_once() {
        let mut report = report();
        report.add_number("disk_reads.lazy", 5.0);
        assert_eq!(report.figure_value("disk_reads.lazy"), Some(5.0));
        assert_eq!(report.to_table().matches("disk_reads.lazy").count(), 1);
    }

    #[test]
    fn files_are_written_under_the_experiments_name() {
        let dir = tempfile::tempdir().unwrap();
        let mut report = report();
        report.add_drawing("halite-figure-3", "<svg/>".to_owned());
        let written = report.write_files(&dir.path().join("new")).unwrap();
        let names: Vec<_> = written.iter().filter_map(|path| path.file_name()).collect();
        assert_eq!(names, ["halite-organization.json", "halite-figure-3.svg"]);
        assert!(written.iter().all(|path| path.exists()));
    }
}
