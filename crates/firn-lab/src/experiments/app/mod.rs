//! Application checkpointing: what transactions cost, by tracker.

mod guest;
pub(super) mod micro;
pub(super) mod structures;
