//! The interface, whatever is behind it.

use std::future::Future;
use std::pin::Pin;

use firn_cluster::Host;

use crate::{Changed, Cluster, Known, Leased, Record, Revision, Trouble, View};

/// An answer that takes a while, or trouble.
pub type Later<'a, T> = Pin<Box<dyn Future<Output = Result<T, Trouble>> + Send + 'a>>;

/// Where the hosts of clusters agree. Every answer takes a few seconds at most, or is [`Trouble`].
pub trait Members: Send + Sync + 'static {
    /// A number for the agent of the host of that name, which nobody had before. Each start of an agent is another host.
    fn join<'a>(&'a self, name: &'a str) -> Later<'a, Host>;

    /// The clusters that there are.
    fn clusters(&self) -> Later<'_, Vec<Cluster>>;

    /// The record, as it is now.
    fn read<'a>(&'a self, cluster: &'a Cluster) -> Later<'a, Known>;

    /// Changes the record if it is still the one of that revision. One of a cluster that has [ended](Record::ended) stays.
    fn change<'a>(
        &'a self,
        cluster: &'a Cluster,
        from: Revision,
        to: &'a Record,
    ) -> Later<'a, Changed>;

    /// Asks for a lease, or for it to last longer.
    fn lease<'a>(&'a self, cluster: &'a Cluster, host: Host) -> Later<'a, Leased>;

    /// The record and the leases that are not over.
    fn view<'a>(&'a self, cluster: &'a Cluster) -> Later<'a, View>;

    /// Asks that the host of that name may lead, or go on leading; tells which one does. Who leads runs the controllers. That two believe it
    /// for a while does no harm.
    fn lead<'a>(&'a self, name: &'a str) -> Later<'a, String>;

    /// Who leads, if anybody does.
    fn leader(&self) -> Later<'_, Option<String>>;
}
