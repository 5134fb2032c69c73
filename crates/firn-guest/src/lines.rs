//! A TCP connection by which lines of JSON go both ways.

use std::io::{self, BufRead as _, BufReader, Read as _, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

use serde::Serialize;
use serde::de::DeserializeOwned;

/// Longest line, in bytes.
const LINE_BYTES_MAX: u64 = 4 << 20;
/// How long the other end may take, if this end connects.
const PATIENCE: Duration = Duration::from_secs(10);

/// The connection.
#[derive(Debug)]
pub struct Lines(BufReader<TcpStream>);

impl Lines {
    /// By a connection that there is.
    pub fn new(stream: TcpStream) -> io::Result<Self> {
        stream.set_nodelay(true)?;
        Ok(Self(BufReader::new(stream)))
    }

    /// By a new one.
    pub fn connect(to: SocketAddr) -> io::Result<Self> {
        Self::connect_within(to, PATIENCE)
    }

    /// The same, with another patience from then on.
    pub fn connect_within(to: SocketAddr, patience: Duration) -> io::Result<Self> {
        let stream = TcpStream::connect_timeout(&to, patience)?;
        stream.set_read_timeout(Some(patience))?;
        stream.set_write_timeout(Some(patience))?;
        Self::new(stream)
    }

    /// Sends a line.
    pub fn say(&mut self, what: &impl Serialize) -> io::Result<()> {
        let mut line = serde_json::to_vec(what)?;
        line.push(b'\n');
        self.0.get_mut().write_all(&line)
    }

    /// Waits for a line.
    pub fn hear<T: DeserializeOwned>(&mut self) -> io::Result<T> {
        let mut line = Vec::new();
        self.0.by_ref().take(LINE_BYTES_MAX).read_until(b'\n', &mut line)?;
        if !line.ends_with(b"\n") {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        Ok(serde_json::from_slice(&line)?)
    }
}
