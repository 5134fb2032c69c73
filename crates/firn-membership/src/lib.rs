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
mod control;
pub mod embedded;
pub mod etcd;
mod members;
mod post;
mod record;
mod words;

pub use clock::now;
pub use control::control;
pub use embedded::Embedded;
pub use etcd::Etcd;
pub use members::{Later, Members};
pub use post::{Hosts, Post, Start};
pub use record::{RECORD_BYTES_MAX, Record};
pub use words::{Changed, Cluster, Known, Leased, Revision, Trouble, View};
