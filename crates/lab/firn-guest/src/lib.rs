//! The programs of Firn's test guests, and the formats that the host side shares with them.
//!
//! A checkpoint is exact when the guest itself cannot detect that it was restored. The programs
//! here make a guest that would detect it: every page and every disk sector they write describes
//! itself, so that a torn, old or lost one is found by a check, from inside the guest ([`writers`],
//! [`disk`]) and from outside, in an image or in a copy of guest memory ([`stamp`]).
//!
//! ```text
//!   host                                        guest
//!   Control --- unix socket === virtio port --- firn-guest agent --- firn-guest writers
//!                                                               \--- redis-server, pgbench, make ...
//!   Prober  --- unix socket === virtio port --- firn-guest heartbeat
//! ```
//!
//! The library part has the formats that both sides share: [`stamp`] and [`protocol`]. Everything
//! is one static binary, `firn-guest VERB`, with one module per verb.

#![forbid(unsafe_code)]

pub mod agent;
pub mod arena;
pub mod bank;
pub mod disk;
pub mod heartbeat;
pub mod ledger;
pub mod lines;
pub mod mem_report;
pub mod net;
pub mod npb;
pub mod port;
pub mod programs;
pub mod protocol;
pub mod rate_limiter;
pub mod ring;
pub mod sha;
pub mod stamp;
pub mod threads;
pub mod transactions;
pub mod walkers;
pub mod writers;
