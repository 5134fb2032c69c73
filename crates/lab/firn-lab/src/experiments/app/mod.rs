//! Application checkpointing: the cost of transactions, by tracker.

mod guest;
pub(super) mod micro;
mod place;
pub mod size;
pub(super) mod structures;
