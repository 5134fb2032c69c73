//! The types that raft is used with.

use std::io::Cursor;

use super::state;

openraft::declare_raft_types!(
    /// The types that raft is used with.
    pub Types: D = state::StateOperation, R = state::OperationResult, SnapshotData = Cursor<Vec<u8>>,
);
