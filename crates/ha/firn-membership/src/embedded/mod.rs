//! Membership without another system: raft between the agents.
//!
//! ```text
//!   any host                                  the server that leads            the other servers
//!     EmbeddedStore --- StoreRequest -------> RaftServer ----- raft ---------> RaftServer
//!       ^                                       | store: log and vote, on disk   | store
//!       '-- StoreResponse, or Elsewhere --------' state: records, hosts          | state
//!                                                 lease_table: leases, in memory
//!
//!     each message by a MessageTransport
//! ```
//!
//! Three hosts or more are servers; any host may send requests. With a majority of the servers,
//! records can be read and changed, and leases be granted. Without one, nothing can: VMs whose
//! leases expire continue to run, but their output is blocked, and nothing fails over. Of two hosts
//! none is a majority, so two are refused ([`bootstrap_server`]).
//!
//! Leases are not in the log (`lease_table`): a new leader counts all of them from the start of its
//! own term.

#![expect(
    clippy::result_large_err,
    reason = "those of raft and redb are, and only failures cost it"
)]

mod bootstrap_ids;
mod embedded_store;
mod lease_table;
mod log_store;
mod message;
mod network;
mod running_raft;
mod server;
mod state;
mod state_machine;
mod transport;
mod types;

pub use self::embedded_store::EmbeddedStore;
pub use self::server::{RaftServer, bootstrap_server};
pub use self::transport::MessageTransport;
