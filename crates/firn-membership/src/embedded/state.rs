//! The replicated state: the result of applying the raft log to an empty state. Pure, and the same
//! at every server.

use std::collections::{BTreeMap, BTreeSet};

use firn_cluster::Host;
use serde::{Deserialize, Serialize};

use crate::{Changed, Cluster, Known, Record, Revision};

/// An entry of the log.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Op {
    /// Gives a number to a host of that name.
    Join(String),
    /// Changes a record, if it has that revision.
    Change(Cluster, Revision, Record),
}

/// The result of an entry.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum Done {
    /// Nothing that a client waits for.
    #[default]
    Nothing,
    /// The host's number; `None` if all numbers are taken.
    Joined(Option<Host>),
    /// The result of the change.
    Changed(Changed),
}

/// All records, and the names of all hosts.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct State {
    next: u32,
    names: BTreeMap<Host, String>,
    records: BTreeMap<Cluster, (Revision, Record)>,
}

impl State {
    /// Applies the entry at this index of the log.
    pub fn apply(&mut self, index: u64, op: Op) -> Done {
        match op {
            Op::Join(name) => Done::Joined(self.join(name)),
            Op::Change(cluster, from, to) => Done::Changed(self.change(index, &cluster, from, to)),
        }
    }

    /// The record of a cluster.
    pub fn known(&self, cluster: &Cluster) -> Known {
        let entry = self.records.get(cluster).cloned();
        entry.map_or_else(Known::default, |(revision, record)| Known {
            revision,
            record: Some(record),
        })
    }

    /// All clusters.
    pub fn clusters(&self) -> Vec<Cluster> {
        self.records.keys().cloned().collect()
    }

    /// Whether hosts with all these numbers have joined.
    pub fn has(&self, hosts: &BTreeSet<Host>) -> bool {
        hosts.iter().all(|host| u32::from(host.0) < self.next)
    }

    /// The names of hosts.
    pub fn names(&self) -> &BTreeMap<Host, String> {
        &self.names
    }

    fn join(&mut self, name: String) -> Option<Host> {
        let host = Host(u16::try_from(self.next).ok()?);
        self.next += 1;
        // Earlier hosts of that name have ended. A record may still name them.
        let named =
            |host: &Host| self.records.values().any(|(_, record)| record.hosts().contains(host));
        let gone: Vec<Host> =
            self.names.iter().filter(|(_, old)| **old == name).map(|(host, _)| *host).collect();
        let forgotten: Vec<Host> = gone.into_iter().filter(|host| !named(host)).collect();
        forgotten.iter().for_each(|host| drop(self.names.remove(host)));
        self.names.insert(host, name);
        Some(host)
    }

    fn change(&mut self, index: u64, cluster: &Cluster, from: Revision, to: Record) -> Changed {
        let known = self.known(cluster);
        if known.revision != from {
            return Changed::Other(known);
        }
        let revision = Revision(index);
        self.records.insert(cluster.clone(), (revision, to));
        Changed::Done(revision)
    }
}

#[cfg(test)]
mod tests {
    use firn_cluster::Vm;
    use firn_cluster::failover::{Place, Register};

    use super::*;

    fn record(primary: Host) -> Record {
        let place = Place { primary, backup: None };
        let register = Register::new(BTreeMap::from([(Vm(0), place)]));
        Record { register, vms: BTreeMap::from([(Vm(0), "web".to_owned())]) }
    }

    #[test]
    fn a_record_changes_only_from_what_it_is() {
        let (mut state, web) = (State::default(), Cluster::new("web").unwrap());
        let mut change = |index, from, to: Record| match state
            .apply(index, Op::Change(web.clone(), Revision(from), to))
        {
            Done::Changed(changed) => changed,
            other => panic!("{other:?}"),
        };
        assert_eq!(change(4, 0, record(Host(0))), Changed::Done(Revision(4)));
        let known = Known { revision: Revision(4), record: Some(record(Host(0))) };
        assert_eq!(change(5, 0, record(Host(1))), Changed::Other(known.clone()));
        assert_eq!(change(6, 5, record(Host(1))), Changed::Other(known));
        let ended = record(Host(0)).ended();
        assert_eq!(change(7, 4, ended.clone()), Changed::Done(Revision(7)));
        let known = Known { revision: Revision(7), record: Some(ended) };
        assert_eq!(change(8, 0, record(Host(1))), Changed::Other(known), "it stays");
    }

    #[test]
    fn numbers_are_never_given_twice_and_names_are_forgotten() {
        let mut state = State::default();
        let join = |state: &mut State, name: &str| match state.apply(1, Op::Join(name.to_owned())) {
            Done::Joined(host) => host,
            other => panic!("{other:?}"),
        };
        assert_eq!(join(&mut state, "a"), Some(Host(0)));
        let web = Cluster::new("web").unwrap();
        state.apply(2, Op::Change(web, Revision(0), record(Host(0))));
        assert_eq!(join(&mut state, "a"), Some(Host(1)));
        assert_eq!(join(&mut state, "a"), Some(Host(2)));
        assert!(state.has(&[Host(0), Host(2)].into()) && !state.has(&[Host(3)].into()));
        let known: Vec<Host> = state.names().keys().copied().collect();
        assert_eq!(known, [Host(0), Host(2)], "the record names 0, nobody names 1");
        state.next = 1 << 16;
        assert_eq!(join(&mut state, "a"), None);
    }
}
