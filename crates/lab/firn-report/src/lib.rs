//! Reports on restores for people: figures and numbers computed from run records.
//!
//! ```text
//!   restore.json (RunRecord) -> ReportedRun: waits of vCPUs, sums, TTR -> page: one HTML file that loads nothing
//! ```
//!
//! Nothing is measured here, and nothing is rounded before it is used in a computation. The page
//! contains its numbers a second time, as JSON, so that a program finds what a person reads.
//!
//! ```text
//!   run -> headline, figures -> figure: axes by scale, points by thin -> page
//!   plot: files of the lab, with other data
//! ```

#![forbid(unsafe_code)]

mod figure;
mod figures;
mod headline;
mod input;
mod page;
pub mod plot;
mod run;
mod scale;
mod thin;

pub use input::RunError;
pub use page::render_page;
pub use run::{ReportedRun, RunFacts, vcpu_waits};
