//! Redis client, minimal: the few commands that tests need, in RESP2.

use std::io::{self, BufRead as _, BufReader, Read as _, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::thread::sleep;
use std::time::{Duration, Instant};

use thiserror::Error;

/// Longest value accepted from a server, in bytes.
const BULK_BYTES_MAX: usize = 64 << 20;
/// How long a server may take to answer by default.
const REPLY_TIMEOUT: Duration = Duration::from_secs(30);

/// Redis did not answer, or answered with an error.
#[derive(Debug, Error)]
pub enum RedisError {
    /// No server answers.
    #[error("Redis does not answer at {0}")]
    Unreachable(SocketAddr, #[source] io::Error),
    /// The connection broke in the middle.
    #[error("the connection to Redis broke")]
    Broken(#[from] io::Error),
    /// Redis refused a command.
    #[error("Redis: {0}")]
    Refused(String),
    /// A reply of an unexpected kind.
    #[error("unexpected reply of Redis: {0}")]
    Confused(String),
}

/// A reply in RESP2.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum RedisReply {
    Simple(String),
    Number(i64),
    Bulk(Vec<u8>),
    Nothing,
}

/// A connection to a guest's Redis.
#[derive(Debug)]
pub struct RedisClient {
    stream: BufReader<TcpStream>,
}

impl RedisClient {
    /// Connects, waiting up to `limit` for Redis to answer a PING.
    pub fn connect(address: SocketAddr, limit: Duration) -> Result<Self, RedisError> {
        let start = Instant::now();
        loop {
            let left =
                limit.saturating_sub(start.elapsed()).clamp(RETRY_INTERVAL, Duration::from_secs(2));
            match Self::try_connect(address, left) {
                Ok(redis) => return Ok(redis),
                Err(error) if start.elapsed() >= limit => {
                    return Err(RedisError::Unreachable(address, error));
                }
                Err(_) => sleep(RETRY_INTERVAL),
            }
        }
    }

    /// Connects and exchanges one PING, or fails within about `limit`.
    pub fn try_connect(address: SocketAddr, limit: Duration) -> io::Result<Self> {
        let stream = TcpStream::connect_timeout(&address, limit)?;
        stream.set_nodelay(true)?;
        stream.set_write_timeout(Some(REPLY_TIMEOUT))?;
        let mut redis = Self { stream: BufReader::new(stream) };
        redis.set_reply_timeout(limit)?;
        redis.ping().map_err(|error| match error {
            RedisError::Broken(error) => error,
            other => io::Error::other(other),
        })?;
        redis.set_reply_timeout(REPLY_TIMEOUT)?;
        Ok(redis)
    }

    /// Sets how long the server may take to answer from now on.
    pub fn set_reply_timeout(&mut self, limit: Duration) -> io::Result<()> {
        self.stream.get_ref().set_read_timeout(Some(limit))
    }

    /// Sends a PING and waits for the reply.
    pub fn ping(&mut self) -> Result<(), RedisError> {
        self.send_command(&[b"PING"])?.expect_simple("PONG")
    }

    /// Sets a key.
    pub fn set(&mut self, key: &str, value: &[u8]) -> Result<(), RedisError> {
        self.send_command(&[b"SET", key.as_bytes(), value])?.expect_simple("OK")
    }

    /// Appends to the value of a key, and waits up to `limit` until a replica has the write too;
    /// false if none has.
    pub fn append_and_wait(
        &mut self,
        key: &str,
        value: &[u8],
        limit: Duration,
    ) -> Result<bool, RedisError> {
        let mut commands = Vec::new();
        encode_command(&mut commands, &[b"APPEND", key.as_bytes(), value]);
        encode_command(&mut commands, &[b"WAIT", b"1", limit.as_millis().to_string().as_bytes()]);
        self.send_commands(&commands)?;
        self.read_reply()?.expect_number()?;
        Ok(self.read_reply()?.expect_number()? > 0)
    }

    /// Makes this server a replica of another.
    pub fn replicate_from(&mut self, of: SocketAddr) -> Result<(), RedisError> {
        let [host, port] = [of.ip().to_string(), of.port().to_string()];
        self.send_command(&[b"REPLICAOF", host.as_bytes(), port.as_bytes()])?.expect_simple("OK")
    }

    /// The value of a key.
    pub fn get(&mut self, key: &str) -> Result<Option<Vec<u8>>, RedisError> {
        self.send_command(&[b"GET", key.as_bytes()])?.expect_value()
    }

    /// Number of keys.
    pub fn count_keys(&mut self) -> Result<u64, RedisError> {
        self.send_command(&[b"DBSIZE"])?.expect_number()
    }

    /// Deletes all keys.
    pub fn delete_all(&mut self) -> Result<(), RedisError> {
        self.send_command(&[b"FLUSHALL"])?.expect_simple("OK")
    }

    fn send_command(&mut self, words: &[&[u8]]) -> Result<RedisReply, RedisError> {
        let mut command = Vec::new();
        encode_command(&mut command, words);
        self.send_commands(&command)?;
        self.read_reply()
    }

    /// Sends encoded commands.
    pub(super) fn send_commands(&mut self, commands: &[u8]) -> Result<(), RedisError> {
        Ok(self.stream.get_mut().write_all(commands)?)
    }

    /// Reads the next reply.
    pub(super) fn read_reply(&mut self) -> Result<RedisReply, RedisError> {
        let line = self.read_line()?;
        let confused = || RedisError::Confused(line.clone());
        let (kind, rest) = line.split_at_checked(1).ok_or_else(confused)?;
        match kind {
            "+" => Ok(RedisReply::Simple(rest.to_owned())),
            "-" => Err(RedisError::Refused(rest.to_owned())),
            ":" => Ok(RedisReply::Number(rest.parse().map_err(|_| confused())?)),
            "$" if rest == "-1" => Ok(RedisReply::Nothing),
            "$" => match rest.parse() {
                Ok(bytes) if bytes <= BULK_BYTES_MAX => self.read_bulk(bytes),
                _ => Err(confused()),
            },
            _ => Err(confused()),
        }
    }

    fn read_line(&mut self) -> Result<String, RedisError> {
        let mut line = String::new();
        if self.stream.read_line(&mut line)? == 0 {
            return Err(io::Error::from(io::ErrorKind::UnexpectedEof).into());
        }
        Ok(line.trim_end().to_owned())
    }

    fn read_bulk(&mut self, bytes: usize) -> Result<RedisReply, RedisError> {
        let mut value = vec![0; bytes + 2];
        self.stream.read_exact(&mut value)?;
        value.truncate(bytes);
        Ok(RedisReply::Bulk(value))
    }
}

const RETRY_INTERVAL: Duration = Duration::from_millis(2);

impl RedisReply {
    pub(super) fn expect_simple(self, words: &str) -> Result<(), RedisError> {
        if matches!(&self, Self::Simple(said) if said == words) {
            Ok(())
        } else {
            Err(self.into_error())
        }
    }

    fn expect_number(self) -> Result<u64, RedisError> {
        match self {
            Self::Number(number) => Ok(number.unsigned_abs()),
            other => Err(other.into_error()),
        }
    }

    pub(super) fn expect_value(self) -> Result<Option<Vec<u8>>, RedisError> {
        match self {
            Self::Bulk(value) => Ok(Some(value)),
            Self::Nothing => Ok(None),
            other => Err(other.into_error()),
        }
    }

    fn into_error(self) -> RedisError {
        RedisError::Confused(format!("{self:?}"))
    }
}

/// Appends one command.
pub(super) fn encode_command(out: &mut Vec<u8>, words: &[&[u8]]) {
    out.extend_from_slice(format!("*{}\r\n", words.len()).as_bytes());
    for word in words {
        out.extend_from_slice(format!("${}\r\n", word.len()).as_bytes());
        out.extend_from_slice(word);
        out.extend_from_slice(b"\r\n");
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::TcpListener;

    fn answered(bytes: &'static [u8]) -> RedisClient {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        std::thread::spawn(move || listener.accept().unwrap().0.write_all(bytes).unwrap());
        RedisClient { stream: BufReader::new(TcpStream::connect(address).unwrap()) }
    }

    #[test]
    fn understands_every_kind_of_answer() {
        let mut redis =
            answered(b"+OK\r\n:42\r\n$3\r\na\r\n\r\n$-1\r\n-ERR no\r\n$99999999999\r\n");
        redis.read_reply().unwrap().expect_simple("OK").unwrap();
        assert_eq!(redis.read_reply().unwrap(), RedisReply::Number(42));
        assert_eq!(redis.read_reply().unwrap().expect_value().unwrap(), Some(b"a\r\n".to_vec()));
        assert_eq!(redis.read_reply().unwrap().expect_value().unwrap(), None);
        assert!(matches!(redis.read_reply(), Err(RedisError::Refused(why)) if why == "ERR no"));
        assert!(matches!(redis.read_reply(), Err(RedisError::Confused(_))));
        assert!(matches!(redis.read_reply(), Err(RedisError::Broken(_))));
    }

    #[test]
    fn encodes_binary_safely() {
        let mut out = Vec::new();
        encode_command(&mut out, &[b"GET", b"a b"]);
        assert_eq!(out, b"*2\r\n$3\r\nGET\r\n$3\r\na b\r\n");
    }
}
