//! What the hosts of a cluster agree on, and until when each may send: the shell that `firn_cluster::failover` needs.
//!
//! ```text
//!      host 1                  host 2                  host 3
//!      Guard                   Guard                   Guard          + where one leads: Controller
//!        |  lease: may I send?   |                       |                 |  view, change
//!        v                       v                       v                 v
//!   +--------------------------------------------------------------------------------+
//!   |  Members:  a record for each cluster, changed by compare-and-swap; leases; who leads  |
//!   +------------------------------------+-------------------------------------------+
//!   |  Embedded: raft between the agents  |  Etcd: the user's servers                  |
//!   +------------------------------------+-------------------------------------------+
//! ```
//!
//! Both keep the same promises, and the same tests break both (`tests/it`):
//!
//! 1. A record changes only from the revision that the change names. A change without an answer was made once, or never.
//! 2. What is read is what was newest when it was asked for, or newer.
//! 3. A lease is granted to no host that the record fences, and a record that fences a host is followed by no
//!    grant to it.
//! 4. [`View::leases`] has every host whose lease was granted less than the terms ago, at the moment at which the record was
//!    what the view says. So where a view's record fences a host and its leases don't have it, the host can't send.
//!
//! The fourth is the one that matters: a host is taken out of the fence by a view, not by anything that was known
//! before the fence was written.

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
