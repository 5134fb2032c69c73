//! What QEMU's human monitor prints, read without trusting it.
//!
//! Some facts have no QMP command in 7.2: where guest-physical addresses lead, where RAM lies in the hypervisor's own
//! address space, what the control registers hold. The human monitor prints them; its formats have been stable over
//! the versions Firn supports, and a line that does not look as expected is left out rather than guessed at. The
//! callers check that what they need is there.

mod hva;
mod mtree;
mod network;
mod network_backends;
mod ramblock;
mod registers;

pub use hva::parse_hva;
pub use mtree::{FlatRange, FlatView, RangeKind, parse_mtree};
pub use network::parse_address;
pub use network_backends::parse_backends;
pub use ramblock::{RamBlock, parse_ramblock};
pub use registers::{VcpuRegisters, parse_registers};

/// A hexadecimal number with or without `0x`.
fn hex(text: &str) -> Option<u64> {
    let digits = text.strip_prefix("0x").unwrap_or(text);
    u64::from_str_radix(digits, 16).ok().filter(|_| !digits.starts_with('+'))
}
