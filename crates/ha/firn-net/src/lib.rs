//! Network card backend: a VM's network card in user space, whose output can be buffered (Lu,
//! Ravindran, Kim, "VPC: Scalable, Low Downtime Checkpointing for Virtual Clusters", IV: output
//! commit).
//!
//! ```text
//!   QEMU                      supervisor                                   outside
//!     virtio-net                NicPort                                      passt, a switch, ...
//!      |  -netdev dgram           |                                            |
//!      |==== pair of sockets =====|-- OutputBuffer: open, or until committed ->| stream: length,
//!      |  a datagram is a frame   |<-------------------------------------------| frame
//!      |
//!      '-- has the other end open too: a successor copies it from there
//! ```
//!
//! The outbox of `firn-cluster` (`output`) decides what is buffered, and until when. The framing of
//! the stream is that of its `switch`. This crate applies them to one VM, and has the sockets.
//!
//! | module | what it decides or does |
//! |---|---|
//! | [`output_buffer`] | decides which frames may leave, and when (pure) |
//! | [`lease`] | the time until which any frame may leave |
//! | [`cluster_output`] | the same as `output_buffer`, for a VM that belongs to a cluster (pure) |
//! | [`port`] | a card, its output buffer and its uplink: a thread |
//! | [`uplink`] | the connection to the outside |
//!
//! # Why QEMU has both ends of a pair of sockets
//!
//! A socket with a name would do as well, but QEMU does not connect to it (`net/dgram.c`, 7.2 to
//! 10): while the receiver has no room, poll reports to QEMU that the socket is writable, QEMU
//! tries to write, and its main loop spins. With a pair of sockets, QEMU waits. And the pair exists
//! as long as QEMU does: without a supervisor the guest's frames wait in it, and the next
//! supervisor continues to read at the same frame.
//!
//! # The bound
//!
//! Buffered frames take at most [`port::BYTES_MAX`] and one frame. At the bound the card's socket
//! isn't read until half of the buffer is free: QEMU waits, then the guest's ring fills, and the
//! guest sees a slow network. No frame is dropped for this reason. A VM that is about to be paused
//! may send a little more, because QEMU then drops frames that still wait for room.
//!
//! # Lost frames
//!
//! Frames are lost that leave while no process listens at the uplink, as with a cable that is
//! unplugged, and so are buffered frames when the supervisor dies. Any network may lose frames, and
//! protocols that need them send them again.

#![forbid(unsafe_code)]

mod card_socket;
pub mod cluster_output;
pub mod lease;
pub mod output_buffer;
mod output_policy;
pub mod port;
pub mod uplink;
