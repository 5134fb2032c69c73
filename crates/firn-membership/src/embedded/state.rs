//! What the log makes of nothing: pure, and the same at every server.

use std::collections::{BTreeMap, BTreeSet};

use firn_cluster::Host;
use serde::{Deserialize, Serialize};

use crate::{Changed, Cluster, Known, Record, Revision};

/// An entry of the log.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Op {
    /// A host of that name wants a number.
    Join(String),
    /// A record is to be another one, if it is of that revision.
    Change(Cluster, Revision, Record),
}

/// What an entry did.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum Done {
    /// Nothing that concerns anybody here.
    #[default]
    Nothing,
    /// The host's number; none where all are taken.
    Joined(Option<Host>),
    /// See there.
    Changed(Changed),
}

/// Everything that is agreed on.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct State {
    next: u32,
    names: BTreeMap<Host, String>,
    records: BTreeMap<Cluster, (Revision, Record)>,
}

impl State {
    /// Does what the entry at this place of the log says.
    pub fn apply(&mut self, index: u64, op: Op) -> Done {
        match op {
            Op::Join(name) => Done::Joined(self.join(name)),
            Op::Change(cluster, from, to) => Done::Changed(self.change(index, &cluster, from, to)),
        }
    }

    /// A record.
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

    /// Whether a host of each of these numbers has joined.
    pub fn has(&self, hosts: &BTreeSet<Host>) -> bool {
        hosts.iter().all(|host| u32::from(host.0) < self.next)
    }

    /// What hosts are called.
    pub fn names(&self) -> &BTreeMap<Host, String> {
        &self.names
    }

    fn join(&mut self, name: String) -> Option<Host> {
        let host = Host(u16::try_from(self.next).ok()?);
        self.next += 1;
        // Who was called that before has ended. Some record may still speak of it.
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
