//! Serving disks to QEMU by the Network Block Device protocol, on a Unix socket.
//!
//! ```text
//!   client                                    server
//!     | <----------- magic, flags ------------- |
//!     | ------------ flags -------------------> |   handshake: "fixed newstyle"
//!     | ------------ option, data ------------> |
//!     | <----------- reply, ... --------------- |   until GO or EXPORT_NAME has chosen a disk
//!     | ------------ request, data -----------> |
//!     | ------------ request, data -----------> |   transmission: a few threads, each takes a request, carries it out, answers
//!     | <----------- reply, data -------------- |   in whatever order they are done
//!     | ------------ DISC --------------------> |
//! ```
//!
//! Source: `doc/proto.md` of the NBD project. Simple replies only: QEMU reads as fast, and what it could ask for besides (where holes are)
//! a guest does not ask for.
//!
//! | module | |
//! |---|---|
//! | [`handshake`] | options and their replies (pure) |
//! | [`request`] | requests and what is wrong with them (pure) |
//! | `connection` | a client |
//! | [`server`] | all of them; taking over from a server that was killed |
//!
//! # Who may be on the other side
//!
//! The socket is for its owner alone. Still nothing a client says is believed: lengths have bounds, and no memory is taken before
//! its bytes are there. What makes no sense is answered with an error, or ends the connection if nobody could say where the next request
//! begins. The server goes on.
//!
//! # Death
//!
//! What was answered is in the file, so in the kernel: it is there when the process is killed. QEMU (`reconnect-delay`) connects again and
//! repeats what was not answered, which changes nothing if it had been done. The log of the running epoch is gone: the VM has to
//! be protected anew.

mod connection;
pub mod handshake;
pub mod request;
pub mod server;

pub use server::{Exports, Server, ServerError};
