//! The network between VMs: a learning Ethernet switch per network and host.
//!
//! ```text
//!     VM  VM  VM                                                          VM  VM
//!      |   |   |   .network/lan.sock: QEMU's stream framing                |   |
//!      v   v   v                                                           v   v
//!    +-----------+        firn-frames: a TLS connection of its own       +-----------+
//!    |  lan at a |=======================================================|  lan at b |
//!    +-----------+                                                       +-----------+
//!      |       \\=================== to each other host =============          |
//!      '--- uplink of a: passt's socket, or a tap                             '--- uplink of b
//! ```
//!
//! `firn-cluster` (`switch`) decides where a frame goes. The socket accepts VMs: the network cards
//! of `firn-net`, or QEMU's own `-netdev stream`. `firn-net` decides when a frame may leave a
//! protected VM: a frame that arrives here is forwarded at once.
//!
//! | module | task |
//! |---|---|
//! | `config` | the networks of a configuration |
//! | `network` | the ports of a network, and where a frame goes |
//! | `queue` | frames that wait for a port, and which are dropped |
//! | `counters` | counters of frames |
//! | `suspend_detector` | whether frames lay here while this agent did not run |
//! | `switches` | the switches of this host |
//! | `serve` | the tasks of all networks |
//! | `carry` | frames between a stream and a port |
//! | `vms`, `links`, `uplink` | the ports: VMs of this host, other hosts, the uplink |
//!
//! # Dropped frames
//!
//! A switch never waits: one receiver that is slow would block all senders. Each port has a queue
//! of 4 MiB (`queue`). A frame that has no room in it is dropped and counted, and so are the frames
//! that wait when the port ends. Ethernet behaves like that. No other frame is lost, and none is
//! delivered twice.
//!
//! The design is in `docs/design/014-switch.md`.

mod carry;
pub(crate) mod config;
mod counters;
pub(crate) mod links;
mod network;
mod queue;
pub(crate) mod serve;
mod suspend_detector;
pub(crate) mod switches;
mod uplink;
mod vms;

pub use config::{NetworkConfig, NetworkError, Uplink};
pub use counters::LinkTarget;
