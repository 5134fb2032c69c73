//! What the journal keeps of a VM's checkpoints: how many were saved and how many failed, and the
//! newest of them. Metrics and the agent's page show it. Pure.

use std::collections::VecDeque;
use std::path::Path;

use serde::{Deserialize, Serialize};
use serde_json::Value;

/// How many of the newest checkpoints are kept.
const NOTES_MAX: usize = 16;

/// The longest text that is kept of a failure, in bytes.
const TEXT_BYTES_MAX: usize = 400;

/// The checkpoints of a VM since Firn began to manage it. A suspend is one of them.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct CheckpointTally {
    /// How many were saved.
    #[serde(default)]
    pub saved: u64,
    /// How many were begun and failed, or were cancelled.
    #[serde(default)]
    pub failed: u64,
    /// The newest that were saved, the oldest of them first.
    #[serde(default, skip_serializing_if = "VecDeque::is_empty")]
    pub newest: VecDeque<CheckpointNote>,
    /// The newest that failed, if no checkpoint was saved since.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub failure: Option<CheckpointFailure>,
}

/// A checkpoint that was saved.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct CheckpointNote {
    /// When it was complete, in seconds since 1970.
    pub at: u64,
    /// Its file, or its location in object storage.
    pub image: String,
    /// The image that it builds on, if it builds on one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub parent: Option<String>,
    /// From the request to the complete image, in milliseconds; absent if a successor completed it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub total_ms: Option<f64>,
    /// How long the VM was paused, in milliseconds; likewise.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub downtime_ms: Option<f64>,
    /// The size of the image, in bytes; likewise.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub image_bytes: Option<u64>,
}

/// A checkpoint that failed.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct CheckpointFailure {
    /// When it failed, in seconds since 1970.
    pub at: u64,
    /// Why.
    pub text: String,
}

impl CheckpointNote {
    /// A checkpoint of which only the file is known.
    pub(crate) fn new(at: u64, image: &Path) -> Self {
        Self { at, image: image.display().to_string(), ..Self::default() }
    }

    /// The checkpoint that the facts of a save describe.
    pub(crate) fn from_facts(at: u64, facts: &Value) -> Self {
        let text = |name: &str| facts[name].as_str().map(str::to_owned);
        let report = &facts["report"];
        Self {
            at,
            image: text("image").unwrap_or_default(),
            parent: text("parent"),
            total_ms: report["total_ms"].as_f64(),
            downtime_ms: report["pause"]["downtime_ms"].as_f64(),
            image_bytes: report["image_bytes"].as_u64(),
        }
    }
}

impl CheckpointTally {
    /// Whether there was no checkpoint.
    pub fn is_empty(&self) -> bool {
        self.saved == 0 && self.failed == 0
    }

    /// Adds a checkpoint that was saved. The same image is noted once: it replaces the older one.
    pub(crate) fn add_saved(&mut self, note: CheckpointNote) {
        self.saved += 1;
        self.failure = None;
        self.newest.retain(|other| other.image != note.image);
        if self.newest.len() >= NOTES_MAX {
            self.newest.pop_front();
        }
        self.newest.push_back(note);
    }

    /// Adds a checkpoint that failed.
    pub(crate) fn add_failed(&mut self, at: u64, text: &str) {
        self.failed += 1;
        let end = (0..=text.len().min(TEXT_BYTES_MAX)).rev().find(|&it| text.is_char_boundary(it));
        let text = text[..end.unwrap_or_default()].to_owned();
        self.failure = Some(CheckpointFailure { at, text });
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn note(number: u64) -> CheckpointNote {
        CheckpointNote { at: number, image: format!("/i/{number}.firn"), ..Default::default() }
    }

    #[test]
    fn the_newest_are_kept_and_all_are_counted() {
        let mut tally = CheckpointTally::default();
        assert!(tally.is_empty());
        (0..40).for_each(|number| tally.add_saved(note(number)));
        assert_eq!((tally.saved, tally.newest.len()), (40, NOTES_MAX));
        assert_eq!((tally.newest[0].at, tally.newest[NOTES_MAX - 1].at), (24, 39));
        // A file that is written again is one image.
        tally.add_saved(CheckpointNote { at: 50, ..note(30) });
        assert_eq!((tally.saved, tally.newest.len()), (41, NOTES_MAX));
        assert_eq!(tally.newest.back().map(|it| it.at), Some(50));
    }

    #[test]
    fn a_failure_is_shown_until_the_next_success() {
        let mut tally = CheckpointTally::default();
        tally.add_failed(3, &"ü".repeat(1000));
        let failure = tally.failure.clone().unwrap();
        assert_eq!((tally.failed, failure.at, failure.text.len()), (1, 3, TEXT_BYTES_MAX));
        tally.add_saved(note(4));
        assert_eq!((tally.failed, tally.saved, tally.failure), (1, 1, None));
    }

    #[test]
    fn the_facts_of_a_save_make_a_note() {
        let facts = json!({ "image": "/i/web.firn", "parent": "/i/base.firn", "report": {
            "pause": { "downtime_ms": 2.5 }, "total_ms": 900.0, "image_bytes": 4096 } });
        let made = CheckpointNote::from_facts(7, &facts);
        assert_eq!((made.at, made.image.as_str()), (7, "/i/web.firn"));
        assert_eq!(made.parent.as_deref(), Some("/i/base.firn"));
        assert_eq!((made.total_ms, made.downtime_ms), (Some(900.0), Some(2.5)));
        assert_eq!(made.image_bytes, Some(4096));
        let bare = CheckpointNote::from_facts(7, &json!({ "image": "x", "parent": null }));
        assert_eq!((bare.parent, bare.total_ms), (None, None));
    }
}
