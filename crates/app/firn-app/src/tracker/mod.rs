//! Trackers: methods to find what a transaction wrote. One trait, and one module for each tracker.
//!
//! | tracker | first write of a page costs | a commit costs | reports | memory |
//! |---|---|---|---|---|
//! | [`TrackerKind::Pages`] (PT) | a signal, `mprotect` | `mprotect` | pages | any |
//! | [`TrackerKind::Emulate`] (Emul) | each write: a signal | nothing | words | allocated |
//! | [`TrackerKind::Assisted`] (PT by the kernel) | a fault inside the kernel, or a wait for a thread | one scan of busy parts | pages | any |
//! | [`TrackerKind::Scan`] | a fault inside the kernel, and maybe a copy | one scan | pages | any, or allocated |
//! | [`TrackerKind::Compare`] | nothing | reading everything | words | any |
//! | [`TrackerKind::Host`] | a fault on the host | one call to Firn | pages | any |
//! | [`TrackerKind::Stores`] | nothing (each store of the guest: a check of its address) | a store | words | any |
//!
//! A tracker whose list comes from elsewhere, for example a hypervisor that writes it into memory
//! of the application, is one more implementation of [`Tracker`]: `watch_span` requests the list,
//! `collect_writes` reads it.

mod assisted;
mod auto;
mod compare;
mod emulate;
mod fallback;
mod followed;
mod hot;
pub(crate) mod interface;
pub(crate) mod kind;
mod levels;
mod open;
mod pages;
mod parts;
mod scan;
mod whole;

pub(crate) use auto::choose_tracker;
pub use interface::{Tracker, TrackerCounts, WrittenRuns};
pub use kind::{TrackerKind, UnknownTracker};
pub(crate) use open::open_tracker;
pub use open::open_with_small_parts;
