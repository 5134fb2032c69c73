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
//! What comes from a VM is garbage until proven otherwise: short frames are dropped, group addresses are never learned,
//! each port may teach a bounded number of addresses, and the table as a whole is bounded.

mod mac;
mod stream;
mod table;

pub use mac::{Mac, announcement};
pub use stream::{Decoder, FRAME_BYTES_MAX, StreamError, head};
pub use table::{Port, Rules, Switch};

#[cfg(test)]
mod tests;
