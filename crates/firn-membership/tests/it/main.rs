//! Both kinds of membership, broken in the same ways.

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
