//! The epochs of one VM, at its primary ([`Primary`]) and at its backup ([`Backup`]) (VPC III.A, III.B).
//!
//! ```text
//!                primary                                       backup
//!     time   |  epoch 4 runs
//!            |  cut 4: pause, copy, resume --- pieces of 4 ---> complete = 4, committed = 3
//!            |  epoch 5 runs               <--- acknowledged ---
//!            |     room of 4 is free; frames of epoch 3 may leave
//!            |  cut 5                      --- pieces of 5 ---> complete = 5, committed = 4
//!            v
//!
//!     Running --cut--> Copied --sent--> InTransfer --all pieces there--> Complete --the next one is--> Committed
//!                         bounded buffer                 the newest, in memory      the non-volatile copy
//! ```
//!
//! **The non-volatile copy stays one epoch behind the newest complete one** (VPC III.B). An error at time t that shows by
//! t + T_e may be in the first checkpoint cut after t. That one is committed when the next is complete, which is cut T_e
//! later at least: so the error is noticed before, and the checkpoint is dropped. The interval never becomes shorter than T_e
//! ([`Limits::check`]).
//!
//! **Cuts are due an interval apart**, not an interval after the last has been made: otherwise what a cut takes would be on top of
//! each interval, and a frame waits for one and a half of them. The VM runs for half an interval between two at least.
//!
//! # At the bound
//!
//! Copied pages wait in a bounded buffer. If the next epoch wouldn't fit, the cut isn't made and the epoch *stretches*: more
//! pages gather, but each only once, so that a stretched epoch is cheaper per second than the ones it replaces. Past
//! the longest interval the VM is *slowed*, and when what it has written would fill the buffer by itself, *stopped* until
//! there is room. One epoch larger than the whole buffer (a burst between two looks) is cut when the buffer is empty, and
//! sent from within its pause: the pause is long, nothing is lost.
//!
//! The backup has a bound too: epochs kept since the newest global checkpoint. It doesn't take pieces beyond it, which
//! leads to the same thing: the primary's buffer fills, and the VM is slowed.

mod backup;
mod limits;
mod primary;

pub use backup::{Arrival, Backup, Piece, Restore, RestoreError};
pub use limits::{Limits, LimitsError};
pub use primary::{Action, Pace, Primary};

use serde::{Deserialize, Serialize};

use crate::Epoch;

/// How far a backup is. Acknowledgements are cumulative: a later one says all that an earlier one said.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Progress {
    /// The newest epoch of which it has everything, it and all before.
    pub complete: Epoch,
    /// The newest epoch in the non-volatile copy.
    pub committed: Epoch,
}

#[cfg(test)]
mod tests;
