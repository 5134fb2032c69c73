//! TCP ports of the host.

use std::io;
use std::net::TcpListener;

/// A TCP port of the loopback interface on which no process listens now. Another process may use it
/// before the caller does, so the caller should be ready to request one again.
pub fn free_tcp_port() -> io::Result<u16> {
    Ok(TcpListener::bind("127.0.0.1:0")?.local_addr()?.port())
}
