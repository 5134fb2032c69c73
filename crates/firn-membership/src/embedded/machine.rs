//! The state machine: [`ReplicatedState`] behind a lock, and its snapshots in the store.

use std::io::Cursor;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use openraft::storage::{RaftStateMachine, Snapshot};
use openraft::{
    Entry, EntryPayload, LogId, OptionalSend, RaftSnapshotBuilder, SnapshotMeta, StorageIOError,
    StoredMembership,
};
use serde::{Deserialize, Serialize};

use super::Types;
use super::running::Leader;
use super::state::{Done, State};
use super::store::{SNAPSHOT, Store, Stored};

type Servers = openraft::BasicNode;

/// The state, and the last entry that was applied.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Applied {
    last: Option<LogId<u64>>,
    membership: StoredMembership<u64, Servers>,
    pub state: State,
}

/// A server's state machine. Clones share it.
#[derive(Clone, Debug)]
pub struct Machine {
    store: Store,
    applied: Arc<Mutex<Applied>>,
}

impl Machine {
    /// Reads the newest snapshot.
    ///
    /// # Errors
    /// If the store can't be read.
    pub fn open(store: Store) -> Result<Self, redb::Error> {
        let applied: Applied = store.meta(SNAPSHOT)?.unwrap_or_default();
        Ok(Self { store, applied: Arc::new(Mutex::new(applied)) })
    }

    /// The state, as far as this server has applied the log.
    pub fn applied(&self) -> MutexGuard<'_, Applied> {
        self.applied.lock().unwrap_or_else(PoisonError::into_inner)
    }

    async fn keep(&self, applied: Applied) -> Stored<()> {
        let kept = self.store.set_meta(SNAPSHOT, applied).await;
        kept.map_err(|error| StorageIOError::write_snapshot(None, &error).into())
    }
}

impl Applied {
    /// The state, if the last entry in it is of that leader. After a server has confirmed that it
    /// leads it may be suspended, then apply entries of its successor, and must not combine those
    /// with leases that it has granted itself.
    pub fn of(&self, leader: &Leader) -> Option<&State> {
        self.last.is_some_and(|last| last.leader_id == *leader).then_some(&self.state)
    }

    fn meta(&self) -> SnapshotMeta<u64, Servers> {
        let snapshot_id = self.last.map_or_else(String::new, |last| last.to_string());
        SnapshotMeta {
            last_log_id: self.last,
            last_membership: self.membership.clone(),
            snapshot_id,
        }
    }

    fn snapshot(&self) -> Stored<Snapshot<Types>> {
        let bytes = postcard::to_stdvec(self);
        let bytes = bytes.map_err(|error| StorageIOError::read_snapshot(None, &error))?;
        Ok(Snapshot { meta: self.meta(), snapshot: Box::new(Cursor::new(bytes)) })
    }

    fn apply(&mut self, entry: Entry<Types>) -> Done {
        self.last = Some(entry.log_id);
        match entry.payload {
            EntryPayload::Blank => Done::Nothing,
            EntryPayload::Normal(op) => self.state.apply(entry.log_id.index, op),
            EntryPayload::Membership(membership) => {
                self.membership = StoredMembership::new(Some(entry.log_id), membership);
                Done::Nothing
            }
        }
    }
}

impl RaftSnapshotBuilder<Types> for Machine {
    async fn build_snapshot(&mut self) -> Stored<Snapshot<Types>> {
        let applied = self.applied().clone();
        let snapshot = applied.snapshot()?;
        self.keep(applied).await?;
        Ok(snapshot)
    }
}

impl RaftStateMachine<Types> for Machine {
    type SnapshotBuilder = Self;

    async fn applied_state(
        &mut self,
    ) -> Stored<(Option<LogId<u64>>, StoredMembership<u64, Servers>)> {
        let applied = self.applied();
        Ok((applied.last, applied.membership.clone()))
    }

    async fn apply<I>(&mut self, entries: I) -> Stored<Vec<Done>>
    where
        I: IntoIterator<Item = Entry<Types>> + OptionalSend,
        I::IntoIter: OptionalSend,
    {
        let mut applied = self.applied();
        Ok(entries.into_iter().map(|entry| applied.apply(entry)).collect())
    }

    async fn get_snapshot_builder(&mut self) -> Self {
        self.clone()
    }

    async fn begin_receiving_snapshot(&mut self) -> Stored<Box<Cursor<Vec<u8>>>> {
        Ok(Box::default())
    }

    async fn install_snapshot(
        &mut self,
        _meta: &SnapshotMeta<u64, Servers>,
        snapshot: Box<Cursor<Vec<u8>>>,
    ) -> Stored<()> {
        let applied: Applied = postcard::from_bytes(snapshot.get_ref())
            .map_err(|error| StorageIOError::read_snapshot(None, &error))?;
        self.keep(applied.clone()).await?;
        *self.applied() = applied;
        Ok(())
    }

    async fn get_current_snapshot(&mut self) -> Stored<Option<Snapshot<Types>>> {
        let kept: Option<Applied> = self
            .store
            .meta(SNAPSHOT)
            .map_err(|error| StorageIOError::read_snapshot(None, &error))?;
        kept.map(|applied| applied.snapshot()).transpose()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_successor_has_changed_is_not_the_leaders_own() {
        let leader = Leader::new(5, 1);
        let at = |leader| Applied { last: Some(LogId::new(leader, 9)), ..Applied::default() };
        assert!(at(leader).of(&leader).is_some());
        for other in [Leader::new(6, 2), Leader::new(6, 1), Leader::new(5, 2), Leader::new(4, 1)] {
            assert!(at(other).of(&leader).is_none(), "{other}");
        }
        assert!(Applied::default().of(&leader).is_none());
    }
}
