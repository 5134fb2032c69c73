//! Both kinds of membership, under the same faults.

#![expect(clippy::unwrap_used, clippy::panic, reason = "a test that cannot go on fails")]

mod changes;
mod etcd_tls;
mod failover;
mod leases;
mod process;
mod refusals;
mod room;
mod servers;
mod site;
mod wire;
