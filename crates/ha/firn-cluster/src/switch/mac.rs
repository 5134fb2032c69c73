//! MAC address: an Ethernet address, and the frame that announces it.

use std::fmt;

use serde::{Deserialize, Serialize};

/// The bytes of a frame before its payload: destination, source, type.
pub(super) const HEADER_BYTES: usize = 14;

/// An Ethernet address.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct MacAddress(pub [u8; 6]);

impl MacAddress {
    /// The broadcast address.
    pub const BROADCAST: Self = Self([0xff; 6]);

    /// Whether it is a multicast or broadcast address.
    pub fn is_group(self) -> bool {
        self.0[0] & 1 == 1
    }

    /// The destination and source addresses of a frame; `None` if it is too short.
    pub fn frame_addresses(frame: &[u8]) -> Option<(Self, Self)> {
        let header = frame.get(..HEADER_BYTES)?;
        let (to, from) = (header.first_chunk::<6>()?, header[6..].first_chunk::<6>()?);
        Some((Self(*to), Self(*from)))
    }
}

impl fmt::Debug for MacAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [a, b, c, d, e, g] = self.0;
        write!(f, "{a:02x}:{b:02x}:{c:02x}:{d:02x}:{e:02x}:{g:02x}")
    }
}

/// A frame that informs every switch of the location of an address after a failover: a broadcast
/// reverse ARP request (RFC 903) from it. It needs no IP address, which the agent doesn't know.
pub fn announcement_frame(mac: MacAddress) -> [u8; 60] {
    // Ethernet: type RARP. Hardware Ethernet, protocol IPv4, their lengths, operation 3 (reverse
    // request).
    const FIXED: [u8; 10] = [0x80, 0x35, 0x00, 0x01, 0x08, 0x00, 6, 4, 0x00, 0x03];
    let mut frame = [0; 60];
    frame[..6].copy_from_slice(&MacAddress::BROADCAST.0);
    frame[6..12].copy_from_slice(&mac.0);
    frame[12..22].copy_from_slice(&FIXED);
    frame[22..28].copy_from_slice(&mac.0);
    frame[32..38].copy_from_slice(&mac.0);
    frame
}
