//! Redis client, minimal: the few commands that tests need, in RESP2.

use std::io::{self, BufRead as _, BufReader, Read as _, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::thread::sleep;
use std::time::{Duration, Instant};

use thiserror::Error;

/// Longest value accepted from a server, in bytes.
const BULK_BYTES_MAX: usize = 64 << 20;
/// How long a server may take to answer by default.
const PATIENCE: Duration = Duration::from_secs(30);

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
pub(super) enum Reply {
    Simple(String),
    Number(i64),
    Bulk(Vec<u8>),
    Nothing,
}

/// A connection to a guest's Redis.
#[derive(Debug)]
pub struct Redis {
    stream: BufReader<TcpStream>,
}

impl Redis {
    /// Connects, waiting up to `limit` for Redis to answer a PING.
    pub fn connect(address: SocketAddr, limit: Duration) -> Result<Self, RedisError> {
        let start = Instant::now();
        loop {
            let left = limit.saturating_sub(start.elapsed()).clamp(MOMENT, Duration::from_secs(2));
            match Self::try_connect(address, left) {
                Ok(redis) => return Ok(redis),
                Err(error) if start.elapsed() >= limit => {
                    return Err(RedisError::Unreachable(address, error));
                }
                Err(_) => sleep(MOMENT),
            }
        }
    }

    /// Connects and exchanges one PING, or fails within about `limit`.
    pub fn try_connect(address: SocketAddr, limit: Duration) -> io::Result<Self> {
        let stream = TcpStream::connect_timeout(&address, limit)?;
        stream.set_nodelay(true)?;
        stream.set_write_timeout(Some(PATIENCE))?;
        let mut redis = Self { stream: BufReader::new(stream) };
        redis.set_patience(limit)?;
        redis.ping().map_err(|error| match error {
            RedisError::Broken(error) => error,
            other => io::Error::other(other),
        })?;
        redis.set_patience(PATIENCE)?;
        Ok(redis)
    }

    /// Sets how long the server may take to answer from now on.
    pub fn set_patience(&mut self, limit: Duration) -> io::Result<()> {
        self.stream.get_ref().set_read_timeout(Some(limit))
    }

    /// Sends a PING and waits for the reply.
    pub fn ping(&mut self) -> Result<(), RedisError> {
        self.call(&[b"PING"])?.expect_simple("PONG")
    }

    /// Sets a key.
    pub fn set(&mut self, key: &str, value: &[u8]) -> Result<(), RedisError> {
        self.call(&[b"SET", key.as_bytes(), value])?.expect_simple("OK")
    }

    /// Appends to the value of a key, and waits up to `limit` until a replica has the write too;
    /// false if none has.
    pub fn append_twice(
        &mut self,
        key: &str,
        value: &[u8],
        limit: Duration,
    ) -> Result<bool, RedisError> {
        let mut commands = Vec::new();
        encode(&mut commands, &[b"APPEND", key.as_bytes(), value]);
        encode(&mut commands, &[b"WAIT", b"1", limit.as_millis().to_string().as_bytes()]);
        self.send(&commands)?;
        self.reply()?.number()?;
        Ok(self.reply()?.number()? > 0)
    }

    /// Makes this server a replica of another.
    pub fn replicate(&mut self, of: SocketAddr) -> Result<(), RedisError> {
        let [host, port] = [of.ip().to_string(), of.port().to_string()];
        self.call(&[b"REPLICAOF", host.as_bytes(), port.as_bytes()])?.expect_simple("OK")
    }

    /// The value of a key.
    pub fn get(&mut self, key: &str) -> Result<Option<Vec<u8>>, RedisError> {
        self.call(&[b"GET", key.as_bytes()])?.value()
    }

    /// Number of keys.
    pub fn dbsize(&mut self) -> Result<u64, RedisError> {
        self.call(&[b"DBSIZE"])?.number()
    }

    /// Deletes all keys.
    pub fn flush(&mut self) -> Result<(), RedisError> {
        self.call(&[b"FLUSHALL"])?.expect_simple("OK")
    }

    fn call(&mut self, words: &[&[u8]]) -> Result<Reply, RedisError> {
        let mut command = Vec::new();
        encode(&mut command, words);
        self.send(&command)?;
        self.reply()
    }

    /// Sends encoded commands.
    pub(super) fn send(&mut self, commands: &[u8]) -> Result<(), RedisError> {
        Ok(self.stream.get_mut().write_all(commands)?)
    }

    /// Reads the next reply.
    pub(super) fn reply(&mut self) -> Result<Reply, RedisError> {
        let line = self.line()?;
        let confused = || RedisError::Confused(line.clone());
        let (kind, rest) = line.split_at_checked(1).ok_or_else(confused)?;
        match kind {
            "+" => Ok(Reply::Simple(rest.to_owned())),
            "-" => Err(RedisError::Refused(rest.to_owned())),
            ":" => Ok(Reply::Number(rest.parse().map_err(|_| confused())?)),
            "$" if rest == "-1" => Ok(Reply::Nothing),
            "$" => match rest.parse() {
                Ok(bytes) if bytes <= BULK_BYTES_MAX => self.bulk(bytes),
                _ => Err(confused()),
            },
            _ => Err(confused()),
        }
    }

    fn line(&mut self) -> Result<String, RedisError> {
        let mut line = String::new();
        if self.stream.read_line(&mut line)? == 0 {
            return Err(io::Error::from(io::ErrorKind::UnexpectedEof).into());
        }
        Ok(line.trim_end().to_owned())
    }

    fn bulk(&mut self, bytes: usize) -> Result<Reply, RedisError> {
        let mut value = vec![0; bytes + 2];
        self.stream.read_exact(&mut value)?;
        value.truncate(bytes);
        Ok(Reply::Bulk(value))
    }
}

const MOMENT: Duration = Duration::from_millis(2);

impl Reply {
    pub(super) fn expect_simple(self, words: &str) -> Result<(), RedisError> {
        if matches!(&self, Self::Simple(said) if said == words) {
            Ok(())
        } else {
            Err(self.confused())
        }
    }

    fn number(self) -> Result<u64, RedisError> {
        match self {
            Self::Number(number) => Ok(number.unsigned_abs()),
            other => Err(other.confused()),
        }
    }

    pub(super) fn value(self) -> Result<Option<Vec<u8>>, RedisError> {
        match self {
            Self::Bulk(value) => Ok(Some(value)),
            Self::Nothing => Ok(None),
            other => Err(other.confused()),
        }
    }

    fn confused(self) -> RedisError {
        RedisError::Confused(format!("{self:?}"))
    }
}

/// Appends one command.
pub(super) fn encode(out: &mut Vec<u8>, words: &[&[u8]]) {
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

    fn answered(bytes: &'static [u8]) -> Redis {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        std::thread::spawn(move || listener.accept().unwrap().0.write_all(bytes).unwrap());
        Redis { stream: BufReader::new(TcpStream::connect(address).unwrap()) }
    }

    #[test]
    fn understands_every_kind_of_answer() {
        let mut redis =
            answered(b"+OK\r\n:42\r\n$3\r\na\r\n\r\n$-1\r\n-ERR no\r\n$99999999999\r\n");
        redis.reply().unwrap().expect_simple("OK").unwrap();
        assert_eq!(redis.reply().unwrap(), Reply::Number(42));
        assert_eq!(redis.reply().unwrap().value().unwrap(), Some(b"a\r\n".to_vec()));
        assert_eq!(redis.reply().unwrap().value().unwrap(), None);
        assert!(matches!(redis.reply(), Err(RedisError::Refused(why)) if why == "ERR no"));
        assert!(matches!(redis.reply(), Err(RedisError::Confused(_))));
        assert!(matches!(redis.reply(), Err(RedisError::Broken(_))));
    }

    #[test]
    fn encodes_binary_safely() {
        let mut out = Vec::new();
        encode(&mut out, &[b"GET", b"a b"]);
        assert_eq!(out, b"*2\r\n$3\r\nGET\r\n$3\r\na b\r\n");
    }
}
