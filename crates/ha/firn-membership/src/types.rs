//! The types of membership: names, results and errors.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use firn_cluster::HostId;
use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::ClusterRecord;

/// Maximum length of a name of a cluster or a host, in bytes: a label of RFC 1035.
const NAME_BYTES_MAX: usize = 63;

/// Whether a text can be a part of a key.
pub(crate) fn is_plain(name: &str) -> bool {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
    !name.is_empty() && name.len() <= NAME_BYTES_MAX && name.chars().all(is_plain)
}

/// The name of a virtual cluster: at least one VM; its VMs fail over as one.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct ClusterName(String);

impl ClusterName {
    /// Checks a name: letters, digits, `-`, `_` and `.`, so that it can be a part of a key.
    ///
    /// # Errors
    /// If it has other characters, or is too long, or empty.
    pub fn new(name: impl Into<String>) -> Result<Self, MembershipError> {
        let name = name.into();
        match is_plain(&name) {
            true => Ok(Self(name)),
            false => Err(MembershipError::Refused(format!(
                "{name:?} is no name of a cluster: give letters, digits, '-', '_' and '.', at most {NAME_BYTES_MAX}"
            ))),
        }
    }

    /// The name as text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl TryFrom<String> for ClusterName {
    type Error = MembershipError;

    fn try_from(name: String) -> Result<Self, MembershipError> {
        Self::new(name)
    }
}

impl From<ClusterName> for String {
    fn from(cluster: ClusterName) -> Self {
        cluster.0
    }
}

impl fmt::Display for ClusterName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// The change that made a record what it is. Two changes never have the same revision; the later
/// change has the higher one.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
)]
#[serde(transparent)]
pub struct Revision(pub u64);

/// A record at one moment; `None` if there is no such cluster, or not yet.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct VersionedRecord {
    /// The change that made it what it is, or 0.
    pub revision: Revision,
    /// The record.
    pub record: Option<ClusterRecord>,
}

/// The result of a change.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum ChangeResult {
    /// It was made, and is this revision.
    Done(Revision),
    /// It was not made: the record has another revision than expected.
    Other(VersionedRecord),
}

/// The result of a request for a lease.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum LeaseResult {
    /// The lease is granted, while this is the record. It counts from before the request.
    Granted(VersionedRecord),
    /// The lease is not granted: the host is fenced, or there is no such cluster.
    Refused(VersionedRecord),
}

/// What a controller needs to know about a cluster, at one moment.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RecordView {
    /// The record.
    pub known: VersionedRecord,
    /// Hosts that may believe they hold a lease. No other host does, or will before the record has
    /// changed, except hosts that the record doesn't fence.
    pub leases: BTreeSet<HostId>,
    /// The names of hosts.
    pub names: BTreeMap<HostId, String>,
    /// Hosts that have given up their lease, and requested none since.
    pub given_up: BTreeSet<HostId>,
}

/// Why a request has failed.
#[derive(Clone, Debug, PartialEq, Eq, Error, Serialize, Deserialize)]
pub enum MembershipError {
    /// Nothing was changed.
    #[error("{0}")]
    Unreachable(String),
    /// The change may have been made, or may still be made. Read the record to check.
    #[error("{0}; whether it was done is not known")]
    Unknown(String),
    /// The request can't succeed, however often it is repeated.
    #[error("{0}")]
    Refused(String),
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_parts_of_keys() {
        for name in ["web", "a.b-c_D9", &"x".repeat(63)] {
            assert_eq!(ClusterName::new(name).unwrap().as_str(), name);
        }
        for name in ["", "a/b", "a b", "ä", &"x".repeat(64)] {
            assert!(matches!(ClusterName::new(name), Err(MembershipError::Refused(_))), "{name:?}");
        }
        assert!(serde_json::from_str::<ClusterName>("\"a/b\"").is_err());
    }
}
