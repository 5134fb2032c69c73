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

use crate::Host;

/// The terms of a lease.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Terms {
    /// Its duration.
    pub ttl: Duration,
    /// The maximum deviation of a clock's speed, in parts per million.
    pub drift_ppm_max: u32,
}

impl Terms {
    fn drift(&self) -> Duration {
        let nanos = self.ttl.as_nanos() * u128::from(self.drift_ppm_max) / 1_000_000;
        Duration::from_nanos(u64::try_from(nanos).unwrap_or(u64::MAX)) + Duration::from_nanos(1)
    }
}

/// A lease, at its holder.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Lease {
    terms: Terms,
    until: Duration,
}

impl Lease {
    /// A lease that isn't held yet.
    pub fn new(terms: Terms) -> Self {
        Self { terms, until: Duration::ZERO }
    }

    /// Records that it was granted, to a request made at `asked` by the holder's clock.
    pub fn granted(&mut self, asked: Duration) {
        let held = self.terms.ttl.saturating_sub(self.terms.drift());
        self.until = self.until.max(asked + held);
    }

    /// Gives it up.
    pub fn dropped(&mut self) {
        self.until = Duration::ZERO;
    }

    /// The time at which it ends, by the same clock.
    pub fn until(&self) -> Duration {
        self.until
    }

    /// Whether it is held at `now`, by the same clock.
    pub fn is_held(&self, now: Duration) -> bool {
        now < self.until
    }
}

/// Leases, at the granter.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Grants {
    terms: Terms,
    granted: BTreeMap<Host, Duration>,
}

impl Grants {
    /// A granter that has just taken office: its predecessor may have granted every host a lease a
    /// moment ago.
    pub fn taken_over(terms: Terms, hosts: impl IntoIterator<Item = Host>, now: Duration) -> Self {
        Self { terms, granted: hosts.into_iter().map(|host| (host, now)).collect() }
    }

    /// Grants or renews a lease.
    pub fn grant(&mut self, host: Host, now: Duration) {
        self.granted.insert(host, now);
    }

    /// The hosts that may believe they hold a lease.
    pub fn not_over(&self, now: Duration) -> BTreeSet<Host> {
        let after = self.terms.ttl + self.terms.drift();
        let held = self.granted.iter().filter(|(_, granted)| now <= **granted + after);
        held.map(|(host, _)| *host).collect()
    }
}
