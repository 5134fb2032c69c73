//! The agent: one process per host, which detects failed hosts and carries the epochs of protected
//! VMs between hosts.
//!
//! ```text
//!   host a                                                                 host b
//!     firn protect web --backup b
//!       | agent.sock
//!       v
//!     agent "a" <================ TLS, both sides show a certificate ================> agent "b"
//!       |           heartbeats; "start a standby of web", then its epochs                  |
//!       v                                                                                v
//!     supervisor of web --- epochs, by a unix socket                 supervisor of the standby web
//! ```
//!
//! An agent holds no memory of a VM and decides nothing about one: it may be killed at any moment.
//! The VMs continue, unprotected from then on, and a standby keeps its state, for a later failover.
//!
//! | module | task |
//! |---|---|
//! | [`config`] | the configuration file |
//! | [`detect`] | which hosts are alive (pure) |
//! | [`metrics`] | metrics for Prometheus (pure) |
//! | [`page`] | what a browser shows of hosts and VMs |
//! | [`takeovers`] | counts failovers to this host (pure) |
//! | [`history`] | pauses and lags of the last minutes (pure) |
//! | [`identity`] | certificates: which hosts may connect |
//! | [`membership`] | this host's part in membership: records and leases |
//! | [`tunnel`] | carries a stream of epochs |
//! | [`switch`] | the network between VMs |
//! | `clusters` | failover: a VM alone, or VMs that are checkpointed and fail over as one |
//! | [`vms`] | the VMs of this host |
//! | `sockets` | locks the agent's directory, and listens at sockets in it |
//!
//! `clusters` reconciles the VMs of this host with their records. The other modules serve:
//! `peer_server` the peers, `command_server` the commands. `protect` and `standbys` are the two
//! ends of a tunnel, and `heartbeat` is the shell around [`detect`]. `watch` observes VMs and hosts
//! for metrics. What commands share with the
//! agent is in [`firn_control`]: the protocol, its client, and the paths of sockets and files. The
//! design is in `docs/design/012-agent.md`.

#![forbid(unsafe_code)]

mod agent;
mod agent_process;
mod clusters;
mod command_server;
pub mod config;
pub mod detect;
mod heartbeat;
pub mod history;
mod http;
pub mod identity;
pub mod membership;
pub mod metrics;
mod moves;
mod observations;
pub mod page;
mod peer_connection;
mod peer_monitor;
mod peer_server;
mod protect;
mod rejections;
mod replies;
mod sockets;
mod standbys;
mod status;
pub mod switch;
pub mod takeovers;
pub mod tunnel;
pub mod vms;
mod watch;

pub use agent::Agent;
pub use agent_process::PreparedAgent;
pub use config::AgentConfig;
pub use detect::DetectorTiming;
pub use identity::HostIdentity;
pub use membership::MembershipHealth;
pub use vms::{LocalVms, SupervisedVms};
