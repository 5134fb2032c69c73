//! Reply sources: the services of a guest that a prober can request replies from.

use std::io::{self, BufRead as _, BufReader, Read as _, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::guest::RedisClient;

/// How long a request may remain unanswered before it is repeated on a new connection.
const REPLY_TIMEOUT: Duration = Duration::from_millis(500);

/// A service that replies.
pub trait ReplySource: Send {
    /// Waits for one reply, for less than a second. Connects first, or again, where necessary.
    fn wait_reply(&mut self) -> bool;
}

/// Heartbeat lines of `firn-guest heartbeat`, read from the unix socket of the heartbeat port.
#[derive(Debug)]
pub struct Heartbeats {
    path: PathBuf,
    stream: Option<BufReader<UnixStream>>,
}

impl Heartbeats {
    /// Heartbeats from the port with this socket. The guest determines the rate.
    pub fn new(path: &Path) -> Self {
        Self { path: path.to_owned(), stream: None }
    }

    fn read_beat(&mut self) -> io::Result<()> {
        let mut stream = match self.stream.take() {
            Some(stream) => stream,
            None => {
                let stream = UnixStream::connect(&self.path)?;
                stream.set_read_timeout(Some(REPLY_TIMEOUT))?;
                BufReader::new(stream)
            }
        };
        let mut line = Vec::new();
        if stream.read_until(b'\n', &mut line)? == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        self.stream = Some(stream);
        Ok(())
    }
}

impl ReplySource for Heartbeats {
    fn wait_reply(&mut self) -> bool {
        self.read_beat().is_ok()
    }
}

/// PINGs of a guest's Redis, one at a time, on one connection.
#[derive(Debug)]
pub struct RedisPings {
    address: SocketAddr,
    redis: Option<RedisClient>,
}

impl RedisPings {
    /// PINGs to the Redis at this address.
    pub fn new(address: SocketAddr) -> Self {
        Self { address, redis: None }
    }

    fn send_ping(&mut self) -> Option<()> {
        let redis = match self.redis.take() {
            Some(mut redis) => {
                redis.ping().ok()?;
                redis
            }
            None => {
                let mut redis = RedisClient::try_connect(self.address, REPLY_TIMEOUT).ok()?;
                redis.set_reply_timeout(REPLY_TIMEOUT).ok()?;
                redis
            }
        };
        self.redis = Some(redis);
        Some(())
    }
}

impl ReplySource for RedisPings {
    fn wait_reply(&mut self) -> bool {
        self.send_ping().is_some()
    }
}

/// GETs of web pages, a new connection for each: page numbers count up and wrap.
#[derive(Debug)]
pub struct HttpGets {
    address: SocketAddr,
    pages: u32,
    next: u32,
}

impl HttpGets {
    /// GETs of `/page/N.html` for N below `pages`, to the server at this address.
    pub fn new(address: SocketAddr, pages: u32) -> Self {
        Self { address, pages: pages.max(1), next: 0 }
    }

    fn get_page(&mut self) -> io::Result<()> {
        let mut stream = TcpStream::connect_timeout(&self.address, REPLY_TIMEOUT)?;
        stream.set_read_timeout(Some(REPLY_TIMEOUT))?;
        stream.set_write_timeout(Some(REPLY_TIMEOUT))?;
        let page = self.next;
        self.next = (page + 1) % self.pages;
        write!(stream, "GET /page/{page}.html HTTP/1.0\r\nHost: guest\r\n\r\n")?;
        let mut answer = Vec::new();
        stream.take(16 << 20).read_to_end(&mut answer)?;
        if answer.starts_with(b"HTTP/1.1 200") {
            Ok(())
        } else {
            Err(io::ErrorKind::InvalidData.into())
        }
    }
}

impl ReplySource for HttpGets {
    fn wait_reply(&mut self) -> bool {
        self.get_page().is_ok()
    }
}
