//! One process per host that knows which other hosts are there, and carries the epochs of protected VMs between them.
//!
//! ```text
//!   host a                                                                 host b
//!     firn protect web --backup b
//!       | agent.sock
//!       v
//!     agent "a" <================ TLS, both sides show a certificate ================> agent "b"
//!       |           heartbeats; "stand by for web", then its epochs                      |
//!       v                                                                                v
//!     supervisor of web --- epochs, by a unix socket                  supervisor of the standby web
//! ```
//!
//! An agent holds no memory of a VM and decides nothing about one: it may be killed at any moment. The VMs run on, unprotected from
//! then on, and a standby keeps what it has, for whoever fails over to it.
//!
//! | module | what it decides or does |
//! |---|---|
//! | [`config`] | the configuration file |
//! | [`detect`] | which hosts are there (pure) |
//! | [`metrics`] | numbers for Prometheus (pure) |
//! | [`identity`] | certificates: who is let in |
//! | [`membership`] | what hosts agree on: this host's part of it |
//! | [`api`] | what agents and commands say to each other |
//! | [`client`] | how commands reach the agent |
//! | [`tunnel`] | carrying a stream of epochs |
//! | [`switch`] | the network between VMs |
//! | [`together`] | clusters: VMs that are marked and fail over together |
//! | [`vms`] | the VMs of this host |
//! | [`place`] | where the sockets are |
//!
//! `failover` has the VMs of this host obey what hosts agree on. The rest serves: `door` the peers, `local` the commands; `protect` and `standbys` are the two ends of a tunnel, `heartbeat` is the
//! shell around [`detect`]. The design is in `docs/design/012-agent.md`.

#![forbid(unsafe_code)]

mod agent;
pub mod api;
pub mod client;
mod cluster;
pub mod config;
pub mod detect;
mod door;
mod failover;
mod heartbeat;
pub mod host;
mod http;
pub mod identity;
mod link;
mod local;
pub mod membership;
pub mod metrics;
pub mod place;
mod protect;
mod refused;
mod standbys;
pub mod switch;
pub mod together;
pub mod tunnel;
pub mod vms;

pub use agent::{Agent, Ready};
pub use config::Config;
pub use detect::Times;
pub use host::HostName;
pub use identity::Identity;
pub use place::Place;
pub use vms::{Supervised, Vms};
