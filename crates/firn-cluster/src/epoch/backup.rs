//! The backup's half: what it has, what of it is the non-volatile copy, and what a failure goes back to.
//!
//! ```text
//!     base            kept, in pieces that arrive in any order
//!   [ memory at 7 ]  [ 8 ][ 9 ][ 10 ][ 11 ][ 12 .. ]
//!         |                      |      |      \ not whole yet
//!         |                      |      complete: dropped by a failure, for an error may be in it
//!         |                      committed: one behind
//!         the newest global checkpoint; `globally(9)` folds 8 and 9 into it
//! ```
//!
//! Everything between the newest global checkpoint and the newest complete epoch is kept apart, so that any committed epoch
//! that is marked for the next global checkpoint can still be had.

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};
use thiserror::Error;

use super::Progress;
use crate::Epoch;

/// The head of one piece of an epoch; its bytes are the shell's.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Piece {
    /// The epoch.
    pub epoch: Epoch,
    /// Which piece.
    pub index: u32,
    /// How many there are.
    pub of: u32,
    /// No epoch follows: it may be committed at once.
    pub last: bool,
}

/// What to do with the bytes of a piece.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Arrival {
    /// Keep them: they are new.
    Store,
    /// Drop them: they are known, or older than the base.
    Known,
    /// Drop them without an acknowledgement: too many epochs are kept, or the piece makes no sense.
    Refused,
}

/// How to make the memory of a restored epoch from what is kept.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Restore {
    /// Fold these into the base, in this order.
    pub fold: Vec<Epoch>,
    /// Drop these.
    pub discard: Vec<Epoch>,
}

/// An epoch that can't be restored.
#[derive(Debug, Error, PartialEq, Eq)]
#[error("{wanted} is not among the copies kept here, {base} to {committed}")]
pub struct RestoreError {
    /// What was asked for.
    pub wanted: Epoch,
    /// The oldest there is.
    pub base: Epoch,
    /// The newest that may be restored.
    pub committed: Epoch,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Kept {
    of: u32,
    have: BTreeSet<u32>,
}

impl Kept {
    fn is_whole(&self) -> bool {
        self.have.len() == self.of as usize
    }
}

/// The epochs of one VM at its backup.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Backup {
    base: Epoch,
    kept: BTreeMap<Epoch, Kept>,
    kept_max: u64,
    last: Option<Epoch>,
}

impl Backup {
    /// A backup that has the VM's memory at the end of `base`, and keeps at most `kept_max` epochs after it.
    pub fn new(base: Epoch, kept_max: u64) -> Self {
        Self { base, kept: BTreeMap::new(), kept_max, last: None }
    }

    /// A piece has arrived, for the first time or again. Unless it is refused, answer with [`Backup::progress`].
    pub fn arrived(&mut self, piece: Piece) -> Arrival {
        let Piece { epoch, index, of, last } = piece;
        if epoch <= self.base {
            return Arrival::Known;
        }
        if epoch.0 - self.base.0 > self.kept_max || index >= of {
            return Arrival::Refused;
        }
        let kept = self.kept.entry(epoch).or_insert_with(|| Kept { of, have: BTreeSet::new() });
        if kept.of != of {
            return Arrival::Refused;
        }
        if last {
            self.last = Some(epoch);
        }
        match kept.have.insert(index) {
            true => Arrival::Store,
            false => Arrival::Known,
        }
    }

    /// How far it is.
    pub fn progress(&self) -> Progress {
        let complete = self.complete();
        let committed = match self.last == Some(complete) {
            true => complete,
            false => complete.before().max(self.base),
        };
        Progress { complete, committed }
    }

    /// The oldest epoch that can be restored.
    pub fn base(&self) -> Epoch {
        self.base
    }

    /// A global checkpoint that has this VM at `epoch` exists: fold these epochs into the base, in this order.
    pub fn globally(&mut self, epoch: Epoch) -> Result<Vec<Epoch>, RestoreError> {
        if epoch <= self.base {
            return Ok(Vec::new());
        }
        self.check(epoch)?;
        let later = self.kept.split_off(&epoch.next());
        self.base = epoch;
        Ok(std::mem::replace(&mut self.kept, later).into_keys().collect())
    }

    /// The VM is to run from the state at the end of `epoch`. Nothing after it is kept.
    pub fn restore(&mut self, epoch: Epoch) -> Result<Restore, RestoreError> {
        self.check(epoch)?;
        let fold = self.globally(epoch)?;
        let discard = std::mem::take(&mut self.kept).into_keys().collect();
        Ok(Restore { fold, discard })
    }

    fn check(&self, wanted: Epoch) -> Result<(), RestoreError> {
        let (base, committed) = (self.base, self.progress().committed);
        match (base..=committed).contains(&wanted) {
            true => Ok(()),
            false => Err(RestoreError { wanted, base, committed }),
        }
    }

    fn complete(&self) -> Epoch {
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
