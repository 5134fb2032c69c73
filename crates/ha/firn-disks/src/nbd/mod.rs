//! NBD server: serves disks to QEMU by the Network Block Device protocol, on a Unix socket.
//!
//! ```text
//!   client                                    server
//!     | <----------- magic, flags ------------- |
//!     | ------------ flags -------------------> |   handshake: "fixed newstyle"
//!     | ------------ option, data ------------> |
//!     | <----------- reply, ... --------------- |   until GO or EXPORT_NAME has chosen a disk
//!     | ------------ request, data -----------> |
//!     | ------------ request, data -----------> |   transmission: each of a few threads takes a
//!     | <----------- reply, data -------------- |   request, executes it and replies, in any order
//!     | ------------ DISC --------------------> |
//! ```
//!
//! Source: `doc/proto.md` of the NBD project. Firn sends simple replies only: QEMU reads as fast
//! with them, and the additional information that structured replies offer (where holes are) is not
//! requested by a guest.
//!
//! | module | |
//! |---|---|
//! | [`handshake`] | options and their replies (pure) |
//! | [`request`] | requests and what is wrong with them (pure) |
//! | `connection` | the connection of one client |
//! | [`server`] | all connections; takes over from a server that was killed |
//!
//! # Trust
//!
//! Only the owner of the socket can use it. Still the server trusts no client: lengths have bounds,
//! and no memory is allocated before its bytes have arrived. An invalid request gets an error as
//! its reply. If the start of the next request is unknown, the connection ends. The server
//! continues.
//!
//! # Death of the server
//!
//! Acknowledged writes are in the file, so in the kernel: they survive a kill of the process. QEMU
//! (`reconnect-delay`) connects again and repeats unacknowledged requests. Repeating one that had
//! been executed changes nothing. The log of the running epoch is lost: the VM has to be protected
//! anew.

mod connection;
pub mod handshake;
pub mod request;
pub mod server;

pub use server::{NbdExports, NbdServer, ServerError};
