//! Backup epochs: which epochs the backup has, which of them form the non-volatile copy, and to
//! which a failover goes back.
//!
//! ```text
//!     base            stored, in pieces that arrive in any order
//!   [ memory at 7 ]  [ 8 ][ 9 ][ 10 ][ 11 ][ 12 .. ]
//!         |                      |      |      \ not whole yet
//!         |                      |      complete: dropped at a failover, may contain an error
//!         |                      committed: one behind
//!         the newest global checkpoint; `fold_up_to(9)` folds 8 and 9 into it
//! ```
//!
//! All epochs between the newest global checkpoint and the newest complete epoch are stored apart,
//! so that any committed epoch that is marked for the next global checkpoint can still be restored.

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};
use thiserror::Error;

use super::EpochProgress;
use crate::Epoch;

/// The header of one piece of an epoch. The shell has its bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct EpochPiece {
    /// The epoch.
    pub epoch: Epoch,
    /// The index of the piece.
    pub index: u32,
    /// The number of pieces of the epoch.
    pub of: u32,
    /// No epoch follows: it may be committed at once.
    pub last: bool,
}

/// How to handle the bytes of a piece.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PieceArrival {
    /// Store them: they are new.
    Store,
    /// Drop them: they are stored already, or older than the base.
    Known,
    /// Drop them without an acknowledgement: too many epochs are stored, or the piece is invalid.
    Refused,
}

/// How to make the memory of a restored epoch from the stored epochs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RestorePlan {
    /// Fold these into the base, in this order.
    pub fold: Vec<Epoch>,
    /// Drop these.
    pub discard: Vec<Epoch>,
}

/// The error for an epoch that can't be restored.
#[derive(Debug, Error, PartialEq, Eq)]
#[error("{wanted} is not among the copies kept here, {base} to {committed}")]
pub struct EpochRestoreError {
    /// The requested epoch.
    pub wanted: Epoch,
    /// The oldest epoch that can be restored.
    pub base: Epoch,
    /// The newest epoch that may be restored.
    pub committed: Epoch,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct StoredEpoch {
    of: u32,
    have: BTreeSet<u32>,
}

impl StoredEpoch {
    fn is_whole(&self) -> bool {
        self.have.len() == self.of as usize
    }
}

/// The epochs of one VM at its backup.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct BackupEpochs {
    base: Epoch,
    kept: BTreeMap<Epoch, StoredEpoch>,
    kept_max: u64,
    last: Option<Epoch>,
}

impl BackupEpochs {
    /// A backup that has the VM's memory at the end of `base`, and stores at most `kept_max` epochs
    /// after it.
    pub fn new(base: Epoch, kept_max: u64) -> Self {
        Self { base, kept: BTreeMap::new(), kept_max, last: None }
    }

    /// Handles a piece, which has arrived for the first time or again. Unless it is refused, the
    /// caller acknowledges it with [`BackupEpochs::progress`].
    pub fn receive_piece(&mut self, piece: EpochPiece) -> PieceArrival {
        let EpochPiece { epoch, index, of, last } = piece;
        if epoch <= self.base {
            return PieceArrival::Known;
        }
        if epoch.0 - self.base.0 > self.kept_max || index >= of {
            return PieceArrival::Refused;
        }
        let kept =
            self.kept.entry(epoch).or_insert_with(|| StoredEpoch { of, have: BTreeSet::new() });
        if kept.of != of {
            return PieceArrival::Refused;
        }
        if last {
            self.last = Some(epoch);
        }
        match kept.have.insert(index) {
            true => PieceArrival::Store,
            false => PieceArrival::Known,
        }
    }

    /// The progress of this backup.
    pub fn progress(&self) -> EpochProgress {
        let complete = self.complete_epoch();
        let committed = match self.last == Some(complete) {
            true => complete,
            false => complete.previous().max(self.base),
        };
        EpochProgress { complete, committed }
    }

    /// The oldest epoch that can be restored.
    pub fn base_epoch(&self) -> Epoch {
        self.base
    }

    /// Records a global checkpoint that includes this VM at `epoch`: returns the epochs to fold
    /// into the base, in this order.
    pub fn fold_up_to(&mut self, epoch: Epoch) -> Result<Vec<Epoch>, EpochRestoreError> {
        if epoch <= self.base {
            return Ok(Vec::new());
        }
        self.check_restorable(epoch)?;
        let later = self.kept.split_off(&epoch.next());
        self.base = epoch;
        Ok(std::mem::replace(&mut self.kept, later).into_keys().collect())
    }

    /// Restores the VM at the end of `epoch`. No later epoch is retained.
    pub fn restore_to(&mut self, epoch: Epoch) -> Result<RestorePlan, EpochRestoreError> {
        self.check_restorable(epoch)?;
        let fold = self.fold_up_to(epoch)?;
        let discard = std::mem::take(&mut self.kept).into_keys().collect();
        Ok(RestorePlan { fold, discard })
    }

    fn check_restorable(&self, wanted: Epoch) -> Result<(), EpochRestoreError> {
        let (base, committed) = (self.base, self.progress().committed);
        match (base..=committed).contains(&wanted) {
            true => Ok(()),
            false => Err(EpochRestoreError { wanted, base, committed }),
        }
    }

    fn complete_epoch(&self) -> Epoch {
        let mut complete = self.base;
        for (&epoch, kept) in &self.kept {
            if epoch != complete.next() || !kept.is_whole() {
                break;
            }
            complete = epoch;
        }
        complete
    }
}
