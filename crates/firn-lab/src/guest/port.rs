//! Ports of the host.

use std::io;
use std::net::TcpListener;

/// A TCP port of the loopback interface nobody listens on now. Somebody may before it is used: who gets it should be
/// ready to ask again.
pub fn free_tcp_port() -> io::Result<u16> {
    Ok(TcpListener::bind("127.0.0.1:0")?.local_addr()?.port())
}
