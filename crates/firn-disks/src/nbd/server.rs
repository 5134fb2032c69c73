//! NBD server: disks on a socket, and takeover from a server that was killed.
//!
//! ```text
//!   disk's file   locked by one process (`store`); a successor waits until the lock is free
//!   socket        bound under another name, then renamed to its own: the path always names a
//!                 socket, either the new one or the old one, which refuses connections
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

/// The maximum number of clients at a time. A VM has one for each disk.
const CLIENTS_MAX: usize = 32;
/// How long to wait after the system has run out of descriptors.
const ACCEPT_AGAIN: Duration = Duration::from_millis(100);

/// Why the server can't start.
#[derive(Debug, Error)]
pub enum ServerError {
    /// The path names something other than a socket.
    #[error("{path} is there already and is no socket: remove it, or give another path")]
    Taken {
        /// The path.
        path: PathBuf,
    },
    /// The socket can't be created.
    #[error("no socket can be made at {path}")]
    Socket {
        /// Its path.
        path: PathBuf,
        /// The error of the system.
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
    /// The disk of that name. If there is only one disk, the empty name denotes it.
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

/// A server, which runs until it is dropped.
pub struct Server {
    shared: Arc<Shared>,
    listener: Arc<UnixListener>,
    thread: Option<JoinHandle<()>>,
    path: PathBuf,
}

impl Server {
    /// Serves disks on a socket at `path`, which only its owner may use. An existing socket is
    /// replaced: its server no longer runs, because this process could lock the files of the disks.
    ///
    /// # Errors
    /// If the path names something else, or the socket can't be created.
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
    /// Ends all connections. QEMU repeats unacknowledged requests to the next server. This object
    /// serves the disks no more.
    fn drop(&mut self) {
        // Another process may have removed it.
        let _ = fs::remove_file(&self.path);
        self.shared.clients().is_stopping = true;
        let _ = rustix::net::shutdown(&self.listener, rustix::net::Shutdown::Both);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
        // From here on no clients are added.
        let threads = {
            let mut clients = self.shared.clients();
            for stream in clients.streams.values() {
                let _ = stream.shutdown(Shutdown::Both);
            }
            std::mem::take(&mut clients.threads)
        };
        self.shared.exports.0.values().for_each(|disk| disk.close());
        for thread in threads {
            // A thread that panicked has reported it.
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
        // If the thread can't be spawned, its closure is dropped at once, which locks the clients.
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

/// Removes a client when its thread ends, however it ends.
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
            tracing::warn!("a client of a disk is refused: {error}");
            thread::sleep(ACCEPT_AGAIN);
        }
    }
}

/// Binds a socket that no other user can use at any time under that name.
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
