//! Progress and output that the verbs have in common that rewrite an image.

use std::cell::RefCell;
use std::path::Path;

use firn_image::{Image, ImageSummary};
use firn_supervisor::OperationProgress;
use firn_types::make_printable;
use serde_json::json;

use crate::bar::TerminalBar;
use crate::units;

/// The progress of rewriting an image.
pub struct RewriteProgress {
    stage: &'static str,
    block_bytes: u64,
    bar: RefCell<TerminalBar>,
}

impl RewriteProgress {
    /// Progress of a stage that has just begun.
    pub fn new(stage: &'static str, image: &Image) -> Self {
        let block_bytes = image.geometry().block_size.byte_count() as u64;
        Self { stage, block_bytes, bar: RefCell::new(TerminalBar::new()) }
    }

    /// Shows the progress, in memory blocks.
    pub fn show_progress(&self, done: u32, total: u32) {
        let bytes = |blocks: u32| u64::from(blocks) * self.block_bytes;
        self.bar.borrow_mut().show_progress(&OperationProgress::new(
            self.stage,
            bytes(done),
            bytes(total),
        ));
    }
}

/// The outcome, as facts.
pub fn rewrite_facts(summary: &ImageSummary, parent: Option<&Path>) -> serde_json::Value {
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
pub fn describe_rewrite(summary: &ImageSummary) -> String {
    let bytes = units::format_bytes(summary.file_bytes);
    let path = summary.path.to_string_lossy();
    format!("{}: {bytes}, {}\n", make_printable(&path), summary.organization)
}
