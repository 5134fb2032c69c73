//! Transactions for measurements of application checkpointing, and the trackers that are measured.
//!
//! They are those of Lee et al., "Hypervisor-Assisted Application Checkpointing in Virtualized
//! Environments": a count of writes to each of a count of pages (section V, [`WriteShape`]), and
//! operations on thirteen data structures (section VI, Table 2, [`StructureWorkload`]). The lab
//! runs them natively, and `firn-guest transactions` runs them in a guest, where Firn on the host
//! can be a tracker too.

#![forbid(unsafe_code)]

mod shape;
mod system;
mod workload;

pub use shape::WriteShape;
pub use system::{GuestCallIdentity, RunResult, TrackerSystem};
pub use workload::{ELEMENTS, StructureWorkload};
