//! Application checkpointing: what transactions cost, by tracker.

pub(super) mod micro;
pub(super) mod structures;
mod tracked;
