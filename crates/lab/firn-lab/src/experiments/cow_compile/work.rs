//! Compile log: how much a guest compiled in a time span.
//!
//! Each worker compiles one source file after another, and logs when it finished which file:
//!
//! ```text
//!   worker 0   |-- adler32 --|---- crc32 ----|------- deflate -------|
//!   worker 1   |---- inflate -----|---- trees ----|-- zutil --|
//!                          [     span      ]                            guest's clock ->
//! ```
//!
//! The work of a file is the time it takes in an undisturbed guest (the median), and is assumed to
//! be even. So the work done in a span is known to a fraction of a file, however few files end in
//! it, and it does not matter which files those were.

use std::collections::{BTreeMap, BTreeSet};

use anyhow::{Context as _, Result, ensure};

use crate::stats::Sample;

/// A time span, in seconds by the guest's clock.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct TimeSpan {
    pub(super) from: f64,
    pub(super) until: f64,
}

impl TimeSpan {
    pub(super) fn duration_s(self) -> f64 {
        (self.until - self.from).max(0.0)
    }

    fn contains_span(self, other: Self) -> bool {
        self.from <= other.from && other.until <= self.until
    }

    fn shared_with(self, other: Self) -> f64 {
        Self { from: self.from.max(other.from), until: self.until.min(other.until) }.duration_s()
    }
}

/// One compilation of a file.
#[derive(Clone, Debug, PartialEq)]
struct CompiledFile {
    file: String,
    span: TimeSpan,
}

/// All compilations of a guest.
#[derive(Clone, Debug)]
pub(super) struct CompileLog {
    units: Vec<CompiledFile>,
    workers: usize,
    /// The undisturbed time of each file, in seconds.
    weights: BTreeMap<String, f64>,
}

impl CompileLog {
    /// Parses lines of `WORKER FILE SECONDS`. A worker's first line gives its begin. `quiet` are
    /// the undisturbed spans.
    pub(super) fn parse_log(log: &str, quiet: &[TimeSpan]) -> Result<Self> {
        let mut last: BTreeMap<&str, f64> = BTreeMap::new();
        let mut units = Vec::new();
        for line in log.lines() {
            let (worker, file, until) =
                split_line(line).with_context(|| format!("{line:?} of the guest"))?;
            if let Some(from) = last.insert(worker, until) {
                units.push(CompiledFile { file: file.to_owned(), span: TimeSpan { from, until } });
            }
        }
        ensure!(!units.is_empty(), "the guest has compiled nothing");
        let weights = median_weights(&units, quiet);
        Ok(Self { units, workers: last.len(), weights })
    }

    /// The work of an average worker in a span, in seconds of undisturbed work.
    pub(super) fn work_in(&self, span: TimeSpan) -> f64 {
        let share =
            |unit: &CompiledFile| unit.span.shared_with(span) / unit.span.duration_s().max(1e-3);
        let done: f64 = self.units.iter().map(|unit| self.weights[&unit.file] * share(unit)).sum();
        done / self.workers as f64
    }

    /// The time that was lost in a span, in seconds, if work otherwise proceeds as fast as in
    /// `quiet`.
    pub(super) fn lost_seconds_in(&self, span: TimeSpan, quiet: &[TimeSpan]) -> f64 {
        let done: f64 = quiet.iter().map(|&quiet| self.work_in(quiet)).sum();
        let seconds: f64 = quiet.iter().map(|quiet| quiet.duration_s()).sum();
        span.duration_s() - self.work_in(span) * seconds / done
    }
}

fn split_line(line: &str) -> Option<(&str, &str, f64)> {
    let mut words = line.split_whitespace();
    Some((words.next()?, words.next()?, words.next()?.parse().ok()?))
}

/// The median time of each file in undisturbed spans, or of all its times if it was always
/// disturbed.
fn median_weights(units: &[CompiledFile], quiet: &[TimeSpan]) -> BTreeMap<String, f64> {
    let files: BTreeSet<&String> = units.iter().map(|unit| &unit.file).collect();
    let is_quiet = |unit: &&CompiledFile| quiet.iter().any(|quiet| quiet.contains_span(unit.span));
    let weight = |file: &String| {
        let of_file = || units.iter().filter(|unit| &unit.file == file);
        let seconds = |unit: &CompiledFile| unit.span.duration_s();
        let undisturbed = Sample::new(of_file().filter(is_quiet).map(seconds));
        undisturbed.or_else(|| Sample::new(of_file().map(seconds))).map_or(0.0, |it| it.median())
    };
    files.into_iter().map(|file| (file.clone(), weight(file))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn span(from: f64, until: f64) -> TimeSpan {
        TimeSpan { from, until }
    }

    /// Two workers; `b` takes twice as long as `a`; from 12 to 16 neither makes progress.
    const LOG: &str = "0 begun 0\n1 begun 0\n0 a 2\n0 b 6\n1 b 4\n1 a 6\n0 a 8\n1 a 8\n0 b 12\n1 b 12\n\
                       0 a 18\n1 b 20\n0 b 22\n1 a 22\n";

    #[test]
    fn work_is_measured_to_a_fraction_of_a_file() {
        let quiet = [span(0.0, 12.0), span(18.0, 22.0)];
        let work = CompileLog::parse_log(LOG, &quiet).unwrap();
        assert_eq!(work.weights, [("a".into(), 2.0), ("b".into(), 4.0)].into());
        assert_eq!(work.work_in(span(0.0, 12.0)), 12.0);
        assert_eq!(work.work_in(span(1.0, 2.5)), 1.5);
    }

    #[test]
    fn lost_work_is_estimated_for_any_files() {
        let quiet = [span(0.0, 12.0)];
        let work = CompileLog::parse_log(LOG, &quiet).unwrap();
        let lost = work.lost_seconds_in(span(11.0, 21.0), &quiet);
        assert!((lost - 4.0).abs() < 1e-9, "{lost}");
        assert!(work.lost_seconds_in(span(3.0, 7.0), &quiet).abs() < 1e-9);
        // Where quiet times are half as fast, the machine is slower, and no time is lost.
        let slow = [span(12.0, 20.0)];
        assert!(work.lost_seconds_in(span(11.0, 21.0), &slow) < 0.0);
    }

    #[test]
    fn garbage_is_an_error() {
        assert!(CompileLog::parse_log("", &[]).is_err());
        let error = CompileLog::parse_log("0 begun 1\n0 a\n", &[]).unwrap_err();
        assert!(error.to_string().contains("\"0 a\""), "{error}");
    }
}
