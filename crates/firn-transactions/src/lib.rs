//! Transactions that application checkpointing is measured with, and the trackers under measurement.
//!
//! They are those of Lee et al., "Hypervisor-Assisted Application Checkpointing in Virtualized Environments": so many writes on
//! so many pages (section V, [`Shape`]), and operations on thirteen data structures (section VI, Table 2, [`Workload`]). The
//! lab runs them natively, `firn-guest transactions` in a guest, where Firn on the host can be a tracker too.

#![forbid(unsafe_code)]

mod shape;
mod system;
mod workload;

pub use shape::Shape;
pub use system::{Calls, System, Taken};
pub use workload::{ELEMENTS, Workload};
