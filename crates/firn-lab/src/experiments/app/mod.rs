//! Application checkpointing: what transactions cost, by tracker.

mod guest;
pub(super) mod micro;
mod place;
pub(super) mod structures;
