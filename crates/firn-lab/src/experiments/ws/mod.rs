//! Working sets: what restoring gains by knowing what the guest used last.
//!
//! Reproduces the figures and tables of Zhang, Garthwaite, Baskakov, Barr, "Fast Restore of Checkpointed Memory using
//! Working Set Estimation" (VEE 2011).
//!
//! ```text
//!   subject      a guest at its work: it boots, works, and is checkpointed at work
//!   restored     one restore of that, as its run record tells it
//!   ttr          Figures 1, 2, 4-7   time to responsiveness by mode and disk
//!   agree                            whether inside and outside see the same time to responsiveness
//!   estimators   Tables 2, 3         what is prefetched, used, and asked for all the same
//!   drop         Figure 8            working sets that lack a part, or are wrong
//!   size         Figures 9, 10       how much of its memory the guest uses
//!   overhead     Tables 4-6          what access bits cost a running guest
//! ```
//!
//! Guests here need no client: what they do goes on by itself after a restore, and how they get on is in the run record.

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
