//! What servers and those who ask them say to each other: one message, one answer, each by postcard.

use firn_cluster::Host;
use openraft::raft::{AppendEntriesRequest, InstallSnapshotRequest, VoteRequest};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use super::Types;
use crate::{Changed, Cluster, Known, Leased, Record, Revision, Trouble, View};

/// To a server.
#[derive(Serialize, Deserialize)]
pub enum Message {
    /// Raft's, as the two that follow; answered by its own `Result`.
    Append(AppendEntriesRequest<Types>),
    /// Raft's.
    Vote(VoteRequest<u64>),
    /// Raft's.
    Snapshot(InstallSnapshotRequest<Types>),
    /// Of a host.
    Ask(Ask),
}

/// What [`crate::Members`] asks.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum Ask {
    /// See `join`.
    Join(String),
    /// See `clusters`.
    Clusters,
    /// See `read`.
    Read(Cluster),
    /// See `change`.
    Change(Cluster, Revision, Option<Record>),
    /// See `lease`.
    Lease(Cluster, Host),
    /// See `view`.
    View(Cluster),
    /// See `lead`.
    Lead,
}

/// What is answered.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum Told {
    /// The host's number.
    Joined(Host),
    /// All clusters.
    Clusters(Vec<Cluster>),
    /// The record.
    Read(Known),
    /// What became of the change.
    Changed(Changed),
    /// What became of the request.
    Leased(Leased),
    /// Record and leases.
    View(View),
    /// Who leads.
    Leads(String),
    /// This server doesn't lead; perhaps that one does. Nothing was done.
    Elsewhere(Option<String>),
    /// Why not.
    Trouble(Trouble),
}

/// As bytes.
///
/// # Errors
/// If it can't be written.
pub fn encode(value: &impl Serialize) -> Result<Vec<u8>, Trouble> {
    postcard::to_stdvec(value)
        .map_err(|error| Trouble::Refused(format!("writing a message: {error}")))
}

/// From bytes.
///
/// # Errors
/// If they are something else.
pub fn decode<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, Trouble> {
    postcard::from_bytes(bytes)
        .map_err(|error| Trouble::Refused(format!("a message of {} bytes: {error}", bytes.len())))
}
