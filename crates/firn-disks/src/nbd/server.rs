//! Disks on a socket, and taking them over from a server that was killed.
//!
//! ```text
//!   disk's file   locked by one process (`store`); a successor waits until it is free
//!   socket        bound under another name, then renamed to its own: at any time there is one, or the old one that refuses
//! ```

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::net::Shutdown;
use std::os::unix::fs::{FileTypeExt, PermissionsExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use thiserror::Error;

use super::connection;
use crate::disk::Disk;

/// Clients at once. A VM has one for each disk.
const CLIENTS_MAX: usize = 32;
/// How long to wait when the system has no more descriptors.
const ACCEPT_AGAIN: Duration = Duration::from_millis(100);

/// Why there is no server.
#[derive(Debug, Error)]
pub enum ServerError {
    /// Something else has its name.
    #[error("{path} is there already and is no socket: remove it, or give another path")]
    Taken {
        /// The name.
        path: PathBuf,
    },
    /// The socket can't be made.
    #[error("no socket can be made at {path}")]
    Socket {
        /// Its name.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
}

/// Disks by their names.
#[derive(Clone, Default)]
pub struct Exports(BTreeMap<String, Arc<Disk>>);

impl FromIterator<(String, Arc<Disk>)> for Exports {
    fn from_iter<I: IntoIterator<Item = (String, Arc<Disk>)>>(disks: I) -> Self {
        Self(disks.into_iter().collect())
    }
}

impl Exports {
    /// The disk of that name. The empty name is that of the only one.
    pub(super) fn named(&self, name: &[u8]) -> Option<Arc<Disk>> {
        match self.0.len() {
            1 if name.is_empty() => self.0.values().next().cloned(),
            _ => self.0.get(std::str::from_utf8(name).ok()?).cloned(),
        }
    }

    pub(super) fn names(&self) -> impl Iterator<Item = &str> {
        self.0.keys().map(String::as_str)
    }

    pub(super) fn there_is_no(&self, name: &[u8]) -> String {
        let names: Vec<_> = self.names().collect();
        let name = String::from_utf8_lossy(name);
        format!("there is no disk named {name:?} here; there are: {}", names.join(", "))
    }
}

#[derive(Default)]
struct Clients {
    next: u64,
    streams: BTreeMap<u64, UnixStream>,
    threads: Vec<JoinHandle<()>>,
    is_stopping: bool,
}

struct Shared {
    exports: Exports,
    clients: Mutex<Clients>,
}

/// A server, until it is dropped.
pub struct Server {
    shared: Arc<Shared>,
    listener: Arc<UnixListener>,
    thread: Option<JoinHandle<()>>,
    path: PathBuf,
}

impl Server {
    /// Serves disks on a socket at `path`, for its owner alone. A socket that is there is replaced: whoever had these disks is gone, for
    /// their files could be locked.
    ///
    /// # Errors
    /// If the path is something else's, or can't be had.
    pub fn start(path: &Path, exports: Exports) -> Result<Self, ServerError> {
        if fs::symlink_metadata(path).is_ok_and(|it| !it.file_type().is_socket()) {
            return Err(ServerError::Taken { path: path.to_owned() });
        }
        let failed = |source| ServerError::Socket { path: path.to_owned(), source };
        let listener = Arc::new(bind(path).map_err(failed)?);
        let shared = Arc::new(Shared { exports, clients: Mutex::default() });
        let accept = {
            let (listener, shared) = (Arc::clone(&listener), Arc::clone(&shared));
            move || accept(&listener, &shared)
        };
        let thread = thread::Builder::new().name("firn-nbd-accept".into());
        let thread = Some(thread.spawn(accept).map_err(failed)?);
        Ok(Self { shared, listener, thread, path: path.to_owned() })
    }
}

impl Drop for Server {
    /// Ends all connections. Requests that were not answered are repeated by QEMU to the next server; these disks are served no more.
    fn drop(&mut self) {
        // Somebody else may have removed it.
        let _ = fs::remove_file(&self.path);
        self.shared.clients().is_stopping = true;
        let _ = rustix::net::shutdown(&self.listener, rustix::net::Shutdown::Both);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
        // From here on there are no new ones.
        let threads = {
            let mut clients = self.shared.clients();
            for stream in clients.streams.values() {
                let _ = stream.shutdown(Shutdown::Both);
            }
            std::mem::take(&mut clients.threads)
        };
        self.shared.exports.0.values().for_each(|disk| disk.close());
        for thread in threads {
            // One that has panicked has said so.
            let _ = thread.join();
        }
    }
}

impl Shared {
    fn clients(&self) -> MutexGuard<'_, Clients> {
        self.clients.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn add(self: &Arc<Self>, stream: UnixStream) -> io::Result<()> {
        let mut clients = self.clients();
        clients.threads.retain(|thread| !thread.is_finished());
        if clients.is_stopping || clients.streams.len() >= CLIENTS_MAX {
            return Err(io::Error::other(format!("there are {CLIENTS_MAX} clients already")));
        }
        let number = clients.next;
        clients.next += 1;
        clients.streams.insert(number, stream.try_clone()?);
        // What could not be spawned is dropped at once, and looks at the clients.
        drop(clients);
        let leaving = Leaving { shared: Arc::clone(self), number };
        let thread = thread::Builder::new().name("firn-nbd".into());
        let thread = thread.spawn(move || {
            if let Err(error) = connection::serve(&stream, &leaving.shared.exports) {
                tracing::warn!("a client of a disk is gone: {error}");
            }
        });
        self.clients().threads.push(thread?);
        Ok(())
    }
}

/// A client that is forgotten when its thread ends, however that happens.
struct Leaving {
    shared: Arc<Shared>,
    number: u64,
}

impl Drop for Leaving {
    fn drop(&mut self) {
        if let Some(stream) = self.shared.clients().streams.remove(&self.number) {
            let _ = stream.shutdown(Shutdown::Both);
        }
    }
}

fn accept(listener: &UnixListener, shared: &Arc<Shared>) {
    loop {
        let added = listener.accept().and_then(|(stream, _)| shared.add(stream));
        if shared.clients().is_stopping {
            return;
        }
        if let Err(error) = added {
            tracing::warn!("a client of a disk is turned away: {error}");
            thread::sleep(ACCEPT_AGAIN);
        }
    }
}

/// A socket that nobody else may use, from its first moment under that name.
fn bind(path: &Path) -> io::Result<UnixListener> {
    let name = path.file_name().ok_or(io::ErrorKind::InvalidInput)?.to_string_lossy();
    let own = path.with_file_name(format!(".{name}.{}", std::process::id()));
    // Left by another process with this number.
    let _ = fs::remove_file(&own);
    let listener = UnixListener::bind(&own)?;
    let placed = fs::set_permissions(&own, fs::Permissions::from_mode(0o600))
        .and_then(|()| fs::rename(&own, path));
    if placed.is_err() {
        let _ = fs::remove_file(&own);
    }
    placed.map(|()| listener)
}
