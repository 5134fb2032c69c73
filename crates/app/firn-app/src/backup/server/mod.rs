//! Backup server: receives states and changes from applications, and writes a log for each.

mod connection;
mod store;

use std::collections::HashMap;
use std::fs;
use std::io;
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};

use rustls::ServerConfig;

use self::connection::LogConnection;
use self::store::SessionStore;
use super::access::SessionTable;
use super::error::BackupError;
use super::settings::FsyncPolicy;
use super::tls::TlsIdentity;
use crate::sys::fork::OwnerProcess;

/// The maximum count of open connections.
const CONNECTIONS_MAX: usize = 256;

/// The options of a backup server.
#[derive(Clone, Debug)]
pub struct BackupServerOptions {
    listen: String,
    identity: TlsIdentity,
    directory: PathBuf,
    fsync: FsyncPolicy,
    sessions: Option<PathBuf>,
}

impl BackupServerOptions {
    /// A server that listens on `HOST:PORT`, and writes the logs `NAME.log` to a directory. The
    /// identity is the server's certificate and key, and the authority of the applications'
    /// certificates.
    pub fn new(
        listen: impl Into<String>,
        identity: TlsIdentity,
        directory: impl Into<PathBuf>,
    ) -> Self {
        let (listen, directory) = (listen.into(), directory.into());
        Self { listen, identity, directory, fsync: FsyncPolicy::EveryCommit, sessions: None }
    }

    /// Sets when logs are forced to disk. At every commit by default.
    pub fn fsync(mut self, policy: FsyncPolicy) -> Self {
        self.fsync = policy;
        self
    }

    /// Sets the table of permissions: a file in TOML that names the certificates that may use
    /// sessions. It is read for each connection. Without it the first certificate that creates a
    /// session owns it, and others are refused.
    ///
    /// ```toml
    /// [[permissions]]
    /// session = "ledger-*"
    /// certificate = "ledger.example"
    /// roles = ["read", "append", "take-over"]
    /// ```
    pub fn sessions(mut self, table: impl Into<PathBuf>) -> Self {
        self.sessions = Some(table.into());
        self
    }

    pub(super) fn fsync_policy(&self) -> FsyncPolicy {
        self.fsync
    }
}

/// The store of a session; `None` while its log must be read again.
type SessionSlot = Arc<Mutex<Option<SessionStore>>>;

#[derive(Default)]
struct BackupServerState {
    stores: Mutex<HashMap<String, SessionSlot>>,
    open: Mutex<HashMap<u64, TcpStream>>,
    next: AtomicU64,
    closing: AtomicBool,
}

/// A backup server. Dropping it ends all connections.
pub struct BackupServer {
    shared: Arc<BackupServerState>,
    address: SocketAddr,
    thread: Option<JoinHandle<()>>,
    owner: OwnerProcess,
    sessions: Option<PathBuf>,
}

impl BackupServer {
    /// Starts a server, which listens in a thread of its own.
    ///
    /// # Errors
    /// If the address, the identity or the directory cannot be used.
    pub fn start(options: BackupServerOptions) -> Result<Self, BackupError> {
        let config = options.identity.server_config()?;
        check_directory(&options.directory)?;
        options.sessions.as_deref().map(SessionTable::read).transpose()?;
        let listen = options.listen.clone();
        let lost = |source| BackupError::Connection { address: listen.clone(), source };
        let listener = TcpListener::bind(&options.listen).map_err(lost)?;
        let owner = OwnerProcess::this_process().map_err(|errno| lost(errno.into()))?;
        let address = listener.local_addr().map_err(lost)?;
        let shared = Arc::new(BackupServerState::default());
        let accepting = shared.clone();
        let work = {
            let options = options.clone();
            move || accept_connections(&listener, &accepting, &config, &options)
        };
        let thread = thread::Builder::new().name("firn-app-accept".into()).spawn(work);
        let (thread, sessions) = (Some(thread.map_err(lost)?), options.sessions);
        Ok(Self { shared, address, thread, owner, sessions })
    }

    /// The address it listens on.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Has the table of permissions apply to open connections, too: all are closed, and
    /// applications connect again.
    ///
    /// # Errors
    /// If the table cannot be used: then nothing is closed, and new connections are refused.
    pub fn reload(&self) -> Result<(), BackupError> {
        self.sessions.as_deref().map(SessionTable::read).transpose()?;
        self.close_connections();
        Ok(())
    }

    fn close_connections(&self) {
        for stream in lock_ignoring_poison(&self.shared.open).values() {
            let _ = stream.shutdown(Shutdown::Both);
        }
    }

    /// The process that runs the server.
    pub(super) fn owner(&self) -> OwnerProcess {
        self.owner
    }

    /// Ends all connections, and returns the log and state of a session.
    pub(super) fn take_store(mut self, name: &str) -> Option<SessionStore> {
        self.stop();
        let store = lock_ignoring_poison(&self.shared.stores).remove(name)?;
        lock_ignoring_poison(&store).take()
    }

    fn stop(&mut self) {
        if !self.owner.is_this_process() {
            // A child has no such thread, and the connections are its parent's.
            std::mem::forget(self.thread.take());
            return;
        }
        self.shared.closing.store(true, Ordering::Release);
        // The listener blocks in accept(2): this connection wakes it.
        let _ = TcpStream::connect(self.address);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
        self.close_connections();
    }
}

impl Drop for BackupServer {
    fn drop(&mut self) {
        self.stop();
    }
}

impl std::fmt::Debug for BackupServer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("BackupServer").field("address", &self.address).finish_non_exhaustive()
    }
}

/// Checks that logs can be made in it, before an application relies on that.
fn check_directory(path: &Path) -> Result<(), BackupError> {
    let failed =
        |source| BackupError::File { what: "cannot keep logs in", path: path.to_owned(), source };
    match fs::metadata(path).map_err(failed)?.is_dir() {
        true => Ok(()),
        false => Err(failed(io::ErrorKind::NotADirectory.into())),
    }
}

fn lock_ignoring_poison<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn accept_connections(
    listener: &TcpListener,
    shared: &Arc<BackupServerState>,
    config: &Arc<ServerConfig>,
    options: &BackupServerOptions,
) {
    while let Ok((socket, _)) = listener.accept() {
        if shared.closing.load(Ordering::Acquire) {
            return;
        }
        let number = shared.next.fetch_add(1, Ordering::Relaxed) + 1;
        let Ok(copy) = socket.try_clone() else { continue };
        let mut open = lock_ignoring_poison(&shared.open);
        if open.len() >= CONNECTIONS_MAX {
            continue;
        }
        open.insert(number, copy);
        drop(open);
        let connection = LogConnection { number, shared: shared.clone(), options: options.clone() };
        let config = config.clone();
        let serve = move || connection.serve_connection(socket, config);
        // If no thread starts, the connection is closed, and the peer retries.
        let _ = thread::Builder::new().name("firn-app-serve".into()).spawn(serve);
    }
}
