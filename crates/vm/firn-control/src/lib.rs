//! What the commands of `firn` and the agent share: the protocol between them, the client of that
//! protocol, and the paths where they meet.
//!
//! ```text
//!   firn protect, firn cluster ...               firn-agent
//!      |                                            |
//!    client -- api, by http_client --> agent.sock --'--- api, by http_client, in TLS ---> peers
//!                                      (paths)
//! ```
//!
//! It is a crate of its own so that commands are built without the agent: without the store that
//! hosts agree by, and without the protobuf compiler that this store needs (`firn-membership`).
//! `scripts/check-dependencies` checks that.
//!
//! | module | task |
//! |---|---|
//! | [`api`] | the protocol of agents and commands |
//! | [`client`] | requests of commands to the agent |
//! | [`http_client`] | HTTP requests to an agent, and its answers |
//! | [`paths`] | the paths of sockets and files |
//! | [`usage`] | wrong command lines, as failures like all others |
//!
//! The types [`HostName`], [`HostHealth`] and [`StoredCluster`] are parts of the protocol.

#![forbid(unsafe_code)]

pub mod api;
pub mod client;
mod health;
mod host;
pub mod http_client;
pub mod paths;
mod stored_cluster;
pub mod usage;

pub use health::HostHealth;
pub use host::{HostName, HostNameError};
pub use paths::AgentPaths;
pub use stored_cluster::{ClusterState, ClusterVm, StoredCluster};
