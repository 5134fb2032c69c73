//! Backup server: receives states and changes from applications, and writes a log for each.

use std::collections::HashMap;
use std::fs;
use std::io::{self, Write as _};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use rustls::{ServerConfig, ServerConnection, StreamOwned};

use super::error::BackupError;
use super::image::ApplicationState;
use super::log::ApplicationLog;
use super::record::{RecordHeader, RecordKind, encode_state};
use super::settings::{Compression, FsyncPolicy};
use super::tls::TlsIdentity;
use super::wire::{self, BackupMessage};
use crate::sys::fork::OwnerProcess;

/// A connection on which no bytes arrive for this time during the greeting is closed.
const GREETING_TIMEOUT: Duration = Duration::from_secs(30);
/// The maximum count of open connections.
const CONNECTIONS_MAX: usize = 256;

/// The options of a backup server.
#[derive(Clone, Debug)]
pub struct BackupServerOptions {
    /// The address to listen on, `HOST:PORT`.
    pub listen: String,
    /// The server's certificate and key, and the authority of the applications' certificates.
    pub identity: TlsIdentity,
    /// The directory of the logs: `NAME.log` for the session NAME.
    pub directory: PathBuf,
    /// When logs are forced to disk.
    pub fsync: FsyncPolicy,
}

/// A log, its state, and the connection that may write it.
pub(super) struct SessionStore {
    pub(super) log: ApplicationLog,
    pub(super) image: ApplicationState,
    connection: u64,
    synced: Instant,
    /// The state in memory is no longer valid; the log has it.
    broken: bool,
}

#[derive(Default)]
struct BackupServerState {
    stores: Mutex<HashMap<String, Arc<Mutex<Option<SessionStore>>>>>,
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
}

impl BackupServer {
    /// Starts a server, which listens in a thread of its own.
    ///
    /// # Errors
    /// If the address, the identity or the directory cannot be used.
    pub fn start(options: BackupServerOptions) -> Result<Self, BackupError> {
        let config = options.identity.server_config()?;
        check_directory(&options.directory)?;
        let lost = |source| BackupError::Connection { address: options.listen.clone(), source };
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
        Ok(Self { shared, address, thread: Some(thread.map_err(lost)?), owner })
    }

    /// The address it listens on.
    pub fn address(&self) -> SocketAddr {
        self.address
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
        for stream in lock_ignoring_poison(&self.shared.open).values() {
            let _ = stream.shutdown(Shutdown::Both);
        }
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

/// One connection of an application.
struct LogConnection {
    number: u64,
    shared: Arc<BackupServerState>,
    options: BackupServerOptions,
}

impl Drop for LogConnection {
    fn drop(&mut self) {
        lock_ignoring_poison(&self.shared.open).remove(&self.number);
    }
}

type ServerTlsStream = StreamOwned<ServerConnection, TcpStream>;

impl LogConnection {
    fn serve_connection(&self, socket: TcpStream, config: Arc<ServerConfig>) {
        let Ok(mut stream) = accept_tls(socket, config) else { return };
        // The peer is sent the reason for the end of a connection, but not before it is
        // authenticated.
        let Err(error) = self.serve_messages(&mut stream) else { return };
        if stream.conn.is_handshaking() {
            return;
        }
        let _ = wire::send_message(&mut stream, &BackupMessage::Error(error.to_string()));
        let _ = stream.flush();
    }

    fn serve_messages(&self, stream: &mut ServerTlsStream) -> Result<(), BackupError> {
        let BackupMessage::Hello { version, flags, name } = self.receive_message(stream)? else {
            return Err(BackupError::Malformed("the first message is no greeting"));
        };
        if version != wire::VERSION {
            return Err(BackupError::Malformed("the peer uses another protocol version"));
        }
        let store = self.open_store(&name)?;
        let sequence = self.with_store(&store, |store| {
            store.connection = self.number;
            Ok(store.image.sequence())
        })?;
        self.send_message(stream, &BackupMessage::Acknowledge(sequence))?;
        // A connection may be silent for as long as its application is.
        stream.sock.set_read_timeout(None).map_err(|error| self.connection_error(error))?;
        loop {
            match self.receive_message(stream)? {
                BackupMessage::Get => {
                    let record = self.with_store(&store, |store| {
                        Ok(encode_state(&store.image, Compression::Lz4))
                    })?;
                    wire::send_record(stream, &record)
                        .map_err(|error| self.connection_error(error))?;
                    stream.flush().map_err(|error| self.connection_error(error))?;
                }
                BackupMessage::Record { header, payload, bytes } => {
                    let replace = flags & wire::REPLACE != 0;
                    self.with_store(&store, |store| {
                        self.apply_record(store, &header, &payload, &bytes, replace)
                    })?;
                }
                BackupMessage::Flush => {
                    let sequence = self.with_store(&store, |store| self.acknowledge(store))?;
                    self.send_message(stream, &BackupMessage::Acknowledge(sequence))?;
                }
                _ => return Err(BackupError::Malformed("a backup does not accept this message")),
            }
        }
    }

    fn connection_error(&self, source: io::Error) -> BackupError {
        BackupError::Connection { address: self.options.listen.clone(), source }
    }

    fn receive_message(&self, stream: &mut ServerTlsStream) -> Result<BackupMessage, BackupError> {
        wire::receive_message(stream).map_err(|error| self.connection_error(error))
    }

    fn send_message(
        &self,
        stream: &mut ServerTlsStream,
        message: &BackupMessage,
    ) -> Result<(), BackupError> {
        wire::send_message(stream, message)
            .and_then(|()| stream.flush())
            .map_err(|error| self.connection_error(error))
    }

    /// The store of a session. The first request for it opens its log.
    fn open_store(&self, name: &str) -> Result<Arc<Mutex<Option<SessionStore>>>, BackupError> {
        let plain = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
        if name.is_empty() || name.starts_with('.') || !name.chars().all(plain) {
            return Err(BackupError::Refused(
                "a session's name has only letters, digits, - _ .".into(),
            ));
        }
        let mut stores = lock_ignoring_poison(&self.shared.stores);
        if let Some(store) = stores.get(name).filter(|store| lock_ignoring_poison(store).is_some())
        {
            return Ok(store.clone());
        }
        let path = self.options.directory.join(format!("{name}.log"));
        let (log, image) = ApplicationLog::open(&path, name)?;
        let store = SessionStore {
            log,
            image,
            connection: self.number,
            synced: Instant::now(),
            broken: false,
        };
        let store = Arc::new(Mutex::new(Some(store)));
        stores.insert(name.to_owned(), store.clone());
        Ok(store)
    }

    /// Calls `work` with the store, if this connection is the newest one of the session.
    fn with_store<T>(
        &self,
        store: &Mutex<Option<SessionStore>>,
        work: impl FnOnce(&mut SessionStore) -> Result<T, BackupError>,
    ) -> Result<T, BackupError> {
        let mut slot = lock_ignoring_poison(store);
        let closing = self.shared.closing.load(Ordering::Acquire);
        let Some(store) = slot.as_mut().filter(|_| !closing) else {
            return Err(BackupError::Refused("the standby has taken over".into()));
        };
        if store.connection > self.number {
            return Err(BackupError::Refused("the session has a newer connection".into()));
        }
        let result = work(store);
        if store.broken {
            *slot = None;
        }
        result
    }

    fn apply_record(
        &self,
        store: &mut SessionStore,
        header: &RecordHeader,
        payload: &[u8],
        bytes: &[u8],
        replace: bool,
    ) -> Result<(), BackupError> {
        if header.kind == RecordKind::State && header.sequence < store.image.sequence() && !replace
        {
            return Err(BackupError::Refused(format!(
                "it has transaction {}, and the peer offers the older {}",
                store.image.sequence(),
                header.sequence
            )));
        }
        let mut image = match header.kind {
            RecordKind::State => ApplicationState::default(),
            // Moved out, so that an error in the middle leaves no state that no transaction
            // committed.
            RecordKind::Change => std::mem::take(&mut store.image),
        };
        let applied = image.apply_record(header.kind, header.sequence, payload);
        let written = applied.and_then(|()| match header.kind {
            RecordKind::State => store.log.replace_by_record(bytes),
            RecordKind::Change => store.log.append_record(bytes),
        });
        match written {
            Ok(()) => store.image = image,
            Err(error) => {
                store.broken |= header.kind == RecordKind::Change;
                return Err(error);
            }
        }
        Ok(())
    }

    fn acknowledge(&self, store: &mut SessionStore) -> Result<u64, BackupError> {
        let due = match self.options.fsync {
            FsyncPolicy::EveryCommit => true,
            FsyncPolicy::Interval(time) => store.synced.elapsed() >= time,
            FsyncPolicy::Never => false,
        };
        if due {
            store.log.sync_file()?;
            store.synced = Instant::now();
        }
        store.log.compact_if_large(&store.image, Compression::Lz4)?;
        Ok(store.image.sequence())
    }
}

fn accept_tls(socket: TcpStream, config: Arc<ServerConfig>) -> io::Result<ServerTlsStream> {
    socket.set_nodelay(true)?;
    socket.set_read_timeout(Some(GREETING_TIMEOUT))?;
    socket.set_write_timeout(Some(GREETING_TIMEOUT))?;
    rustix::net::sockopt::set_socket_keepalive(&socket, true)?;
    let tls = ServerConnection::new(config).map_err(io::Error::other)?;
    Ok(StreamOwned::new(tls, socket))
}
