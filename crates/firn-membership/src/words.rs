//! The words of membership: what is agreed on, what is answered, and what goes wrong.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use firn_cluster::Host;
use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::Record;

/// The longest name of a cluster or a host, in bytes: a label of RFC 1035.
const NAME_BYTES_MAX: usize = 63;

/// Whether a text can be a part of a key.
pub(crate) fn is_plain(name: &str) -> bool {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
    !name.is_empty() && name.len() <= NAME_BYTES_MAX && name.chars().all(is_plain)
}

/// The name of a virtual cluster: VMs that fail over together, one at least.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Cluster(String);

impl Cluster {
    /// Checks a name: letters, digits, `-`, `_` and `.`, so that it can be a part of a key.
    ///
    /// # Errors
    /// If it has anything else, or is too long, or empty.
    pub fn new(name: impl Into<String>) -> Result<Self, Trouble> {
        let name = name.into();
        match is_plain(&name) {
            true => Ok(Self(name)),
            false => Err(Trouble::Refused(format!(
                "{name:?} is no name of a cluster: give letters, digits, '-', '_' and '.', at most {NAME_BYTES_MAX}"
            ))),
        }
    }

    /// The name as text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl TryFrom<String> for Cluster {
    type Error = Trouble;

    fn try_from(name: String) -> Result<Self, Trouble> {
        Self::new(name)
    }
}

impl From<Cluster> for String {
    fn from(cluster: Cluster) -> Self {
        cluster.0
    }
}

impl fmt::Display for Cluster {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// Which change made a record what it is. Two changes never have the same; of two, the later one has the higher.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
)]
#[serde(transparent)]
pub struct Revision(pub u64);

/// A record at one moment; none if there is no such cluster, or not yet.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Known {
    /// Which change made it that, or 0.
    pub revision: Revision,
    /// The record.
    pub record: Option<Record>,
}

/// What became of a change.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Changed {
    /// It was made, and is this revision.
    Done(Revision),
    /// It was not made: the record is another one than was thought.
    Other(Known),
}

/// What became of a request for a lease.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Leased {
    /// It is granted, while this is the record. It counts from before the asking.
    Granted(Known),
    /// It is not: the host is fenced, or there is no such cluster.
    Refused(Known),
}

/// What a controller needs to know, as it was at one moment.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct View {
    /// The record.
    pub known: Known,
    /// Hosts that may believe they hold a lease. No others do, or will before the record has changed, except those
    /// that the record doesn't fence.
    pub leases: BTreeSet<Host>,
    /// What hosts are called.
    pub names: BTreeMap<Host, String>,
}

/// Why there is no answer.
#[derive(Clone, Debug, PartialEq, Eq, Error, Serialize, Deserialize)]
pub enum Trouble {
    /// Nothing was changed.
    #[error("{0}")]
    Unreachable(String),
    /// What was asked for may have been done, or be done yet. Read, and see.
    #[error("{0}; whether it was done is not known")]
    Unknown(String),
    /// It can't be done, however often it is tried.
    #[error("{0}")]
    Refused(String),
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_parts_of_keys() {
        for name in ["web", "a.b-c_D9", &"x".repeat(63)] {
            assert_eq!(Cluster::new(name).unwrap().as_str(), name);
        }
        for name in ["", "a/b", "a b", "ä", &"x".repeat(64)] {
            assert!(matches!(Cluster::new(name), Err(Trouble::Refused(_))), "{name:?}");
        }
        assert!(serde_json::from_str::<Cluster>("\"a/b\"").is_err());
    }
}
