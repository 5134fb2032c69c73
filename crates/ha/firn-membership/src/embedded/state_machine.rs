//! The state machine: [`ReplicatedState`] behind a lock, and its snapshots in the store.

use std::io::Cursor;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use openraft::storage::{RaftStateMachine, Snapshot};
use openraft::{
    Entry, EntryPayload, LogId, OptionalSend, RaftSnapshotBuilder, SnapshotMeta, StorageIOError,
    StoredMembership,
};
use serde::{Deserialize, Serialize};

use super::log_store::{LogStore, SNAPSHOT, StorageResult};
use super::running_raft::RaftLeader;
use super::state::{OperationResult, ReplicatedState};
use super::types::Types;

type ServerNode = openraft::BasicNode;

/// The state, and the last entry that was applied.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct AppliedState {
    last: Option<LogId<u64>>,
    membership: StoredMembership<u64, ServerNode>,
    pub state: ReplicatedState,
}

/// A server's state machine. Clones share it.
#[derive(Clone, Debug)]
pub struct StateMachine {
    store: LogStore,
    applied: Arc<Mutex<AppliedState>>,
}

impl StateMachine {
    /// Reads the newest snapshot.
    ///
    /// # Errors
    /// If the store can't be read.
    pub fn open(store: LogStore) -> Result<Self, redb::Error> {
        let applied: AppliedState = store.read_meta(SNAPSHOT)?.unwrap_or_default();
        Ok(Self { store, applied: Arc::new(Mutex::new(applied)) })
    }

    /// The state, as far as this server has applied the log.
    pub fn lock_applied(&self) -> MutexGuard<'_, AppliedState> {
        self.applied.lock().unwrap_or_else(PoisonError::into_inner)
    }

    async fn store_snapshot(&self, applied: AppliedState) -> StorageResult<()> {
        let kept = self.store.set_meta(SNAPSHOT, applied).await;
        kept.map_err(|error| StorageIOError::write_snapshot(None, &error).into())
    }
}

impl AppliedState {
    /// The state, if the last entry in it is of that leader. After a server has confirmed that it
    /// leads it may be suspended, then apply entries of its successor, and must not combine those
    /// with leases that it has granted itself.
    pub fn state_under(&self, leader: &RaftLeader) -> Option<&ReplicatedState> {
        self.last.is_some_and(|last| last.leader_id == *leader).then_some(&self.state)
    }

    fn snapshot_meta(&self) -> SnapshotMeta<u64, ServerNode> {
        let snapshot_id = self.last.map_or_else(String::new, |last| last.to_string());
        SnapshotMeta {
            last_log_id: self.last,
            last_membership: self.membership.clone(),
            snapshot_id,
        }
    }

    fn encode_snapshot(&self) -> StorageResult<Snapshot<Types>> {
        let bytes = postcard::to_stdvec(self);
        let bytes = bytes.map_err(|error| StorageIOError::read_snapshot(None, &error))?;
        Ok(Snapshot { meta: self.snapshot_meta(), snapshot: Box::new(Cursor::new(bytes)) })
    }

    fn apply_entry(&mut self, entry: Entry<Types>) -> OperationResult {
        self.last = Some(entry.log_id);
        match entry.payload {
            EntryPayload::Blank => OperationResult::Nothing,
            EntryPayload::Normal(op) => self.state.apply_operation(entry.log_id.index, op),
            EntryPayload::Membership(membership) => {
                self.membership = StoredMembership::new(Some(entry.log_id), membership);
                OperationResult::Nothing
            }
        }
    }
}

impl RaftSnapshotBuilder<Types> for StateMachine {
    async fn build_snapshot(&mut self) -> StorageResult<Snapshot<Types>> {
        let applied = self.lock_applied().clone();
        let snapshot = applied.encode_snapshot()?;
        self.store_snapshot(applied).await?;
        Ok(snapshot)
    }
}

impl RaftStateMachine<Types> for StateMachine {
    type SnapshotBuilder = Self;

    async fn applied_state(
        &mut self,
    ) -> StorageResult<(Option<LogId<u64>>, StoredMembership<u64, ServerNode>)> {
        let applied = self.lock_applied();
        Ok((applied.last, applied.membership.clone()))
    }

    async fn apply<I>(&mut self, entries: I) -> StorageResult<Vec<OperationResult>>
    where
        I: IntoIterator<Item = Entry<Types>> + OptionalSend,
        I::IntoIter: OptionalSend,
    {
        let mut applied = self.lock_applied();
        Ok(entries.into_iter().map(|entry| applied.apply_entry(entry)).collect())
    }

    async fn get_snapshot_builder(&mut self) -> Self {
        self.clone()
    }

    async fn begin_receiving_snapshot(&mut self) -> StorageResult<Box<Cursor<Vec<u8>>>> {
        Ok(Box::default())
    }

    async fn install_snapshot(
        &mut self,
        _meta: &SnapshotMeta<u64, ServerNode>,
        snapshot: Box<Cursor<Vec<u8>>>,
    ) -> StorageResult<()> {
        let applied: AppliedState = postcard::from_bytes(snapshot.get_ref())
            .map_err(|error| StorageIOError::read_snapshot(None, &error))?;
        self.store_snapshot(applied.clone()).await?;
        *self.lock_applied() = applied;
        Ok(())
    }

    async fn get_current_snapshot(&mut self) -> StorageResult<Option<Snapshot<Types>>> {
        let kept: Option<AppliedState> = self
            .store
            .read_meta(SNAPSHOT)
            .map_err(|error| StorageIOError::read_snapshot(None, &error))?;
        kept.map(|applied| applied.encode_snapshot()).transpose()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_change_by_a_successor_is_not_the_leaders() {
        let leader = RaftLeader::new(5, 1);
        let at =
            |leader| AppliedState { last: Some(LogId::new(leader, 9)), ..AppliedState::default() };
        assert!(at(leader).state_under(&leader).is_some());
        for other in [
            RaftLeader::new(6, 2),
            RaftLeader::new(6, 1),
            RaftLeader::new(5, 2),
            RaftLeader::new(4, 1),
        ] {
            assert!(at(other).state_under(&leader).is_none(), "{other}");
        }
        assert!(AppliedState::default().state_under(&leader).is_none());
    }
}
