//! Parsers of the human monitor's output, which treat it as untrusted input.
//!
//! Some facts have no QMP command in 7.2: what guest-physical addresses map to, the addresses of
//! RAM in the hypervisor's own address space, the contents of control registers. The human monitor
//! prints them. Its formats have been stable over the versions that Firn supports, and a parser
//! skips a line that does not have the expected form rather than guess. The callers check that the
//! facts they need are there.

mod hva;
mod mtree;
mod network;
mod network_backends;
mod network_cards;
mod ramblock;
mod registers;
mod user_connections;

pub use hva::parse_hva;
pub use mtree::{FlatRange, FlatView, RangeKind, parse_mtree};
pub use network::parse_card_address;
pub use network_backends::parse_backends;
pub use network_cards::{ConnectedCard, parse_connected_cards};
pub use ramblock::{RamBlock, parse_ramblock};
pub use registers::{VcpuRegisters, parse_registers};
pub use user_connections::{UserConnection, parse_user_connections};

/// Parses a hexadecimal number with or without `0x`.
fn parse_hex(text: &str) -> Option<u64> {
    let digits = text.strip_prefix("0x").unwrap_or(text);
    u64::from_str_radix(digits, 16).ok().filter(|_| !digits.starts_with('+'))
}
