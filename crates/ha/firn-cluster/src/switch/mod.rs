//! Virtual network: a learning Ethernet switch, and the framing of QEMU's `-netdev stream` (VPC
//! IV).
//!
//! ```text
//!   VM --- socket --- FrameDecoder --- Switch::route_frame(port, frame) --> ports
//!                                                              |  VM      its socket
//!     each agent has one switch                                |  peer    another agent's link
//!                                                              |  uplink  a tap or user-mode net
//! ```
//!
//! The switch decides where a frame goes when its VM sends it; [`crate::output`] decides when. It
//! takes the location of an address from the newest frame that had it as its source, so that a VM
//! that moved is found by its first frame or by its [`announcement_frame`]. VLAN tags are carried
//! unchanged and not evaluated.
//!
//! # No frame circulates
//!
//! Every two hosts are linked, and hosts may have uplinks to the same outside network. So a frame
//! is never passed on from one link to another, from a link to the uplink, or back: each of these
//! destinations receives it, or has received it, directly.
//!
//! ```text
//!          a VM of a sends a broadcast frame
//!      a =======================> b --> VMs of b        b sends it neither to c nor to its uplink
//!      | \\=====================> c --> VMs of c
//!      '--> uplink of a --> outside --> uplink of b     b knows the address behind a: dropped
//! ```
//!
//! The last is [`SwitchRules::cluster_age_max`]: an address that was seen inside the cluster a
//! moment ago isn't accepted from outside.
//!
//! Frames of a VM are not trusted: short frames are dropped, group addresses are never learned, the
//! number of addresses learned from a port is bounded, and the table as a whole is bounded.

mod mac;
mod stream;
mod table;

pub use mac::{MacAddress, announcement_frame};
pub use stream::{FRAME_BYTES_MAX, FrameDecoder, FrameStreamError, length_prefix};
pub use table::{PortSide, Switch, SwitchPort, SwitchRules};

#[cfg(test)]
mod tests;
