//! The interface to the store of records and leases, for all implementations.

use std::future::Future;
use std::pin::Pin;

use firn_cluster::{Generation, HostId};

use crate::{
    ChangeResult, ClusterName, ClusterRecord, LeaseResult, MembershipError, RecordView, Revision,
    VersionedRecord,
};

/// An answer that arrives later, or an error.
pub type MembershipFuture<'a, T> =
    Pin<Box<dyn Future<Output = Result<T, MembershipError>> + Send + 'a>>;

/// The store in which the hosts of clusters agree. Every answer takes a few seconds at most, or is
/// a [`MembershipError`].
pub trait MembershipStore: Send + Sync + 'static {
    /// Returns a number for the agent of the host of that name, which no agent had before. Each
    /// start of an agent is another host.
    fn join_host<'a>(&'a self, name: &'a str) -> MembershipFuture<'a, HostId>;

    /// Lists the clusters that have records.
    fn list_clusters(&self) -> MembershipFuture<'_, Vec<ClusterName>>;

    /// Reads the current record.
    fn read_record<'a>(&'a self, cluster: &'a ClusterName)
    -> MembershipFuture<'a, VersionedRecord>;

    /// Changes the record if it still has that revision. The record of a cluster that has
    /// [ended](ClusterRecord::to_ended) stays.
    fn change_record<'a>(
        &'a self,
        cluster: &'a ClusterName,
        from: Revision,
        to: &'a ClusterRecord,
    ) -> MembershipFuture<'a, ChangeResult>;

    /// Requests a lease, or its extension.
    fn request_lease<'a>(
        &'a self,
        cluster: &'a ClusterName,
        host: HostId,
    ) -> MembershipFuture<'a, LeaseResult>;

    /// Reports that a host has given up its lease: it sends nothing in this generation any more, and
    /// requests no lease in it. Without this report its lease expires. A store may ignore it.
    fn report_lease_given_up<'a>(
        &'a self,
        _cluster: &'a ClusterName,
        _host: HostId,
        _generation: Generation,
    ) -> MembershipFuture<'a, ()> {
        Box::pin(async { Ok(()) })
    }

    /// Reads the record and the leases that have not expired.
    fn read_view<'a>(&'a self, cluster: &'a ClusterName) -> MembershipFuture<'a, RecordView>;

    /// Requests leadership for the host of that name, or its extension; returns the name of the
    /// leading host. The leading host runs the controllers. Two hosts may believe for a while that
    /// they lead: that does no harm.
    fn request_leadership<'a>(&'a self, name: &'a str) -> MembershipFuture<'a, String>;

    /// The name of the leading host, if there is one.
    fn current_leader(&self) -> MembershipFuture<'_, Option<String>>;
}
