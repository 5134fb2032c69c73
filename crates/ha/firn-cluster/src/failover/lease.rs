//! Leases: the holder considers its lease valid for less time than the granter does.
//!
//! ```text
//!   holder     asks |=============== held ===============|
//!                    \                                   .
//!   granter           granted |=============== not over ==.===============|
//!                             .                           .
//!                             +--- at most `ttl` less drift, plus drift --+
//! ```

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use crate::HostId;

/// The terms of a lease.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct LeaseTerms {
    /// Its duration.
    pub ttl: Duration,
    /// The maximum deviation of a clock's speed, in parts per million.
    pub drift_ppm_max: u32,
}

impl LeaseTerms {
    fn drift_margin(&self) -> Duration {
        let nanos = self.ttl.as_nanos() * u128::from(self.drift_ppm_max) / 1_000_000;
        Duration::from_nanos(u64::try_from(nanos).unwrap_or(u64::MAX)) + Duration::from_nanos(1)
    }
}

/// A lease, at its holder.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct HeldLease {
    terms: LeaseTerms,
    until: Duration,
}

impl HeldLease {
    /// A lease that isn't held yet.
    pub fn new(terms: LeaseTerms) -> Self {
        Self { terms, until: Duration::ZERO }
    }

    /// Records that it was granted, to a request made at `asked` by the holder's clock.
    pub fn record_grant(&mut self, asked: Duration) {
        let held = self.terms.ttl.saturating_sub(self.terms.drift_margin());
        self.until = self.until.max(asked + held);
    }

    /// Gives it up.
    pub fn drop_lease(&mut self) {
        self.until = Duration::ZERO;
    }

    /// The time at which it ends, by the same clock.
    pub fn valid_until(&self) -> Duration {
        self.until
    }

    /// Whether it is held at `now`, by the same clock.
    pub fn is_held(&self, now: Duration) -> bool {
        now < self.until
    }
}

/// Leases, at the granter.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct GrantedLeases {
    terms: LeaseTerms,
    granted: BTreeMap<HostId, Duration>,
    given_up: BTreeSet<HostId>,
}

impl GrantedLeases {
    /// A granter that has just taken office: its predecessor may have granted every host a lease a
    /// moment ago.
    pub fn after_takeover(
        terms: LeaseTerms,
        hosts: impl IntoIterator<Item = HostId>,
        now: Duration,
    ) -> Self {
        let granted = hosts.into_iter().map(|host| (host, now)).collect();
        Self { terms, granted, given_up: BTreeSet::new() }
    }

    /// Grants or renews a lease.
    pub fn grant_lease(&mut self, host: HostId, now: Duration) {
        self.granted.insert(host, now);
        self.given_up.remove(&host);
    }

    /// Removes a lease that its holder has given up: the holder sends nothing any more, whatever it
    /// is granted for requests that it has made before.
    pub fn remove_lease(&mut self, host: HostId) {
        self.granted.remove(&host);
        self.given_up.insert(host);
    }

    /// The hosts that have given up their lease, and were granted none since.
    pub fn hosts_without_lease(&self) -> &BTreeSet<HostId> {
        &self.given_up
    }

    /// The hosts that may believe they hold a lease.
    pub fn unexpired_hosts(&self, now: Duration) -> BTreeSet<HostId> {
        let after = self.terms.ttl + self.terms.drift_margin();
        let held = self.granted.iter().filter(|(_, granted)| now <= **granted + after);
        held.map(|(host, _)| *host).collect()
    }
}
