//! Reports on restores for people: figures and numbers computed from run records.
//!
//! ```text
//!   restore.json (RunRecord) -> ReportedRun: waits of vCPUs, sums, TTR -> page: one HTML file that loads nothing
//! ```
//!
//! Nothing is measured here, and nothing is rounded before it is used in a computation. The page
//! contains its numbers a second time, as JSON, so that a program finds what a person reads.

#![forbid(unsafe_code)]

mod page;
pub mod plot;
mod run;

pub use page::render_page;
pub use run::{ReportedRun, RunError, RunFacts, vcpu_waits};
