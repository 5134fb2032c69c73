//! Progress and output that the verbs have in common that rewrite an image.

use std::cell::RefCell;
use std::path::Path;

use firn_image::{Image, Summary};
use firn_supervisor::Progress;
use firn_types::printable;
use serde_json::json;

use crate::bar::Bar;
use crate::units;

/// The progress of rewriting an image.
pub struct Rewriting {
    stage: &'static str,
    block_bytes: u64,
    bar: RefCell<Bar>,
}

impl Rewriting {
    /// Progress of a stage that has just begun.
    pub fn new(stage: &'static str, image: &Image) -> Self {
        let block_bytes = image.geometry().block_size.bytes() as u64;
        Self { stage, block_bytes, bar: RefCell::new(Bar::new()) }
    }

    /// Shows the progress, in memory blocks.
    pub fn show(&self, done: u32, total: u32) {
        let bytes = |blocks: u32| u64::from(blocks) * self.block_bytes;
        self.bar.borrow_mut().show(&Progress::new(self.stage, bytes(done), bytes(total)));
    }
}

/// The outcome, as facts.
pub fn facts(summary: &Summary, parent: Option<&Path>) -> serde_json::Value {
    json!({
        "image": summary.path.to_string_lossy(),
        "parent": parent.map(Path::to_string_lossy),
        "organization": summary.organization,
        "file_bytes": summary.file_bytes,
        "locality_blocks": summary.locality_blocks,
        "stored_blocks": summary.stored_blocks,
        "inherited_blocks": summary.inherited_blocks,
    })
}

/// The outcome, in a line.
pub fn describe(summary: &Summary) -> String {
    let bytes = units::bytes(summary.file_bytes);
    let path = summary.path.to_string_lossy();
    format!("{}: {bytes}, {}\n", printable(&path), summary.organization)
}
