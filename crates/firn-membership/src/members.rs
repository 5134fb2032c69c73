//! The interface to the store of records and leases, for all implementations.

use std::future::Future;
use std::pin::Pin;

use firn_cluster::Host;

use crate::{Changed, Cluster, Known, Leased, Record, Revision, Trouble, View};

/// An answer that arrives later, or an error.
pub type Later<'a, T> = Pin<Box<dyn Future<Output = Result<T, Trouble>> + Send + 'a>>;

/// The store in which the hosts of clusters agree. Every answer takes a few seconds at most, or is
/// a [`MembershipError`].
pub trait Members: Send + Sync + 'static {
    /// Returns a number for the agent of the host of that name, which no agent had before. Each
    /// start of an agent is another host.
    fn join<'a>(&'a self, name: &'a str) -> Later<'a, Host>;

    /// Lists the clusters that have records.
    fn clusters(&self) -> Later<'_, Vec<Cluster>>;

    /// Reads the current record.
    fn read<'a>(&'a self, cluster: &'a Cluster) -> Later<'a, Known>;

    /// Changes the record if it still has that revision. The record of a cluster that has
    /// [ended](ClusterRecord::to_ended) stays.
    fn change<'a>(
        &'a self,
        cluster: &'a Cluster,
        from: Revision,
        to: &'a Record,
    ) -> Later<'a, Changed>;

    /// Requests a lease, or its extension.
    fn lease<'a>(&'a self, cluster: &'a Cluster, host: Host) -> Later<'a, Leased>;

    /// Reads the record and the leases that have not expired.
    fn view<'a>(&'a self, cluster: &'a Cluster) -> Later<'a, View>;

    /// Requests leadership for the host of that name, or its extension; returns the name of the
    /// leading host. The leading host runs the controllers. Two hosts may believe for a while that
    /// they lead: that does no harm.
    fn lead<'a>(&'a self, name: &'a str) -> Later<'a, String>;

    /// The name of the leading host, if there is one.
    fn leader(&self) -> Later<'_, Option<String>>;
}
