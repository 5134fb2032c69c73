//! What servers and those who ask them say to each other: one message, one answer, each by postcard.

use firn_cluster::Host;
use openraft::raft::{AppendEntriesRequest, InstallSnapshotRequest, VoteRequest};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use super::Types;
use super::foundings::Founding;
use crate::{Changed, Cluster, Known, Leased, Record, Revision, Trouble, View};

/// To a server.
#[derive(Serialize, Deserialize)]
pub enum Message {
    /// Of a server; answered by a [`Reply`].
    Raft(Letter),
    /// Of a host; answered by [`Told`].
    Ask(Ask),
}

/// Between servers, with which founding each was made in (`foundings`).
#[derive(Serialize, Deserialize)]
pub struct Letter {
    /// Who sends it.
    pub from: Founding,
    /// Who it is for, if the sender has met it.
    pub to: Option<Founding>,
    /// What is said.
    pub rpc: Rpc,
}

/// Raft's messages.
#[derive(Serialize, Deserialize)]
pub enum Rpc {
    /// See there.
    Append(AppendEntriesRequest<Types>),
    /// See there.
    Vote(VoteRequest<u64>),
    /// See there.
    Snapshot(InstallSnapshotRequest<Types>),
}

/// What a server answers to another.
#[derive(Serialize, Deserialize)]
pub struct Reply {
    /// Who answers.
    pub from: Founding,
    /// Raft's own `Result`, by postcard.
    pub answer: Vec<u8>,
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
    Change(Cluster, Revision, Record),
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
