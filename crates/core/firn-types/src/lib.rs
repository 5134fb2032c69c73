//! The basic types of Firn: pages, memory blocks, addresses, thread and vCPU numbers, RAM regions, and the
//! limit that a user sets to the bandwidth of a save or restore.
//!
//! Every other crate describes guest memory with these types, so that a page number is never
//! mistaken for an address, and a host address never for a guest address. Nothing here does I/O.
//!
//! ```text
//!   guest-physical      0        2 GiB      4 GiB    6 GiB
//!                       |--ram---|  (holes)  |--ram---|
//!                           \                   /
//!   RAM pages               0 ..... 524287 .... 1048575        one dense space over all RAM regions
//!   memory blocks           0 ..... 262143 .... 524287         two pages each by default
//! ```
//!
//! A *RAM region* is one backend of the hypervisor (a `memory-backend-*` object). Regions follow
//! one another in the RAM page space; each starts at a multiple of [`REGION_ALIGN`] pages so that
//! no memory block spans two of them.

mod address;
mod bandwidth_limit;
mod block;
mod region;
mod text;

pub use address::{GuestPhys, HostVirt, PAGE_SIZE, Page, ThreadId, VcpuId};
pub use bandwidth_limit::BandwidthLimit;
pub use block::{Block, BlockSize, BlockSizeError};
pub use region::{GuestSpan, REGION_ALIGN, RamRegion, RegionMap, RegionMapError};
pub use text::{is_shown, make_printable, make_printable_lines};
