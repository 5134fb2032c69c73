//! Memcached client: remembers which of its operations were acknowledged.
//!
//! Each client has its own keys and numbers its operations. A value contains the number of the
//! operation that set it; a counter is only ever incremented. So a client can check each reply
//! after a kill: a value may be the last acknowledged one, or one that was requested and not
//! answered, and nothing else.

use std::io::{self, BufRead as _, BufReader, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::ops::AddAssign;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::{Result, bail, ensure};
use firn_guest::stamp::mix;

/// Keys of one client.
const KEYS: usize = 500;
/// One operation in this many increments the counter.
const INCREMENT_INTERVAL: u64 = 4;
/// Bytes of a value: the minimum, and the number of possible lengths from there. One value in
/// `LONG_VALUE_INTERVAL` is longer than memcached reads at once.
const BYTES: (usize, u64) = (32, 900);
const LONG_VALUE_BYTES: usize = 100_000;
const LONG_VALUE_INTERVAL: u64 = 64;
/// How long a reply may take.
const REPLY_TIMEOUT: Duration = Duration::from_secs(60);

/// Acknowledged operations whose effect is lost.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct LostOperations {
    /// Keys that are missing, or have an older value.
    keys: u64,
    /// Lost increments.
    increments: u64,
}

impl LostOperations {
    pub(super) fn total(self) -> u64 {
        self.keys + self.increments
    }
}

impl AddAssign for LostOperations {
    fn add_assign(&mut self, other: Self) {
        self.keys += other.keys;
        self.increments += other.increments;
    }
}

/// A client's knowledge of one key: operation numbers, 0 for none.
#[derive(Clone, Copy, Debug, Default)]
struct KeyHistory {
    asked: u64,
    acknowledged: u64,
}

/// A client, over all its connections.
pub(super) struct CacheClient {
    id: u64,
    keys: Vec<KeyHistory>,
    counter: KeyHistory,
    operation: u64,
    acknowledged: u64,
}

impl CacheClient {
    pub(super) fn new(id: u64) -> Self {
        let keys = vec![KeyHistory::default(); KEYS];
        Self { id, keys, counter: KeyHistory::default(), operation: 0, acknowledged: 0 }
    }

    /// Number of acknowledged operations.
    pub(super) fn acknowledged(&self) -> u64 {
        self.acknowledged
    }

    /// Sends operations until the server ends, which is no error once `is_over` is set.
    pub(super) fn run_until_killed(
        &mut self,
        address: SocketAddr,
        is_over: &AtomicBool,
    ) -> Result<()> {
        match self.send_operations(address) {
            Err(error) if error.is::<io::Error>() && is_over.load(Ordering::Acquire) => Ok(()),
            other => other,
        }
    }

    fn send_operations(&mut self, address: SocketAddr) -> Result<()> {
        let mut connection = CacheConnection::new(TcpStream::connect(address)?)?;
        self.open_counter(&mut connection)?;
        loop {
            self.operation += 1;
            match self.operation % INCREMENT_INTERVAL {
                0 => self.increment_counter(&mut connection)?,
                _ => self.set_key(&mut connection)?,
            }
            self.acknowledged += 1;
        }
    }

    /// Creates the counter, which must exist before it can be incremented.
    fn open_counter(&mut self, connection: &mut CacheConnection) -> Result<()> {
        let start = self.counter.acknowledged.to_string();
        let request = format!("add {} 0 0 {}\r\n{start}\r\n", self.counter_key(), start.len());
        let answer = connection.send_request(&request)?;
        ensure!(matches!(&*answer, "STORED" | "NOT_STORED"), "memcached answers {answer:?}");
        Ok(())
    }

    fn counter_key(&self) -> String {
        format!("counter-{}", self.id)
    }

    fn key_name(&self, number: usize) -> String {
        format!("key-{}-{number}", self.id)
    }

    fn increment_counter(&mut self, connection: &mut CacheConnection) -> Result<()> {
        let next = self.counter.acknowledged + 1;
        self.counter.asked = next;
        let answer = connection.send_request(&format!("incr {} 1\r\n", self.counter_key()))?;
        ensure!(answer.parse() == Ok(next), "a counter at {answer:?}, not {next}");
        self.counter.acknowledged = next;
        Ok(())
    }

    fn set_key(&mut self, connection: &mut CacheConnection) -> Result<()> {
        let operation = self.operation;
        let number = mix(operation ^ (self.id << 48)) as usize % KEYS;
        self.keys[number].asked = operation;
        let value = value_for(operation);
        let request = format!("set {} 0 0 {}\r\n{value}\r\n", self.key_name(number), value.len());
        let answer = connection.send_request(&request)?;
        ensure!(answer == "STORED", "memcached answers {answer:?}");
        self.keys[number].acknowledged = operation;
        Ok(())
    }

    /// Reads back all keys, and counts the acknowledged operations that are lost. Reports each loss
    /// once.
    pub(super) fn count_losses(&mut self, address: SocketAddr) -> Result<LostOperations> {
        let mut connection = CacheConnection::new(TcpStream::connect(address)?)?;
        let mut lost = LostOperations::default();
        for number in 0..KEYS {
            let key = self.key_name(number);
            let there = match connection.get_value(&key)? {
                Some(text) => parse_value(&text)?,
                None => 0,
            };
            lost.keys += u64::from(self.keys[number].update_stored(there, &key)?);
        }
        let key = self.counter_key();
        let there = connection.get_value(&key)?.map_or(Ok(0), |text| text.trim().parse())?;
        lost.increments += self.counter.acknowledged.saturating_sub(there);
        self.counter.update_stored(there, &key)?;
        Ok(lost)
    }
}

impl KeyHistory {
    /// Whether the stored number is older than the acknowledged one. The stored number counts as
    /// acknowledged from now on.
    fn update_stored(&mut self, there: u64, key: &str) -> Result<bool> {
        let Self { asked, acknowledged } = *self;
        ensure!(
            there <= asked.max(acknowledged),
            "{key} has {there}; the client never requested more than {asked}"
        );
        let between = there > acknowledged && there != asked;
        ensure!(!between, "{key} has {there}, neither {acknowledged} nor {asked}");
        *self = Self { asked: there, acknowledged: there };
        Ok(there < acknowledged)
    }
}

/// The value for an operation: its number, and letters that are derived from the number.
fn value_for(operation: u64) -> String {
    let length = match mix(operation) % LONG_VALUE_INTERVAL {
        0 => LONG_VALUE_BYTES,
        _ => BYTES.0 + (mix(operation) % BYTES.1) as usize,
    };
    let letters = (0..length as u64).map(|at| char::from(b'a' + (mix(operation + at) % 26) as u8));
    format!("{operation} ").chars().chain(letters).collect()
}

fn parse_value(text: &str) -> Result<u64> {
    let number = text.split(' ').next().and_then(|word| word.parse().ok());
    match number {
        Some(number) if value_for(number) == text => Ok(number),
        _ => bail!("a torn value: {text:?}"),
    }
}

/// A connection that uses memcached's text protocol (doc/protocol.txt of memcached).
pub(super) struct CacheConnection {
    stream: BufReader<TcpStream>,
}

impl CacheConnection {
    pub(super) fn new(stream: TcpStream) -> io::Result<Self> {
        stream.set_nodelay(true)?;
        stream.set_read_timeout(Some(REPLY_TIMEOUT))?;
        Ok(Self { stream: BufReader::new(stream) })
    }

    /// Sends a request and returns the first line of the reply.
    pub(super) fn send_request(&mut self, request: &str) -> io::Result<String> {
        self.stream.get_mut().write_all(request.as_bytes())?;
        self.read_line()
    }

    fn read_line(&mut self) -> io::Result<String> {
        let mut line = String::new();
        self.stream.read_line(&mut line)?;
        match line.strip_suffix("\r\n") {
            Some(line) => Ok(line.to_owned()),
            None => Err(io::ErrorKind::UnexpectedEof.into()),
        }
    }

    fn get_value(&mut self, key: &str) -> Result<Option<String>> {
        if self.send_request(&format!("get {key}\r\n"))? == "END" {
            return Ok(None);
        }
        let value = self.read_line()?;
        let end = self.read_line()?;
        ensure!(end == "END", "memcached ends a value by {end:?}");
        Ok(Some(value))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn right_and_wrong_replies_are_distinguished() {
        let known = KeyHistory { asked: 9, acknowledged: 5 };
        let is_lost = |there| {
            let mut known = known;
            known.update_stored(there, "key").map_err(|error| error.to_string())
        };
        assert_eq!((is_lost(5), is_lost(9)), (Ok(false), Ok(false)));
        assert_eq!((is_lost(4), is_lost(0)), (Ok(true), Ok(true)));
        assert!(is_lost(7).is_err());
        assert!(is_lost(10).is_err());
    }

    #[test]
    fn a_torn_value_is_noticed() {
        assert_eq!(parse_value(&value_for(12345)).unwrap(), 12345);
        let torn = value_for(12345).replace("12345", "12346");
        assert!(parse_value(&torn).is_err());
        assert!(parse_value("").is_err());
    }
}
