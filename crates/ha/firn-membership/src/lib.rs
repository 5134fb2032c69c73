//! Membership: the records that the hosts of clusters agree on, and leases, which limit until when
//! a host may send. It is the shell around `firn_cluster::failover`.
//!
//! ```text
//!      host 1                  host 2                  host 3
//!      HostGuard               HostGuard               HostGuard   + where one leads:
//!        |  lease: may I send?   |                       |           FailoverController
//!        |                       |                       |                 |  read_view,
//!        v                       v                       v                 v  change_record
//!   +----------------------------------------------------------------------------------+
//!   |  MembershipStore:  a record for each cluster, changed by compare-and-swap;       |
//!   |                    leases; the leader                                            |
//!   +--------------------------------------+-------------------------------------------+
//!   |  EmbeddedStore: raft between agents  |  EtcdStore: the user's servers            |
//!   +--------------------------------------+-------------------------------------------+
//! ```
//!
//! Both stores give the same guarantees, and the same tests cover both (`tests/it`):
//!
//! 1. A record changes only from the revision that the change names. A change without an answer was
//!    made once, or never.
//! 2. A read returns the record that was newest when it was requested, or a newer one.
//! 3. A lease is granted to no host that the record fences, and a record that fences a host is
//!    followed by no grant to it.
//! 4. [`RecordView::leases`] has every host whose lease was granted less than the terms ago, at the
//!    moment at which the record was as in the view. So if a view's record fences a host and its
//!    leases don't have it, the host can't send.
//!
//! The fourth guarantee is the essential one: a host is removed from the fence because of a view,
//! not because of anything that was known before the fence was written.

#![forbid(unsafe_code)]

mod clock;
mod cluster_member;
mod controller;
pub mod embedded;
pub mod etcd;
mod membership_store;
mod record;
mod timing;
mod types;

pub use clock::read_boot_clock;
pub use cluster_member::{ClusterMember, HostActions, StartRequest};
pub use controller::run_controllers;
pub use embedded::EmbeddedStore;
pub use etcd::EtcdStore;
pub use membership_store::{MembershipFuture, MembershipStore};
pub use record::{ClusterRecord, RECORD_BYTES_MAX};
pub use timing::{AgentEvidence, FailoverTiming, NoEvidence, STALL_MAX};
pub use types::{
    ChangeResult, ClusterName, LeaseResult, MembershipError, RecordView, Revision, VersionedRecord,
};
