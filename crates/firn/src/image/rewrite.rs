//! What the verbs that write an image anew have in common.

use std::cell::RefCell;
use std::path::Path;

use firn_image::{Image, Summary};
use firn_supervisor::Progress;
use firn_types::printable;
use serde_json::json;

use crate::bar::Bar;
use crate::units;

/// An image that is being written anew, with its progress.
pub struct Rewriting {
    stage: &'static str,
    block_bytes: u64,
    bar: RefCell<Bar>,
}

impl Rewriting {
    /// Begins.
    pub fn new(stage: &'static str, image: &Image) -> Self {
        let block_bytes = image.geometry().block_size.bytes() as u64;
        Self { stage, block_bytes, bar: RefCell::new(Bar::new()) }
    }

    /// Shows how far it has come, in memory blocks.
    pub fn show(&self, done: u32, total: u32) {
        let bytes = |blocks: u32| u64::from(blocks) * self.block_bytes;
        self.bar.borrow_mut().show(&Progress::new(self.stage, bytes(done), bytes(total)));
    }
}

/// What came of it, as facts.
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

/// What came of it, in a line.
pub fn describe(summary: &Summary) -> String {
    let bytes = units::bytes(summary.file_bytes);
    let path = summary.path.to_string_lossy();
    format!("{}: {bytes}, {}\n", printable(&path), summary.organization)
}
