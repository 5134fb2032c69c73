//! What the cache's server and its clients send each other, over a Unix socket.
//!
//! ```text
//!   client                                          server
//!   {"open":{"object":HASH,"environment":{...}}} -->
//!                                                <-- {"done":{}}
//!   {"read":{"offset":...,"len":...}}            -->
//!                                                <-- {"present":{...}}       the file has the bytes now, or
//!                                                <-- {"bytes":{"len":...}}   the cache has no room: they follow, or
//!                                                <-- {"failed":{...}}
//! ```
//!
//! One request at a time on a connection. The environment has the store's own variables with the
//! credentials: the socket and the processes at both ends belong to one user.

use std::collections::BTreeMap;
use std::io::{self, BufRead, Write};

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

/// The maximum length of a message.
const MESSAGE_BYTES_MAX: u64 = 16 << 20;

/// A request to the server.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum CacheRequest {
    /// The following requests are for this object of the cache.
    Open {
        /// Its hash.
        object: String,
        /// The variables of the store, with credentials.
        environment: StoreEnvironment,
    },
    /// Make the files of an image, and reply with its path.
    Find {
        /// The image.
        location: String,
        /// The variables of the store, with credentials.
        environment: StoreEnvironment,
    },
    /// Make bytes present.
    Read {
        /// Where they begin.
        offset: u64,
        /// How many.
        len: u64,
        /// Whether those that follow are wanted as well.
        in_order: bool,
    },
    /// As `Read`, but fetch them once more, because they are wrong.
    Refetch {
        /// Where they begin.
        offset: u64,
        /// How many.
        len: u64,
    },
    /// Forget the bytes of the object: they are wrong.
    Forget,
    /// Fetch these ranges in this order, as soon as nothing else is wanted.
    Prefetch {
        /// First byte and length of each.
        ranges: Vec<(u64, u64)>,
    },
    /// Reply with the counts of the server.
    Report,
}

/// A reply of the server.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum CacheReply {
    /// Done.
    Done {},
    /// The file has the bytes.
    Present {
        /// Whether the client had to wait for the store.
        has_waited: bool,
    },
    /// The bytes follow.
    Bytes {
        /// How many.
        len: u64,
    },
    /// An image.
    Found {
        /// Its file in the cache.
        image: std::path::PathBuf,
        /// The hashes of its objects and of those it builds on, the newest first.
        objects: Vec<String>,
    },
    /// The counts of the server.
    Report(CacheReport),
    /// It failed.
    Failed {
        /// What failed, and why.
        message: String,
        /// The same with its kind, for a user.
        failure: serde_json::Value,
    },
}

/// The variables of a store, by their names.
pub type StoreEnvironment = BTreeMap<String, String>;

/// What the server has done since it was started, and what the cache has.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct CacheReport {
    /// Bytes that came from stores.
    pub fetched_bytes: u64,
    /// Requests for them.
    pub requests: u64,
    /// Bytes on the disk.
    pub cached_bytes: u64,
    /// The maximum of these.
    pub bytes_max: u64,
    /// Objects in the cache.
    pub objects: u64,
    /// The process of the server.
    pub pid: u32,
}

/// The variables of this process that are those of stores.
pub fn store_environment() -> StoreEnvironment {
    std::env::vars().filter(|(name, _)| name.starts_with("AWS_")).collect()
}

/// Sends a message: a line of JSON.
///
/// # Errors
/// If the connection fails.
pub fn send_message(to: &mut impl Write, message: &impl Serialize) -> io::Result<()> {
    let mut line = serde_json::to_vec(message)?;
    line.push(b'\n');
    to.write_all(&line)
}

/// Receives a message.
///
/// # Errors
/// If the connection fails or ends, or the message is none.
pub fn receive_message<T: DeserializeOwned>(from: &mut impl BufRead) -> io::Result<T> {
    let mut line = Vec::new();
    io::Read::take(&mut *from, MESSAGE_BYTES_MAX).read_until(b'\n', &mut line)?;
    match line.last() {
        Some(b'\n') => Ok(serde_json::from_slice(&line)?),
        _ => Err(io::ErrorKind::UnexpectedEof.into()),
    }
}
