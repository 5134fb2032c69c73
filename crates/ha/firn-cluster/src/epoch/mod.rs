//! Epochs of one VM, at its primary ([`PrimaryEpochs`]) and at its backup ([`BackupEpochs`]) (VPC
//! III.A, III.B).
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
//!     Running --cut--> Copied --sent--> InTransfer --all pieces--> Complete --next--> Committed
//!                       bounded buffer                     newest, in memory     non-volatile copy
//! ```
//!
//! **The non-volatile copy stays one epoch behind the newest complete one** (VPC III.B). An error
//! at time t that is noticed by t + T_e may be in the first checkpoint cut after t. That checkpoint
//! is committed when the next one is complete, which is cut at least T_e later: so the error is
//! noticed before, and the checkpoint is dropped. The interval never becomes shorter than T_e
//! ([`EpochLimits::check_limits`]).
//!
//! **Cuts are due an interval apart**, not an interval after the last one was made: otherwise the
//! duration of a cut would be added to each interval, and a frame waits for one and a half of them.
//! The VM runs for at least half an interval between two cuts.
//!
//! # At the bound
//!
//! Copied pages wait in a bounded buffer. If the next epoch wouldn't fit, the cut isn't made and
//! the epoch *stretches*: more pages gather, but each only once, so that a stretched epoch costs
//! less per second than the ones it replaces. Past the maximum interval the VM is *slowed*. When
//! the pages that it has written would fill the buffer by themselves, it is *stopped* until there
//! is room. One epoch larger than the whole buffer (a burst between two scans) is cut when the
//! buffer is empty, and sent from within its pause: the pause is long, but nothing is lost.
//!
//! The backup has a bound too: the number of epochs stored since the newest global checkpoint. It
//! doesn't take pieces beyond it, with the same result: the primary's buffer fills, and the VM is
//! slowed.

mod backup;
mod limits;
mod primary;

pub use backup::{BackupEpochs, EpochPieceHeader, PieceHandling, RollbackError, RollbackPlan};
pub use limits::{EpochLimits, LimitsError};
pub use primary::{GuestSpeed, PrimaryAction, PrimaryEpochs};

use serde::{Deserialize, Serialize};

use crate::Epoch;

/// The progress of a backup. Acknowledgements are cumulative: a later one includes all earlier
/// ones.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct EpochProgress {
    /// The newest epoch that it has completely, with all epochs before.
    pub complete: Epoch,
    /// The newest epoch in the non-volatile copy.
    pub committed: Epoch,
}

#[cfg(test)]
mod tests;
