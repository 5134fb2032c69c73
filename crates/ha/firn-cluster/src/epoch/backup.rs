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
pub struct EpochPieceHeader {
    /// The epoch.
    pub epoch: Epoch,
    /// The index of the piece.
    pub index: u32,
    /// The number of pieces of the epoch.
    pub pieces: u32,
    /// No epoch follows this one: it may be committed at once.
    pub is_last_epoch: bool,
}

/// How to handle the bytes of a piece.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PieceHandling {
    /// Store them: they are new.
    Store,
    /// Drop them: they are stored already, or older than the base.
    Drop,
    /// Drop them without an acknowledgement: too many epochs are stored, or the piece is invalid.
    Refuse,
}

/// How to roll a VM's memory back to an epoch, or forward to it, from the base.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RollbackPlan {
    /// Fold these into the base, in this order.
    pub fold: Vec<Epoch>,
    /// Drop these.
    pub discard: Vec<Epoch>,
}

/// The error for an epoch that the backup can't roll back to.
#[derive(Debug, Error, PartialEq, Eq)]
#[error("{wanted} is not among the copies kept here, {base} to {committed}")]
pub struct RollbackError {
    /// The requested epoch.
    pub wanted: Epoch,
    /// The oldest epoch that the backup can roll back to.
    pub base: Epoch,
    /// The newest epoch that it may roll back to.
    pub committed: Epoch,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct StoredEpoch {
    pieces: u32,
    /// The pieces that have arrived.
    have: BTreeSet<u32>,
}

impl StoredEpoch {
    fn is_whole(&self) -> bool {
        self.have.len() == self.pieces as usize
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
    pub fn receive_piece(&mut self, piece: EpochPieceHeader) -> PieceHandling {
        let EpochPieceHeader { epoch, index, pieces, is_last_epoch } = piece;
        if epoch <= self.base {
            return PieceHandling::Drop;
        }
        if epoch.0 - self.base.0 > self.kept_max || index >= pieces {
            return PieceHandling::Refuse;
        }
        let kept =
            self.kept.entry(epoch).or_insert_with(|| StoredEpoch { pieces, have: BTreeSet::new() });
        if kept.pieces != pieces {
            return PieceHandling::Refuse;
        }
        if is_last_epoch {
            self.last = Some(epoch);
        }
        match kept.have.insert(index) {
            true => PieceHandling::Store,
            false => PieceHandling::Drop,
        }
    }

    /// The progress of this backup.
    pub fn progress(&self) -> EpochProgress {
        let complete = self.newest_complete_epoch();
        let committed = match self.last == Some(complete) {
            true => complete,
            false => complete.previous().max(self.base),
        };
        EpochProgress { complete, committed }
    }

    /// The oldest epoch that the backup can roll back to.
    pub fn base_epoch(&self) -> Epoch {
        self.base
    }

    /// Records a global checkpoint that includes this VM at `epoch`: returns the epochs to fold
    /// into the base, in this order.
    pub fn fold_up_to(&mut self, epoch: Epoch) -> Result<Vec<Epoch>, RollbackError> {
        if epoch <= self.base {
            return Ok(Vec::new());
        }
        self.check_rollback_target(epoch)?;
        let later = self.kept.split_off(&epoch.next());
        self.base = epoch;
        Ok(std::mem::replace(&mut self.kept, later).into_keys().collect())
    }

    /// Plans the rollback of the VM's memory to the end of `epoch`, and forgets all later epochs.
    /// The caller moves the bytes.
    pub fn roll_back_to(&mut self, epoch: Epoch) -> Result<RollbackPlan, RollbackError> {
        self.check_rollback_target(epoch)?;
        let fold = self.fold_up_to(epoch)?;
        let discard = std::mem::take(&mut self.kept).into_keys().collect();
        Ok(RollbackPlan { fold, discard })
    }

    fn check_rollback_target(&self, wanted: Epoch) -> Result<(), RollbackError> {
        let (base, committed) = (self.base, self.progress().committed);
        match (base..=committed).contains(&wanted) {
            true => Ok(()),
            false => Err(RollbackError { wanted, base, committed }),
        }
    }

    /// The newest epoch up to which all epochs are whole, without a gap.
    fn newest_complete_epoch(&self) -> Epoch {
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
