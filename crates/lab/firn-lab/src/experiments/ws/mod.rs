//! Working-set experiments: the gain of knowing what the guest used last, for a restore.
//!
//! Reproduces the figures and tables of Zhang, Garthwaite, Baskakov, Barr, "Fast Restore of
//! Checkpointed Memory using Working Set Estimation" (VEE 2011).
//!
//! ```text
//!   subject      a guest that works: boots, starts its work, and is checkpointed
//!   restored     one restore of that checkpoint, with its run record
//!   ttr          Figures 1, 2, 4-7   time to responsiveness by mode and disk
//!   agree                            whether the time to responsiveness is the same by the run record and from outside
//!   estimators   Tables 2, 3         pages that are prefetched, used, and read on demand all the same
//!   drop         Figure 8            working sets that lack a part, or are wrong
//!   size         Figures 9, 10       the share of its memory that the guest uses
//!   overhead     Tables 4-6          the overhead of access bits in a running guest
//! ```
//!
//! Guests here need no client: their work continues by itself after a restore, and the run record
//! shows its progress.

pub mod agree;
mod beats;
pub mod drop;
pub mod estimators;
pub mod overhead;
mod restored;
pub mod size;
mod subject;
mod throughput;
pub mod ttr;
