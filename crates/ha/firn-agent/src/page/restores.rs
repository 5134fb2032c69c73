//! Summaries of restores, from the run records that supervisors leave. A record lists every page
//! fault, so it may have megabytes: it is read again only if it has changed.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use serde::Deserialize;
use serde::de::IgnoredAny;

/// The largest record that is read, in bytes.
const RECORD_BYTES_MAX: u64 = 64 << 20;

/// A restore of a VM.
#[derive(Clone, Debug, PartialEq)]
pub struct RestoreSummary {
    /// Its record.
    pub record: PathBuf,
    /// When the record was written, in seconds since 1970.
    pub at: u64,
    /// The order in which memory was restored.
    pub mode: String,
    /// When the vCPUs began to run, in milliseconds since the restore began.
    pub running_ms: Option<f64>,
    /// When all memory was present; likewise.
    pub finished_ms: Option<f64>,
    /// Page faults of the guest.
    pub faults: u64,
    /// Pages that the guest waited for.
    pub on_demand_pages: u64,
    version: (SystemTime, u64),
}

/// The parts of a run record that the summary has.
#[derive(Deserialize)]
struct RecordFacts {
    mode: String,
    #[serde(default)]
    resumed_us: Option<u64>,
    #[serde(default)]
    finished_us: Option<u64>,
    counts: RecordCounts,
    /// Only its end shows that the record is whole.
    #[serde(rename = "faults")]
    _faults: IgnoredAny,
}

#[derive(Deserialize)]
struct RecordCounts {
    #[serde(default)]
    faults: u64,
    #[serde(default)]
    on_demand_pages: u64,
}

/// Reads the record of the newest restore, if there is one. `before` is the summary that was made
/// last.
pub(super) fn read_summary(
    record: &Path,
    before: Option<&RestoreSummary>,
) -> Option<RestoreSummary> {
    let metadata = fs::metadata(record).ok()?;
    let version = (metadata.modified().ok()?, metadata.len());
    if let Some(same) = before.filter(|summary| summary.version == version) {
        return Some(same.clone());
    }
    let text = firn_files::read_input(record, RECORD_BYTES_MAX).ok()?;
    let facts = serde_json::from_slice::<RecordFacts>(&text).ok()?;
    let to_ms = |us: u64| us as f64 / 1e3;
    Some(RestoreSummary {
        record: record.to_owned(),
        at: version.0.duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs()),
        mode: facts.mode,
        running_ms: facts.resumed_us.map(to_ms),
        finished_ms: facts.finished_us.map(to_ms),
        faults: facts.counts.faults,
        on_demand_pages: facts.counts.on_demand_pages,
        version,
    })
}

impl RestoreSummary {
    /// A summary of no file, for tests of the page.
    #[doc(hidden)]
    pub fn sample(record: &str, at: u64) -> Self {
        Self {
            record: record.into(),
            at,
            mode: "auto".to_owned(),
            running_ms: Some(180.0),
            finished_ms: Some(4200.0),
            faults: 1234,
            on_demand_pages: 321,
            version: (UNIX_EPOCH, 0),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_record_is_summarized_and_read_once() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("restore.json");
        assert_eq!(read_summary(&file, None), None);
        let text = r#"{ "version": 3, "mode": "auto", "resumed_us": 150000, "finished_us": null,
            "counts": { "faults": 12, "on_demand_pages": 7, "other": 1 }, "reads": [],
            "faults": [ { "t_us": 1 }, { "t_us": 2 } ] }"#;
        fs::write(&file, text).unwrap();
        let summary = read_summary(&file, None).unwrap();
        assert_eq!((summary.mode.as_str(), summary.running_ms), ("auto", Some(150.0)));
        assert_eq!((summary.finished_ms, summary.faults, summary.on_demand_pages), (None, 12, 7));
        // The one before is used while the file is the same.
        let kept = RestoreSummary { mode: "kept".to_owned(), ..summary };
        assert_eq!(read_summary(&file, Some(&kept)).unwrap().mode, "kept");
        fs::write(&file, text.replace("12", "123")).unwrap();
        assert_eq!(read_summary(&file, Some(&kept)).unwrap().faults, 123);
        fs::write(&file, "{").unwrap();
        assert_eq!(read_summary(&file, Some(&kept)), None);
    }
}
