//! The messages to servers, of other servers and of clients: one message, one answer, each by
//! postcard.

use firn_cluster::{Generation, HostId};
use openraft::raft::{AppendEntriesRequest, InstallSnapshotRequest, VoteRequest};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use super::bootstrap_ids::BootstrapId;
use super::types::Types;
use crate::{
    ChangeResult, ClusterName, ClusterRecord, LeaseResult, MembershipError, RecordView, Revision,
    VersionedRecord,
};

/// A message to a server.
#[derive(Serialize, Deserialize)]
pub enum ServerMessage {
    /// From another server; answered by a [`RaftReply`].
    Raft(RaftEnvelope),
    /// From a client; answered by a [`StoreResponse`].
    Ask(StoreRequest),
}

/// A message between servers, with the identities of their bootstraps (`bootstrap_ids`).
#[derive(Serialize, Deserialize)]
pub struct RaftEnvelope {
    /// The sender.
    pub from: BootstrapId,
    /// The receiver, if the sender knows its identity.
    pub to: Option<BootstrapId>,
    /// The request.
    pub rpc: RaftRequest,
}

/// The requests of raft.
#[derive(Serialize, Deserialize)]
pub enum RaftRequest {
    /// See there.
    Append(AppendEntriesRequest<Types>),
    /// See there.
    Vote(VoteRequest<u64>),
    /// See there.
    Snapshot(InstallSnapshotRequest<Types>),
}

/// The answer of a server to another.
#[derive(Serialize, Deserialize)]
pub struct RaftReply {
    /// The server that answers.
    pub from: BootstrapId,
    /// Raft's own `Result`, encoded by postcard.
    pub answer: Vec<u8>,
}

/// A request of [`crate::MembershipStore`].
#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum StoreRequest {
    /// See `join_host`.
    Join(String),
    /// See `list_clusters`.
    Clusters,
    /// See `read_record`.
    Read(ClusterName),
    /// See `change_record`.
    Change(ClusterName, Revision, ClusterRecord),
    /// See `request_lease`. The last part is the duration of the lease in milliseconds, as the host
    /// counts it: a server that counts a shorter time grants none.
    Lease(ClusterName, HostId, u64),
    /// See `read_view`.
    View(ClusterName),
    /// See `request_leadership`.
    Lead,
    /// See `report_lease_given_up`.
    LeaseGivenUp(ClusterName, HostId, Generation),
}

/// The response to a request.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum StoreResponse {
    /// The host's number.
    Joined(HostId),
    /// All clusters.
    Clusters(Vec<ClusterName>),
    /// The record.
    Read(VersionedRecord),
    /// The result of the change.
    Changed(ChangeResult),
    /// The result of the request for a lease.
    Leased(LeaseResult),
    /// Record and leases.
    View(RecordView),
    /// The name of the leader.
    Leads(String),
    /// This server doesn't lead; perhaps that one does. Nothing was changed.
    Elsewhere(Option<String>),
    /// The request has failed.
    Trouble(MembershipError),
    /// The report was noted.
    Noted,
}

/// Encodes a value.
///
/// # Errors
/// If it can't be encoded.
pub fn encode_message(value: &impl Serialize) -> Result<Vec<u8>, MembershipError> {
    postcard::to_stdvec(value)
        .map_err(|error| MembershipError::Refused(format!("writing a message: {error}")))
}

/// Decodes a value.
///
/// # Errors
/// If the bytes hold something else.
pub fn decode_message<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, MembershipError> {
    postcard::from_bytes(bytes).map_err(|error| {
        MembershipError::Refused(format!("a message of {} bytes: {error}", bytes.len()))
    })
}
