//! A file of the cache, for a process that reads it: what is missing is fetched first.
//!
//! ```text
//!   read -- known to be there? -- yes --> pread of the file
//!            |  no
//!            '-- ask the server, and wait --> there now: remember that, pread
//!                                        '--> no room in the cache: the bytes came with the reply
//! ```
//!
//! A client never writes. It holds a shared lock of the file, so the server does not remove it, even
//! after a restart. If the server ends, the next request starts another one.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::os::unix::fs::{FileExt as _, MetadataExt as _};
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

use rustix::fs::{FlockOperation, flock};

use crate::connection::CacheConnection;
use crate::layout::{CacheDir, map_path};
use crate::messages::{CacheReply, CacheRequest, store_environment};
use crate::unit_map::{ObjectName, UNIT_BYTES, units_of};

/// Connections that are kept for the next request.
const IDLE_CONNECTIONS_MAX: usize = 16;

thread_local! {
    static FETCHES: Cell<u64> = const { Cell::new(0) };
}

/// The number of reads of the calling thread that had to wait for a store.
pub fn fetch_count() -> u64 {
    FETCHES.get()
}

/// A file of the cache.
#[derive(Debug)]
pub struct CachedFile {
    cache: CacheDir,
    name: ObjectName,
    /// Units that are known to be there, a bit for each.
    known: Vec<AtomicU64>,
    idle: Mutex<Vec<CacheConnection>>,
    has_wrong_units: AtomicBool,
    /// Units that had wrong bytes, and whether they were fetched again since.
    wrong_units: Mutex<BTreeMap<u64, bool>>,
}

impl CachedFile {
    /// The cached object that the open file `data` of the name `path` has the bytes of. `None` if it
    /// is an ordinary file.
    ///
    /// # Errors
    /// If it is a file of the cache, and its map can't be used.
    pub fn find(path: &Path, data: &File) -> io::Result<Option<Self>> {
        let Some(cache) = CacheDir::of_image(path) else { return Ok(None) };
        let map = match File::open(map_path(path)) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            map => map?,
        };
        if !is_own(&map)? || !is_own(data)? || cache.check_owner().is_err() {
            return Ok(None);
        }
        flock(data, FlockOperation::LockShared)?;
        let name = ObjectName::read_from(&map)?;
        let found = data.metadata()?;
        if (name.inode, name.len) != (found.ino(), found.len()) {
            let text = "the map beside it is that of another file";
            return Err(io::Error::new(io::ErrorKind::InvalidData, text));
        }
        let bits = name.read_bits(&map)?;
        let word =
            |bytes: &[u8]| bytes.iter().rev().fold(0, |word, byte| (word << 8) | u64::from(*byte));
        let known = bits.chunks(8).map(|bytes| AtomicU64::new(word(bytes))).collect();
        let (idle, wrong_units) = (Mutex::default(), Mutex::default());
        let has_wrong_units = AtomicBool::new(false);
        Ok(Some(Self { cache, name, known, idle, has_wrong_units, wrong_units }))
    }

    /// Where the object is.
    pub fn location(&self) -> &str {
        &self.name.location
    }

    /// Whether the file has these bytes, as far as this process knows.
    pub fn has_bytes(&self, offset: u64, len: u64) -> bool {
        let is_known = |unit: u64| {
            let word = self.known.get((unit / 64) as usize);
            word.is_some_and(|word| word.load(Ordering::Acquire) & (1 << (unit % 64)) != 0)
        };
        units_of(offset, len).all(is_known) && !self.needs_refetch(offset, len)
    }

    fn set_known(&self, offset: u64, len: u64) {
        for unit in units_of(offset, len) {
            if let Some(word) = self.known.get((unit / 64) as usize) {
                word.fetch_or(1 << (unit % 64), Ordering::Release);
            }
        }
    }

    /// Reads bytes of the open file `data`, after what is missing was fetched.
    ///
    /// # Errors
    /// If they can't be read or fetched.
    pub fn read_exact_at(
        &self,
        data: &File,
        bytes: &mut [u8],
        offset: u64,
        in_order: bool,
    ) -> io::Result<()> {
        let len = bytes.len() as u64;
        if !self.has_bytes(offset, len) {
            let request = match self.needs_refetch(offset, len) {
                true => CacheRequest::Refetch { offset, len },
                false => CacheRequest::Read { offset, len, in_order },
            };
            if self.fetch(&request, offset, bytes)? {
                return Ok(());
            }
        }
        data.read_exact_at(bytes, offset)
    }

    /// Fetches what is missing of a range. True if `bytes` has the bytes: then the file has not.
    fn fetch(&self, request: &CacheRequest, offset: u64, bytes: &mut [u8]) -> io::Result<bool> {
        let len = bytes.len() as u64;
        let (mut connection, reply) = self.send(request)?;
        let has_bytes = match reply {
            CacheReply::Present { has_waited } => {
                FETCHES.set(FETCHES.get() + u64::from(has_waited));
                self.set_known(offset, len);
                false
            }
            CacheReply::Bytes { len: sent } if sent == len => {
                FETCHES.set(FETCHES.get() + 1);
                connection.receive_bytes(bytes)?;
                true
            }
            _ => return Err(unexpected()),
        };
        self.keep(connection);
        self.set_refetched(offset, len);
        Ok(has_bytes)
    }

    /// Makes the whole object present.
    ///
    /// # Errors
    /// If it can't be fetched, or the cache has no room for it.
    pub fn fetch_all(&self) -> io::Result<()> {
        let mut offset = 0;
        while offset < self.name.len {
            let len = (self.name.len - offset).min(256 * UNIT_BYTES);
            if !self.has_bytes(offset, len) {
                match self.send(&CacheRequest::Read { offset, len, in_order: true })? {
                    (connection, CacheReply::Present { .. }) => {
                        self.keep(connection);
                        self.set_known(offset, len);
                    }
                    _ => {
                        let text = "the cache has no room for the whole object";
                        return Err(io::Error::new(io::ErrorKind::StorageFull, text));
                    }
                }
            }
            offset += len;
        }
        Ok(())
    }

    /// Requests ranges that will be needed, and does not wait for them.
    ///
    /// # Errors
    /// If the server can't be reached.
    pub fn prefetch(&self, ranges: Vec<(u64, u64)>) -> io::Result<()> {
        let (connection, _) = self.send(&CacheRequest::Prefetch { ranges })?;
        self.keep(connection);
        Ok(())
    }

    /// These bytes are wrong: the next read of them fetches them once more.
    pub fn report_wrong_bytes(&self, offset: u64, len: u64) {
        let mut wrong = self.wrong_units.lock().unwrap_or_else(PoisonError::into_inner);
        for unit in units_of(offset, len) {
            wrong.insert(unit, false);
        }
        self.has_wrong_units.store(true, Ordering::Release);
    }

    /// Continues for another opening of the same file: it knows which bytes are wrong.
    pub fn continue_for(&self, other: &Self) {
        let wrong = other.wrong_units.lock().unwrap_or_else(PoisonError::into_inner).clone();
        self.has_wrong_units.store(!wrong.is_empty(), Ordering::Release);
        *self.wrong_units.lock().unwrap_or_else(PoisonError::into_inner) = wrong;
    }

    fn needs_refetch(&self, offset: u64, len: u64) -> bool {
        self.has_wrong_units.load(Ordering::Acquire) && {
            let wrong = self.wrong_units.lock().unwrap_or_else(PoisonError::into_inner);
            wrong.range(units_of(offset, len)).any(|(_, is_done)| !is_done)
        }
    }

    fn set_refetched(&self, offset: u64, len: u64) {
        if self.has_wrong_units.load(Ordering::Acquire) {
            let mut wrong = self.wrong_units.lock().unwrap_or_else(PoisonError::into_inner);
            wrong.range_mut(units_of(offset, len)).for_each(|(_, is_done)| *is_done = true);
        }
    }

    fn keep(&self, connection: CacheConnection) {
        let mut idle = self.idle.lock().unwrap_or_else(PoisonError::into_inner);
        if idle.len() < IDLE_CONNECTIONS_MAX {
            idle.push(connection);
        }
    }

    /// Sends a request for this object, by a connection that is idle or by a new one.
    fn send(&self, request: &CacheRequest) -> io::Result<(CacheConnection, CacheReply)> {
        let explain = |error: io::Error| {
            io::Error::new(error.kind(), format!("the cache of {}: {error}", self.name.location))
        };
        let idle = self.idle.lock().unwrap_or_else(PoisonError::into_inner).pop();
        // The server may have ended since, or closed what was idle for long.
        let sent =
            idle.and_then(|mut connection| Some((connection.request(request).ok()?, connection)));
        let (reply, connection) = match sent {
            Some(sent) => sent,
            None => {
                self.idle.lock().unwrap_or_else(PoisonError::into_inner).clear();
                // A server that had nothing to do may be ending just now.
                let again = |_| self.request_anew(request);
                self.request_anew(request).or_else(again).map_err(explain)?
            }
        };
        match reply {
            CacheReply::Failed { message, failure } => {
                self.keep(connection);
                Err(failed_request(message, &failure))
            }
            reply => Ok((connection, reply)),
        }
    }

    fn request_anew(&self, request: &CacheRequest) -> io::Result<(CacheReply, CacheConnection)> {
        let mut connection = self.connect()?;
        Ok((connection.request(request)?, connection))
    }

    fn connect(&self) -> io::Result<CacheConnection> {
        let mut connection = CacheConnection::open(&self.cache, false)?;
        let (object, environment) = (self.name.hash.clone(), store_environment());
        match connection.request(&CacheRequest::Open { object, environment })? {
            CacheReply::Done {} => Ok(connection),
            CacheReply::Failed { message, failure } => Err(failed_request(message, &failure)),
            _ => Err(unexpected()),
        }
    }
}

/// The error of a request that failed. Of its kinds a reader has to know one: the credentials do not give
/// access, or there are none.
fn failed_request(message: String, failure: &serde_json::Value) -> io::Error {
    match failure["kind"] == "host" {
        true => io::Error::new(io::ErrorKind::PermissionDenied, message),
        false => io::Error::other(message),
    }
}

fn is_own(file: &File) -> io::Result<bool> {
    let metadata = file.metadata()?;
    let is_own = metadata.uid() == rustix::process::geteuid().as_raw();
    Ok(is_own && metadata.mode() & 0o022 == 0)
}

fn unexpected() -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, "the server of the cache sent another reply")
}
