//! Application checkpointing: the cost of transactions, by tracker.

mod environment;
mod guest;
pub(super) mod micro;
pub mod size;
mod size_in_guest;
pub(super) mod structures;
