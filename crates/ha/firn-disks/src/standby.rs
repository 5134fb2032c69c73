//! Standby disk: stores the epochs of a disk and folds them into a [`DiskStore`] in order. Pure.
//!
//! ```text
//!     the store          stored apart
//!   [ disk at 7 ]   [ 8 ][ 9 ]   [ 10 ]     [ 11 ..
//!             |            |        |          \ arriving
//!             folded       |        complete: dropped at a failover, for it may contain an error
//!                          committed: folded soon, and by a failover at the latest
//! ```
//!
//! `firn-cluster` (`epoch`) decides when an epoch is complete and when it is committed, together
//! with the memory of the VM. Folding is separate from committing, because a file system may be
//! slow: the memory of committed epochs that are not folded is bounded ([`StandbyDisk::is_full`]),
//! and the receiver does not read the stream while there is no room. Uncommitted epochs have no
//! bound of their own, because the next epoch has to arrive before they are committed. The primary
//! bounds each of them.
//!
//! Until the seed is whole, the copy is not a usable disk. Changes of epoch 0 are made as they
//! arrive.

use std::collections::VecDeque;
use std::io;

use firn_cluster::Epoch;
use thiserror::Error;

use crate::change::DiskChange;
use crate::store::DiskStore;

/// Why a standby refuses changes, or has no disk to return.
#[derive(Debug, Error)]
pub enum StandbyDiskError {
    /// An epoch arrived out of order.
    #[error(
        "a disk's changes of {got} came where {expected} was expected; start protecting the VM anew"
    )]
    Order {
        /// The epoch that arrived.
        got: Epoch,
        /// The epoch that was expected.
        expected: Epoch,
    },
    /// The epoch to commit is not complete.
    #[error("{wanted} of a disk can't be committed: {complete} is the newest that is complete")]
    Incomplete {
        /// The epoch to commit.
        wanted: Epoch,
        /// The newest complete epoch.
        complete: Epoch,
    },
    /// A change lies beyond the end of the disk.
    #[error("{length} bytes at {at} are not within the disk, which has {size}")]
    Place {
        /// Its offset.
        at: u64,
        /// The number of bytes it changes.
        length: u64,
        /// The size of the disk.
        size: u64,
    },
    /// A change could not be made. The copy is damaged.
    #[error("{epoch} could not be written to the disk here; the copy is unusable")]
    Store {
        /// The epoch of the change.
        epoch: Epoch,
        /// The error of the system.
        source: io::Error,
    },
    /// No epoch is committed, or the copy is damaged.
    #[error(
        "no epoch of the disk is committed: the primary has to be protected for two intervals after the first whole copy"
    )]
    Nothing,
}

/// The standby's copy of one disk.
#[derive(Debug)]
pub struct StandbyDisk<S> {
    size: u64,
    store: S,
    is_seeded: bool,
    is_spoiled: bool,
    arriving: Vec<DiskChange>,
    kept: VecDeque<(Epoch, Vec<DiskChange>)>,
    complete: Epoch,
    committed: Epoch,
    folded: Epoch,
    bound: usize,
}

impl<S: DiskStore> StandbyDisk<S> {
    /// A copy of a disk of `size` bytes, with nothing received: the store is all zeros. Committed
    /// epochs take about `bound` bytes of memory.
    pub fn new(size: u64, store: S, bound: usize) -> Self {
        Self {
            size,
            store,
            is_seeded: false,
            is_spoiled: false,
            arriving: Vec::new(),
            kept: VecDeque::new(),
            complete: Epoch(0),
            committed: Epoch(0),
            folded: Epoch(0),
            bound,
        }
    }

    /// The newest complete epoch, the newest committed epoch, and the newest folded epoch.
    pub fn epoch_progress(&self) -> (Epoch, Epoch, Epoch) {
        (self.complete, self.committed, self.folded)
    }

    /// Receives changes of an epoch, in order.
    ///
    /// # Errors
    /// If the epoch is out of order, a change lies beyond the disk, or a change of epoch 0 can't be
    /// made.
    pub fn receive_changes(
        &mut self,
        epoch: Epoch,
        changes: Vec<DiskChange>,
    ) -> Result<(), StandbyDiskError> {
        self.check_order(epoch)?;
        if let Some(change) = changes.iter().find(|change| !change.is_within(self.size)) {
            let (at, length) = (change.start_offset(), change.length());
            return Err(StandbyDiskError::Place { at, length, size: self.size });
        }
        match self.is_seeded {
            true => {
                self.arriving.extend(changes);
                Ok(())
            }
            false => self.apply_changes(epoch, &changes),
        }
    }

    /// Marks an epoch as complete. The caller has verified it.
    ///
    /// # Errors
    /// If the epoch is out of order.
    pub fn complete_epoch(&mut self, epoch: Epoch) -> Result<(), StandbyDiskError> {
        self.check_order(epoch)?;
        if !self.is_seeded {
            self.is_seeded = true;
            return Ok(());
        }
        self.kept.push_back((epoch, std::mem::take(&mut self.arriving)));
        self.complete = epoch;
        Ok(())
    }

    /// Commits all epochs up to this one.
    ///
    /// # Errors
    /// If it is not complete.
    pub fn commit_epoch(&mut self, epoch: Epoch) -> Result<(), StandbyDiskError> {
        if epoch > self.complete {
            return Err(StandbyDiskError::Incomplete { wanted: epoch, complete: self.complete });
        }
        self.committed = self.committed.max(epoch);
        Ok(())
    }

    /// Whether committed epochs occupy too much memory. The caller then folds before it receives
    /// more.
    pub fn is_full(&self) -> bool {
        let committed = self.kept.iter().filter(|(epoch, _)| *epoch <= self.committed);
        let cost: usize =
            committed.flat_map(|(_, changes)| changes).map(DiskChange::memory_bytes).sum();
        cost > self.bound
    }

    /// Folds the next committed epoch into the store, and returns it; `None` if all committed
    /// epochs are folded.
    ///
    /// # Errors
    /// If the store can't be written. The copy is then damaged.
    pub fn fold_epoch(&mut self) -> Result<Option<Epoch>, StandbyDiskError> {
        let is_next = self.kept.front().is_some_and(|(epoch, _)| *epoch <= self.committed);
        let Some((epoch, changes)) = is_next.then(|| self.kept.pop_front()).flatten() else {
            return Ok(None);
        };
        self.apply_changes(epoch, &changes)?;
        self.folded = epoch;
        Ok(Some(epoch))
    }

    /// Promotes the copy after the primary was lost. Returns the newest committed epoch and the
    /// store, which has the disk at the end of that epoch and was made durable. Later epochs are
    /// dropped.
    ///
    /// # Errors
    /// If no epoch is committed, or the store can't be written.
    pub fn promote_disk(mut self) -> Result<(Epoch, S), StandbyDiskError> {
        while self.fold_epoch()?.is_some() {}
        if self.committed == Epoch(0) || self.is_spoiled {
            return Err(StandbyDiskError::Nothing);
        }
        let epoch = self.committed;
        self.store.sync_data().map_err(|source| StandbyDiskError::Store { epoch, source })?;
        Ok((epoch, self.store))
    }

    fn check_order(&self, got: Epoch) -> Result<(), StandbyDiskError> {
        let expected = if self.is_seeded { self.complete.next() } else { Epoch(0) };
        match got == expected {
            true => Ok(()),
            false => Err(StandbyDiskError::Order { got, expected }),
        }
    }

    fn apply_changes(
        &mut self,
        epoch: Epoch,
        changes: &[DiskChange],
    ) -> Result<(), StandbyDiskError> {
        let made = changes.iter().try_for_each(|change| change.apply_to(&self.store));
        self.is_spoiled |= made.is_err();
        made.map_err(|source| StandbyDiskError::Store { epoch, source })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tests::Memory;

    fn write(at: u64, fill: u8) -> Vec<DiskChange> {
        vec![DiskChange::Write { at, bytes: vec![fill] }]
    }

    fn standby() -> StandbyDisk<Memory> {
        StandbyDisk::new(4, Memory::default(), 100)
    }

    fn epoch(standby: &mut StandbyDisk<Memory>, number: u64, changes: Vec<DiskChange>) {
        standby.receive_changes(Epoch(number), changes).unwrap();
        standby.complete_epoch(Epoch(number)).unwrap();
    }

    #[test]
    fn the_store_is_that_of_the_newest_folded_epoch() {
        let mut standby = standby();
        epoch(&mut standby, 0, write(0, 1));
        epoch(&mut standby, 1, write(1, 2));
        epoch(&mut standby, 2, write(1, 3));
        assert_eq!(standby.store.bytes(4), [1, 0, 0, 0]);
        assert_eq!(standby.fold_epoch().unwrap(), None);
        standby.commit_epoch(Epoch(1)).unwrap();
        assert_eq!(standby.store.bytes(4), [1, 0, 0, 0]);
        assert_eq!(standby.fold_epoch().unwrap(), Some(Epoch(1)));
        assert_eq!(standby.fold_epoch().unwrap(), None);
        assert_eq!(standby.store.bytes(4), [1, 2, 0, 0]);
        assert_eq!(standby.epoch_progress(), (Epoch(2), Epoch(1), Epoch(1)));
    }

    #[test]
    fn a_failover_folds_committed_epochs_and_drops_others() {
        let mut standby = standby();
        for number in 0..4 {
            epoch(&mut standby, number, write(number, 9));
        }
        standby.receive_changes(Epoch(4), write(0, 7)).unwrap();
        standby.commit_epoch(Epoch(2)).unwrap();
        let (epoch, store) = standby.promote_disk().unwrap();
        assert_eq!((epoch, store.bytes(4)), (Epoch(2), vec![9, 9, 9, 0]));
    }

    #[test]
    fn a_copy_that_is_not_whole_is_no_disk() {
        let mut one = standby();
        one.receive_changes(Epoch(0), write(0, 1)).unwrap();
        assert!(matches!(one.promote_disk(), Err(StandbyDiskError::Nothing)));
        let mut other = standby();
        epoch(&mut other, 0, write(0, 1));
        epoch(&mut other, 1, write(0, 2));
        assert!(
            matches!(other.promote_disk(), Err(StandbyDiskError::Nothing)),
            "1 is not committed"
        );
    }

    #[test]
    fn an_inconsistent_message_is_refused() {
        let mut standby = standby();
        let order = standby.receive_changes(Epoch(1), write(0, 1)).unwrap_err();
        assert!(matches!(order, StandbyDiskError::Order { got: Epoch(1), expected: Epoch(0) }));
        let place = standby.receive_changes(Epoch(0), write(4, 1)).unwrap_err();
        assert!(matches!(place, StandbyDiskError::Place { at: 4, length: 1, size: 4 }), "{place}");
        assert!(matches!(standby.complete_epoch(Epoch(1)), Err(StandbyDiskError::Order { .. })));
        assert!(matches!(standby.commit_epoch(Epoch(1)), Err(StandbyDiskError::Incomplete { .. })));
    }

    #[test]
    fn a_standby_is_full_until_committed_epochs_are_folded() {
        let mut standby = standby();
        epoch(&mut standby, 0, vec![]);
        for number in 1..4 {
            epoch(&mut standby, number, [write(0, 1), write(1, 1)].concat());
        }
        assert!(!standby.is_full(), "what is not committed does not count");
        standby.commit_epoch(Epoch(3)).unwrap();
        assert!(standby.is_full());
        while standby.fold_epoch().unwrap().is_some() {}
        assert!(!standby.is_full());
    }

    #[test]
    fn a_copy_that_could_not_be_written_is_no_disk() {
        let mut standby = standby();
        epoch(&mut standby, 0, vec![]);
        epoch(&mut standby, 1, write(0, 1));
        standby.commit_epoch(Epoch(1)).unwrap();
        standby.store.fail_from(0);
        assert!(matches!(
            standby.fold_epoch(),
            Err(StandbyDiskError::Store { epoch: Epoch(1), .. })
        ));
        standby.store.fail_from(usize::MAX);
        assert!(matches!(standby.promote_disk(), Err(StandbyDiskError::Nothing)));
    }
}
