//! What restores were like, for people: figures and numbers computed from run records.
//!
//! ```text
//!   restore.json (RunRecord) -> Run: waits of vCPUs, sums, TTR -> page: one HTML file, nothing loaded from elsewhere
//! ```
//!
//! Nothing is measured here, and nothing rounded before it is computed with. The page holds the numbers it shows a second
//! time, as JSON, so that a program finds what a person reads.

#![forbid(unsafe_code)]

mod page;
pub mod plot;
mod run;

pub use page::html;
pub use run::{Facts, Run, RunError, waits};
