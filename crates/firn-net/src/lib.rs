//! A VM's network card in user space, whose output can be held back (Lu, Ravindran, Kim, "VPC: Scalable, Low Downtime Checkpointing for
//! Virtual Clusters", IV: output commit).
//!
//! ```text
//!   QEMU                        supervisor                                           outside
//!     virtio-net                  Port                                                 passt, a switch, ...
//!       |  -netdev dgram            |                                                    |
//!       |===== pair of sockets =====|---- Gate: open, or held until committed ---------->|   stream: length, frame
//!       |  a datagram is a frame    |<---------------------------------------------------|
//!       |
//!       '-- has the other end open too: a successor copies it from there
//! ```
//!
//! What is held, and until when, is the outbox of `firn-cluster` (`output`); the stream's framing is that of its `switch`. Here is
//! one VM's use of them, and the sockets.
//!
//! | module | what it decides or does |
//! |---|---|
//! | [`gate`] | which frames may leave, and when (pure) |
//! | [`lease`] | until when anything may leave |
//! | [`joined`] | the same of a VM that belongs to a cluster (pure) |
//! | [`port`] | a card, its gate and its uplink: a thread |
//! | [`uplink`] | the connection to where frames go |
//!
//! # Why a pair of sockets that QEMU has both ends of
//!
//! A socket with a name would do as well, but QEMU does not connect to it (`net/dgram.c`, 7.2 to 10): while the other side has no room,
//! it is told that it can write, tries, and is told again, with its main loop spinning. Over a pair it waits. And the pair is there as
//! long as QEMU is: without a supervisor the guest's frames wait, and its successor reads on where it ended.
//!
//! # The bound
//!
//! What is held takes no more than [`port::BYTES_MAX`] and one frame. At the bound the card's socket isn't read until half of it is
//! free: QEMU waits, then the guest's ring fills, and the guest sees a slow network. Nothing is dropped for it. A VM that is about to be
//! stopped may send a little more, for QEMU drops what still waits for room then.
//!
//! # What is lost
//!
//! Frames that leave while nobody is at the uplink, as with a cable that is unplugged; what is held when the supervisor dies. Frames
//! may be lost in any network, and who needs them sends them again.

#![forbid(unsafe_code)]

pub mod gate;
pub mod joined;
pub mod lease;
pub mod port;
pub mod uplink;
mod way;
