//! The virtual network: a learning Ethernet switch, and the framing of QEMU's `-netdev stream` (VPC IV).
//!
//! ```text
//!   VM --- socket --- Decoder --- Switch::arrived(port, frame) --> ports       each agent has one switch
//!                                                                  |  VM      its socket, or another agent's link
//!                                                                  |  uplink  a tap or user-mode network
//! ```
//!
//! The switch decides where a frame goes when its VM sends it; [`crate::output`] decides when. It knows an address
//! from the newest frame that had it as its source, so that a VM that moved is found by its first frame or by its
//! [`announcement`]. VLAN tags are carried as they are and not looked at.
//!
//! # No frame goes round
//!
//! Every two hosts are linked, and hosts may have uplinks to the same network outside. So a frame is never passed on from one link
//! to another, from a link to the uplink, or back: it has come, or comes, by itself to where that would bring it.
//!
//! ```text
//!          a VM of a sends to everybody
//!      a =======================> b --> VMs of b          b sends it neither to c nor to its uplink
//!      | \\=====================> c --> VMs of c
//!      '--> uplink of a ---> the world ---> uplink of b    b knows the address behind a: dropped
//! ```
//!
//! The last is [`Rules::ours_for`]: what was heard of inside the cluster a moment ago isn't believed to be outside.
//!
//! What comes from a VM is garbage until proven otherwise: short frames are dropped, group addresses are never learned,
//! each port may teach a bounded number of addresses, and the table as a whole is bounded.

mod mac;
mod stream;
mod table;

pub use mac::{Mac, announcement};
pub use stream::{Decoder, FRAME_BYTES_MAX, StreamError, head};
pub use table::{Port, Rules, Side, Switch};

#[cfg(test)]
mod tests;
