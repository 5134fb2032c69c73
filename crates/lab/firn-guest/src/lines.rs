//! A TCP connection that transfers lines of JSON in both directions.

use std::io::{self, BufRead as _, BufReader, Read as _, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

use serde::Serialize;
use serde::de::DeserializeOwned;

/// Maximum length of a line, in bytes.
const LINE_BYTES_MAX: u64 = 4 << 20;
/// Timeout for the peer's replies, on the side that connects.
const PEER_TIMEOUT: Duration = Duration::from_secs(10);

/// A TCP connection with lines of JSON.
#[derive(Debug)]
pub struct JsonLines(BufReader<TcpStream>);

impl JsonLines {
    /// Uses an open connection.
    pub fn new(stream: TcpStream) -> io::Result<Self> {
        stream.set_nodelay(true)?;
        Ok(Self(BufReader::new(stream)))
    }

    /// Opens a connection.
    pub fn connect(to: SocketAddr) -> io::Result<Self> {
        Self::connect_within(to, PEER_TIMEOUT)
    }

    /// The same with another timeout, which also applies to later reads and writes.
    pub fn connect_within(to: SocketAddr, patience: Duration) -> io::Result<Self> {
        let stream = TcpStream::connect_timeout(&to, patience)?;
        stream.set_read_timeout(Some(patience))?;
        stream.set_write_timeout(Some(patience))?;
        Self::new(stream)
    }

    /// Sends a line.
    pub fn send_line(&mut self, what: &impl Serialize) -> io::Result<()> {
        let mut line = serde_json::to_vec(what)?;
        line.push(b'\n');
        self.0.get_mut().write_all(&line)
    }

    /// Waits for a line.
    pub fn receive_line<T: DeserializeOwned>(&mut self) -> io::Result<T> {
        let mut line = Vec::new();
        self.0.by_ref().take(LINE_BYTES_MAX).read_until(b'\n', &mut line)?;
        if !line.ends_with(b"\n") {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        Ok(serde_json::from_slice(&line)?)
    }
}
