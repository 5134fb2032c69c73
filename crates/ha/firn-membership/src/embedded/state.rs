//! The replicated state: the result of applying the raft log to an empty state. Pure, and the same
//! at every server.

use std::collections::{BTreeMap, BTreeSet};

use firn_cluster::HostId;
use serde::{Deserialize, Serialize};

use crate::{ChangeResult, ClusterName, ClusterRecord, Revision, VersionedRecord};

/// An entry of the log.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum StateOperation {
    /// Gives a number to a host of that name.
    Join(String),
    /// Changes a record, if it has that revision.
    Change(ClusterName, Revision, ClusterRecord),
}

/// The result of an entry.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum OperationResult {
    /// The result of an entry of raft's own: a blank entry, or a change of the raft servers. No
    /// client waits for it.
    #[default]
    Nothing,
    /// The host's number; `None` if all numbers are taken.
    Joined(Option<HostId>),
    /// The result of the change.
    Changed(ChangeResult),
}

/// All records, and the names of all hosts.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ReplicatedState {
    next: u32,
    names: BTreeMap<HostId, String>,
    records: BTreeMap<ClusterName, (Revision, ClusterRecord)>,
}

impl ReplicatedState {
    /// Applies the entry at this index of the log.
    pub fn apply_operation(&mut self, index: u64, op: StateOperation) -> OperationResult {
        match op {
            StateOperation::Join(name) => OperationResult::Joined(self.join_host(name)),
            StateOperation::Change(cluster, from, to) => {
                OperationResult::Changed(self.change_record(index, &cluster, from, to))
            }
        }
    }

    /// The record of a cluster.
    pub fn record_of(&self, cluster: &ClusterName) -> VersionedRecord {
        let entry = self.records.get(cluster).cloned();
        entry.map_or_else(VersionedRecord::default, |(revision, record)| VersionedRecord {
            revision,
            record: Some(record),
        })
    }

    /// All clusters.
    pub fn clusters(&self) -> Vec<ClusterName> {
        self.records.keys().cloned().collect()
    }

    /// Whether hosts with all these numbers have ever joined. Some of them may have ended since.
    pub fn have_all_joined(&self, hosts: &BTreeSet<HostId>) -> bool {
        hosts.iter().all(|host| u32::from(host.0) < self.next)
    }

    /// The names of hosts.
    pub fn names(&self) -> &BTreeMap<HostId, String> {
        &self.names
    }

    fn join_host(&mut self, name: String) -> Option<HostId> {
        let host = HostId(u16::try_from(self.next).ok()?);
        self.next += 1;
        // Earlier hosts of that name have ended. A record may still name them.
        let is_in_a_record = |host: &HostId| {
            self.records.values().any(|(_, record)| record.named_hosts().contains(host))
        };
        let gone: Vec<HostId> =
            self.names.iter().filter(|(_, old)| **old == name).map(|(host, _)| *host).collect();
        let forgotten: Vec<HostId> =
            gone.into_iter().filter(|host| !is_in_a_record(host)).collect();
        forgotten.iter().for_each(|host| drop(self.names.remove(host)));
        self.names.insert(host, name);
        Some(host)
    }

    fn change_record(
        &mut self,
        index: u64,
        cluster: &ClusterName,
        from: Revision,
        to: ClusterRecord,
    ) -> ChangeResult {
        let known = self.record_of(cluster);
        if known.revision != from {
            return ChangeResult::Other(known);
        }
        let revision = Revision(index);
        self.records.insert(cluster.clone(), (revision, to));
        ChangeResult::Done(revision)
    }
}

#[cfg(test)]
mod tests {
    use firn_cluster::VmId;
    use firn_cluster::failover::{FailoverRecord, VmPlacement};

    use super::*;

    fn record(primary: HostId) -> ClusterRecord {
        let placement = VmPlacement { primary, backup: None };
        let register = FailoverRecord::new(BTreeMap::from([(VmId(0), placement)]));
        ClusterRecord { register, vms: BTreeMap::from([(VmId(0), "web".to_owned())]) }
    }

    #[test]
    fn a_record_changes_only_from_the_expected_version() {
        let (mut state, web) = (ReplicatedState::default(), ClusterName::new("web").unwrap());
        let mut change = |index, from, to: ClusterRecord| match state
            .apply_operation(index, StateOperation::Change(web.clone(), Revision(from), to))
        {
            OperationResult::Changed(changed) => changed,
            other => panic!("{other:?}"),
        };
        assert_eq!(change(4, 0, record(HostId(0))), ChangeResult::Done(Revision(4)));
        let known = VersionedRecord { revision: Revision(4), record: Some(record(HostId(0))) };
        assert_eq!(change(5, 0, record(HostId(1))), ChangeResult::Other(known.clone()));
        assert_eq!(change(6, 5, record(HostId(1))), ChangeResult::Other(known));
        let ended = record(HostId(0)).to_ended();
        assert_eq!(change(7, 4, ended.clone()), ChangeResult::Done(Revision(7)));
        let known = VersionedRecord { revision: Revision(7), record: Some(ended) };
        assert_eq!(change(8, 0, record(HostId(1))), ChangeResult::Other(known), "it stays");
    }

    #[test]
    fn numbers_are_never_given_twice_and_names_are_forgotten() {
        let mut state = ReplicatedState::default();
        let join = |state: &mut ReplicatedState, name: &str| match state
            .apply_operation(1, StateOperation::Join(name.to_owned()))
        {
            OperationResult::Joined(host) => host,
            other => panic!("{other:?}"),
        };
        assert_eq!(join(&mut state, "a"), Some(HostId(0)));
        let web = ClusterName::new("web").unwrap();
        state.apply_operation(2, StateOperation::Change(web, Revision(0), record(HostId(0))));
        assert_eq!(join(&mut state, "a"), Some(HostId(1)));
        assert_eq!(join(&mut state, "a"), Some(HostId(2)));
        assert!(
            state.have_all_joined(&[HostId(0), HostId(2)].into())
                && !state.have_all_joined(&[HostId(3)].into())
        );
        let known: Vec<HostId> = state.names().keys().copied().collect();
        assert_eq!(known, [HostId(0), HostId(2)], "the record names 0, nobody names 1");
        state.next = 1 << 16;
        assert_eq!(join(&mut state, "a"), None);
    }
}
