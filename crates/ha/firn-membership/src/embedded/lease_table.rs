//! The leases that a leader grants: one [`GrantedLeases`] for each cluster and each term of
//! leadership.
//!
//! ```text
//!   a request:   fenced as far as is known? refuse --- note the grant
//!                  --- still the leader? --- fenced? refuse --- granted
//!   a view:            still the leader? --- the record --- the grants
//! ```
//!
//! A grant is recorded *before* the leader confirms that it leads and reads the record again. So a
//! view whose record fences a host comes with every grant that this leader made to it: a grant that
//! is recorded later is followed by a later read of the record, and is refused.
//!
//! The start of a term covers the grants of earlier leaders. A host that was granted a lease had
//! requested it before its leader was confirmed by a majority. That was before the election of any
//! other leader, and so before the term in which its lease is now counted from the start. Nothing
//! of this is on disk.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use firn_cluster::HostId;
use firn_cluster::failover::{GrantedLeases, LeaseTerms};

use crate::{ClusterName, VersionedRecord};

/// The leases that one server has granted.
#[derive(Debug)]
pub struct LeaseTable {
    terms: LeaseTerms,
    /// For each cluster: the term, and the grants in it.
    granted: BTreeMap<ClusterName, (u64, GrantedLeases)>,
}

impl LeaseTable {
    /// The table of a server that has granted nothing.
    pub fn new(terms: LeaseTerms) -> Self {
        Self { terms, granted: BTreeMap::new() }
    }

    /// Notes a grant before it is confirmed. It counts even if the term turns out to be an old one.
    pub fn record_grant(&mut self, cluster: &ClusterName, host: HostId, now: Duration) {
        let none = || (0, GrantedLeases::after_takeover(self.terms, [], now));
        self.granted.entry(cluster.clone()).or_insert_with(none).1.grant_lease(host, now);
    }

    /// Begins a term, in which a majority has just confirmed this server as leader. False if the
    /// server has led in a later term since.
    pub fn enter_term(
        &mut self,
        cluster: &ClusterName,
        term: u64,
        known: &VersionedRecord,
        now: Duration,
    ) -> bool {
        let before = self.granted.get(cluster).map(|(term, _)| *term).unwrap_or_default();
        if before < term {
            let mut hosts =
                known.record.as_ref().map(|record| record.named_hosts()).unwrap_or_default();
            hosts.extend(self.unexpired_hosts(cluster, now));
            let grants = GrantedLeases::after_takeover(self.terms, hosts, now);
            self.granted.insert(cluster.clone(), (term, grants));
        }
        before <= term
    }

    /// Removes the lease of a host that has given it up.
    pub fn remove_grant(&mut self, cluster: &ClusterName, host: HostId) {
        if let Some((_, grants)) = self.granted.get_mut(cluster) {
            grants.remove_lease(host);
        }
    }

    /// Hosts that have given up their lease.
    pub fn hosts_without_lease(&self, cluster: &ClusterName) -> BTreeSet<HostId> {
        let grants = self.granted.get(cluster);
        grants.map(|(_, grants)| grants.hosts_without_lease().clone()).unwrap_or_default()
    }

    /// Hosts that may believe they hold a lease.
    pub fn unexpired_hosts(&self, cluster: &ClusterName, now: Duration) -> BTreeSet<HostId> {
        self.granted.get(cluster).map(|(_, grants)| grants.unexpired_hosts(now)).unwrap_or_default()
    }

    /// Forgets clusters that have ended.
    pub fn retain_clusters(&mut self, is_there: impl Fn(&ClusterName) -> bool) {
        self.granted.retain(|cluster, _| is_there(cluster));
    }
}

#[cfg(test)]
mod tests {
    use firn_cluster::VmId;
    use firn_cluster::failover::{FailoverRecord, VmPlacement};

    use super::*;
    use crate::{ClusterRecord, Revision};

    const S: Duration = Duration::from_secs(1);

    fn web() -> ClusterName {
        ClusterName::new("web").unwrap()
    }

    fn known() -> VersionedRecord {
        let placement = VmPlacement { primary: HostId(1), backup: Some(HostId(2)) };
        let register = FailoverRecord::new(BTreeMap::from([(VmId(0), placement)]));
        VersionedRecord {
            revision: Revision(3),
            record: Some(ClusterRecord { register, vms: BTreeMap::new() }),
        }
    }

    #[test]
    fn a_new_leader_assumes_that_all_leases_were_just_granted() {
        let mut leases = LeaseTable::new(LeaseTerms { ttl: 3 * S, drift_ppm_max: 100 });
        assert!(leases.enter_term(&web(), 5, &known(), 10 * S));
        assert_eq!(leases.unexpired_hosts(&web(), 13 * S), [HostId(1), HostId(2)].into());
        assert!(leases.unexpired_hosts(&web(), 14 * S).is_empty());
        assert!(leases.enter_term(&web(), 5, &known(), 20 * S));
        assert!(leases.unexpired_hosts(&web(), 20 * S).is_empty(), "the same term goes on");
        assert!(leases.enter_term(&web(), 6, &known(), 30 * S));
        assert_eq!(leases.unexpired_hosts(&web(), 31 * S).len(), 2);
        assert!(!leases.enter_term(&web(), 5, &known(), 40 * S), "it has led since");
    }

    #[test]
    fn a_grant_before_the_term_is_known_counts_in_it() {
        let mut leases = LeaseTable::new(LeaseTerms { ttl: 3 * S, drift_ppm_max: 100 });
        leases.record_grant(&web(), HostId(7), 10 * S);
        assert!(leases.enter_term(&web(), 2, &known(), 11 * S));
        assert!(leases.unexpired_hosts(&web(), 14 * S).contains(&HostId(7)));
        leases.retain_clusters(|_| false);
        assert!(leases.unexpired_hosts(&web(), 11 * S).is_empty());
    }
}
