//! The leases that a leader grants: one [`Grants`] for each cluster and each term of leadership.
//!
//! ```text
//!   a request:   fenced as far as is known? refuse --- note the grant --- am I still the leader? --- fenced? refuse --- granted
//!   a view:                                                            am I still the leader? --- the record --- the grants
//! ```
//!
//! A grant is noted *before* the leader makes sure that it leads and looks at the record again. So a view whose record fences a host
//! comes with every grant that this leader made to it: whoever notes later looks at the record later, and is refused.
//!
//! Grants of earlier leaders are covered by the beginning of a term: who was granted a lease had asked before its granter was
//! confirmed by a majority, hence before anybody else was elected, hence before the term in which it is counted from now.
//! Nothing of this is on disk.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use firn_cluster::Host;
use firn_cluster::failover::{Grants, Terms};

use crate::{Cluster, Known};

/// What one server has granted.
#[derive(Debug)]
pub struct Offices {
    terms: Terms,
    /// For each cluster: the term, and what was granted in it.
    granted: BTreeMap<Cluster, (u64, Grants)>,
}

impl Offices {
    /// Of a server that has granted nothing.
    pub fn new(terms: Terms) -> Self {
        Self { terms, granted: BTreeMap::new() }
    }

    /// Notes a grant, before it is sure. It counts if the term turns out to be an old one, too.
    pub fn note(&mut self, cluster: &Cluster, host: Host, now: Duration) {
        let none = || (0, Grants::taken_over(self.terms, [], now));
        self.granted.entry(cluster.clone()).or_insert_with(none).1.grant(host, now);
    }

    /// A majority has just said that this server leads in that term. False if it has led in a later one since.
    pub fn enter(&mut self, cluster: &Cluster, term: u64, known: &Known, now: Duration) -> bool {
        let before = self.granted.get(cluster).map(|(term, _)| *term).unwrap_or_default();
        if before < term {
            let mut hosts = known.record.as_ref().map(|record| record.hosts()).unwrap_or_default();
            hosts.extend(self.not_over(cluster, now));
            let grants = Grants::taken_over(self.terms, hosts, now);
            self.granted.insert(cluster.clone(), (term, grants));
        }
        before <= term
    }

    /// Hosts that may believe they hold a lease.
    pub fn not_over(&self, cluster: &Cluster, now: Duration) -> BTreeSet<Host> {
        self.granted.get(cluster).map(|(_, grants)| grants.not_over(now)).unwrap_or_default()
    }

    /// Forgets clusters that have ended.
    pub fn retain(&mut self, is_there: impl Fn(&Cluster) -> bool) {
        self.granted.retain(|cluster, _| is_there(cluster));
    }
}

#[cfg(test)]
mod tests {
    use firn_cluster::Vm;
    use firn_cluster::failover::{Place, Register};

    use super::*;
    use crate::{Record, Revision};

    const S: Duration = Duration::from_secs(1);

    fn web() -> Cluster {
        Cluster::new("web").unwrap()
    }

    fn known() -> Known {
        let place = Place { primary: Host(1), backup: Some(Host(2)) };
        let register = Register::new(BTreeMap::from([(Vm(0), place)]));
        Known { revision: Revision(3), record: Some(Record { register, vms: BTreeMap::new() }) }
    }

    #[test]
    fn a_term_begins_as_if_everybody_had_just_been_granted_a_lease() {
        let mut offices = Offices::new(Terms { ttl: 3 * S, drift_ppm_max: 100 });
        assert!(offices.enter(&web(), 5, &known(), 10 * S));
        assert_eq!(offices.not_over(&web(), 13 * S), [Host(1), Host(2)].into());
        assert!(offices.not_over(&web(), 14 * S).is_empty());
        assert!(offices.enter(&web(), 5, &known(), 20 * S));
        assert!(offices.not_over(&web(), 20 * S).is_empty(), "the same term goes on");
        assert!(offices.enter(&web(), 6, &known(), 30 * S));
        assert_eq!(offices.not_over(&web(), 31 * S).len(), 2);
        assert!(!offices.enter(&web(), 5, &known(), 40 * S), "it has led since");
    }

    #[test]
    fn what_was_noted_before_the_term_was_known_counts_in_it() {
        let mut offices = Offices::new(Terms { ttl: 3 * S, drift_ppm_max: 100 });
        offices.note(&web(), Host(7), 10 * S);
        assert!(offices.enter(&web(), 2, &known(), 11 * S));
        assert!(offices.not_over(&web(), 14 * S).contains(&Host(7)));
        offices.retain(|_| false);
        assert!(offices.not_over(&web(), 11 * S).is_empty());
    }
}
