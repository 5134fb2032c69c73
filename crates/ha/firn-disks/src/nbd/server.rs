//! NBD server: disks on a socket, and takeover from a server that was killed.
//!
//! ```text
//!   disk's file   locked by one process (`store`); a successor waits until the lock is free
//!   socket        bound under another name, then renamed to its own: the path always names a
//!                 socket, either the new one or the old one, which refuses connections
//! ```
//!
//! A hypervisor that mirrors its disks may be another user's, or see other directories. For it the
//! socket has an abstract name (unix(7)) in the hypervisor's network namespace, and the server accepts only connections of that process.
//! The name is new for each server, so no other process can have it when the hypervisor connects.

use std::collections::BTreeMap;
use std::fmt;
use std::fs;
use std::hash::{BuildHasher, RandomState};
use std::io;
use std::net::Shutdown;
use std::os::fd::AsFd;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::fs::{FileTypeExt, PermissionsExt};
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use rustix::thread::LinkNameSpaceType;
use thiserror::Error;

use super::connection;
use crate::disk::LoggedDisk;

/// The maximum number of clients at a time. A VM has one for each disk.
const CLIENTS_MAX: usize = 32;
/// How long to wait after the system has run out of descriptors.
const ACCEPT_RETRY_INTERVAL: Duration = Duration::from_millis(100);

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
pub struct NbdExports(BTreeMap<String, Arc<LoggedDisk>>);

impl FromIterator<(String, Arc<LoggedDisk>)> for NbdExports {
    fn from_iter<I: IntoIterator<Item = (String, Arc<LoggedDisk>)>>(disks: I) -> Self {
        Self(disks.into_iter().collect())
    }
}

impl NbdExports {
    /// The disk of that name. If there is only one disk, the empty name denotes it.
    pub(super) fn find_disk(&self, name: &[u8]) -> Option<Arc<LoggedDisk>> {
        match self.0.len() {
            1 if name.is_empty() => self.0.values().next().cloned(),
            _ => self.0.get(std::str::from_utf8(name).ok()?).cloned(),
        }
    }

    pub(super) fn disk_names(&self) -> impl Iterator<Item = &str> {
        self.0.keys().map(String::as_str)
    }

    pub(super) fn unknown_disk_message(&self, name: &[u8]) -> String {
        let names: Vec<_> = self.disk_names().collect();
        let name = String::from_utf8_lossy(name);
        format!("there is no disk named {name:?} here; there are: {}", names.join(", "))
    }
}

#[derive(Default)]
struct ClientTable {
    next: u64,
    streams: BTreeMap<u64, UnixStream>,
    threads: Vec<JoinHandle<()>>,
    is_stopping: bool,
}

struct ServerState {
    exports: NbdExports,
    /// The only process that may connect; `None` if the socket's permissions decide.
    client: Option<i32>,
    clients: Mutex<ClientTable>,
}

impl fmt::Debug for NbdServer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.shared.exports.disk_names()).finish()
    }
}

/// A server, which runs until it is dropped.
pub struct NbdServer {
    shared: Arc<ServerState>,
    listener: Arc<UnixListener>,
    thread: Option<JoinHandle<()>>,
    /// The name to remove.
    path: Option<PathBuf>,
}

impl NbdServer {
    /// Serves disks on a socket at `path`, which only its owner may use. An existing socket is
    /// replaced: its server no longer runs, because this process could lock the files of the disks.
    ///
    /// # Errors
    /// If the path names something else, or the socket can't be created.
    pub fn start(path: &Path, exports: NbdExports) -> Result<Self, ServerError> {
        if fs::symlink_metadata(path).is_ok_and(|it| !it.file_type().is_socket()) {
            return Err(ServerError::Taken { path: path.to_owned() });
        }
        let failed = |source| ServerError::Socket { path: path.to_owned(), source };
        let listener = bind_private(path).map_err(failed)?;
        Self::listen(listener, exports, None, Some(path.to_owned())).map_err(failed)
    }

    /// Serves disks to one process only, on a socket with a new abstract name. Returns the name as
    /// well.
    ///
    /// # Errors
    /// If the socket can't be created.
    pub fn start_for_process(pid: i32, exports: NbdExports) -> Result<(Self, String), ServerError> {
        let name = format!("firn-mirror-{pid}-{:016x}", RandomState::new().hash_one(pid));
        let failed = |source| ServerError::Socket { path: PathBuf::from(&name), source };
        let listener = bind_where(pid, &name).map_err(failed)?;
        let server = Self::listen(listener, exports, Some(pid), None).map_err(failed)?;
        Ok((server, name))
    }

    fn listen(
        listener: UnixListener,
        exports: NbdExports,
        client: Option<i32>,
        path: Option<PathBuf>,
    ) -> io::Result<Self> {
        let listener = Arc::new(listener);
        let shared = Arc::new(ServerState { exports, client, clients: Mutex::default() });
        let accept = {
            let (listener, shared) = (Arc::clone(&listener), Arc::clone(&shared));
            move || accept_clients(&listener, &shared)
        };
        let thread = thread::Builder::new().name("firn-nbd-accept".into());
        let thread = Some(thread.spawn(accept)?);
        Ok(Self { shared, listener, thread, path })
    }
}

impl Drop for NbdServer {
    /// Ends all connections. QEMU repeats unacknowledged requests to the next server. This object
    /// serves the disks no more.
    fn drop(&mut self) {
        if let Some(path) = &self.path {
            // Another process may have removed it.
            let _ = fs::remove_file(path);
        }
        self.shared.lock_clients().is_stopping = true;
        let _ = rustix::net::shutdown(&self.listener, rustix::net::Shutdown::Both);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
        // From here on no clients are added.
        let threads = {
            let mut clients = self.shared.lock_clients();
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

impl ServerState {
    fn lock_clients(&self) -> MutexGuard<'_, ClientTable> {
        self.clients.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn check_peer(&self, stream: &UnixStream) -> io::Result<()> {
        let Some(client) = self.client else { return Ok(()) };
        let peer = rustix::net::sockopt::socket_peercred(stream)?.pid.as_raw_nonzero().get();
        match peer == client {
            true => Ok(()),
            false => Err(io::Error::other(format!("it is process {peer}, not {client}"))),
        }
    }

    fn add_client(self: &Arc<Self>, stream: UnixStream) -> io::Result<()> {
        self.check_peer(&stream)?;
        let mut clients = self.lock_clients();
        clients.threads.retain(|thread| !thread.is_finished());
        if clients.is_stopping || clients.streams.len() >= CLIENTS_MAX {
            return Err(io::Error::other(format!("there are {CLIENTS_MAX} clients already")));
        }
        let number = clients.next;
        clients.next += 1;
        clients.streams.insert(number, stream.try_clone()?);
        // If the thread can't be spawned, its closure is dropped at once, which locks the clients.
        drop(clients);
        let leaving = ClientGuard { shared: Arc::clone(self), number };
        let thread = thread::Builder::new().name("firn-nbd".into());
        let thread = thread.spawn(move || {
            if let Err(error) = connection::serve_client(&stream, &leaving.shared.exports) {
                tracing::warn!("a client of a disk is gone: {error}");
            }
        });
        self.lock_clients().threads.push(thread?);
        Ok(())
    }
}

/// Removes a client when its thread ends, however it ends.
struct ClientGuard {
    shared: Arc<ServerState>,
    number: u64,
}

impl Drop for ClientGuard {
    fn drop(&mut self) {
        if let Some(stream) = self.shared.lock_clients().streams.remove(&self.number) {
            let _ = stream.shutdown(Shutdown::Both);
        }
    }
}

fn accept_clients(listener: &UnixListener, shared: &Arc<ServerState>) {
    loop {
        let added = listener.accept().and_then(|(stream, _)| shared.add_client(stream));
        if shared.lock_clients().is_stopping {
            return;
        }
        if let Err(error) = added {
            tracing::warn!("a client of a disk is refused: {error}");
            thread::sleep(ACCEPT_RETRY_INTERVAL);
        }
    }
}

/// Binds a socket with an abstract name in the network namespace of a process, in which alone such
/// a name means something.
fn bind_where(pid: i32, name: &str) -> io::Result<UnixListener> {
    let address = SocketAddr::from_abstract_name(name)?;
    let (own, theirs) = ("/proc/self/ns/net", format!("/proc/{pid}/ns/net"));
    if fs::read_link(own)? == fs::read_link(&theirs)? {
        return UnixListener::bind_addr(&address);
    }
    let namespace = fs::File::open(theirs)?;
    // A thread of its own, because it stays in that namespace.
    let bind = move || {
        let kind = Some(LinkNameSpaceType::Network);
        rustix::thread::move_into_link_name_space(namespace.as_fd(), kind)?;
        UnixListener::bind_addr(&address)
    };
    let thread = thread::Builder::new().name("firn-nbd-bind".into()).spawn(bind)?;
    thread.join().unwrap_or_else(|_| Err(io::Error::other("the thread that binds it died")))
}

/// Binds a socket that no other user can use at any time under that name.
fn bind_private(path: &Path) -> io::Result<UnixListener> {
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
