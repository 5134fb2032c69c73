//! The messages to servers, of other servers and of clients: one message, one answer, each by
//! postcard.

use firn_cluster::Host;
use openraft::raft::{AppendEntriesRequest, InstallSnapshotRequest, VoteRequest};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use super::Types;
use super::foundings::Founding;
use crate::{Changed, Cluster, Known, Leased, Record, Revision, Trouble, View};

/// A message to a server.
#[derive(Serialize, Deserialize)]
pub enum Message {
    /// From another server; answered by a [`RaftReply`].
    Raft(Letter),
    /// From a client; answered by a [`StoreResponse`].
    Ask(Ask),
}

/// A message between servers, with the identities of their bootstraps (`bootstrap_ids`).
#[derive(Serialize, Deserialize)]
pub struct Letter {
    /// The sender.
    pub from: Founding,
    /// The receiver, if the sender knows its identity.
    pub to: Option<Founding>,
    /// The request.
    pub rpc: Rpc,
}

/// The requests of raft.
#[derive(Serialize, Deserialize)]
pub enum Rpc {
    /// See there.
    Append(AppendEntriesRequest<Types>),
    /// See there.
    Vote(VoteRequest<u64>),
    /// See there.
    Snapshot(InstallSnapshotRequest<Types>),
}

/// The answer of a server to another.
#[derive(Serialize, Deserialize)]
pub struct Reply {
    /// The server that answers.
    pub from: Founding,
    /// Raft's own `Result`, encoded by postcard.
    pub answer: Vec<u8>,
}

/// A request of [`crate::MembershipStore`].
#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum Ask {
    /// See `join_host`.
    Join(String),
    /// See `list_clusters`.
    Clusters,
    /// See `read_record`.
    Read(Cluster),
    /// See `change_record`.
    Change(Cluster, Revision, Record),
    /// See `request_lease`.
    Lease(Cluster, Host),
    /// See `read_view`.
    View(Cluster),
    /// See `request_leadership`.
    Lead,
}

/// The response to a request.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum Told {
    /// The host's number.
    Joined(Host),
    /// All clusters.
    Clusters(Vec<Cluster>),
    /// The record.
    Read(Known),
    /// The result of the change.
    Changed(Changed),
    /// The result of the request for a lease.
    Leased(Leased),
    /// Record and leases.
    View(View),
    /// The name of the leader.
    Leads(String),
    /// This server doesn't lead; perhaps that one does. Nothing was changed.
    Elsewhere(Option<String>),
    /// The request has failed.
    Trouble(Trouble),
}

/// Encodes a value.
///
/// # Errors
/// If it can't be encoded.
pub fn encode(value: &impl Serialize) -> Result<Vec<u8>, Trouble> {
    postcard::to_stdvec(value)
        .map_err(|error| Trouble::Refused(format!("writing a message: {error}")))
}

/// Decodes a value.
///
/// # Errors
/// If the bytes hold something else.
pub fn decode<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, Trouble> {
    postcard::from_bytes(bytes)
        .map_err(|error| Trouble::Refused(format!("a message of {} bytes: {error}", bytes.len())))
}
