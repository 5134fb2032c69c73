//! Backup server: receives states and changes from applications, and writes a log for each.

use std::collections::HashMap;
use std::io::{self, Write as _};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use rustls::{ServerConfig, ServerConnection, StreamOwned};

use super::error::BackupError;
use super::record::{Header, RecordKind, encode_state};
use super::tls::Identity;
use super::wire::{self, Message};
use super::{Compression, Fsync, Image, Log};
use crate::sys::fork::Owner;

/// A connection on which no bytes arrive for this time during the greeting is closed.
const GREETING: Duration = Duration::from_secs(30);
/// The maximum count of open connections.
const CONNECTIONS_MAX: usize = 256;

/// The options of a backup server.
#[derive(Clone, Debug)]
pub struct ServerOptions {
    /// The address to listen on, `HOST:PORT`.
    pub listen: String,
    /// The server's certificate and key, and the authority of the applications' certificates.
    pub identity: Identity,
    /// The directory of the logs: `NAME.log` for the session NAME.
    pub directory: PathBuf,
    /// When logs are forced to disk.
    pub fsync: Fsync,
}

/// A log, its state, and the connection that may write it.
pub(super) struct Store {
    pub(super) log: Log,
    pub(super) image: Image,
    connection: u64,
    synced: Instant,
    /// The state in memory is no longer valid; the log has it.
    broken: bool,
}

#[derive(Default)]
struct Shared {
    stores: Mutex<HashMap<String, Arc<Mutex<Option<Store>>>>>,
    open: Mutex<HashMap<u64, TcpStream>>,
    next: AtomicU64,
    closing: AtomicBool,
}

/// A backup server. Dropping it ends all connections.
pub struct Server {
    shared: Arc<Shared>,
    address: SocketAddr,
    thread: Option<JoinHandle<()>>,
    owner: Owner,
}

impl Server {
    /// Starts a server, which listens in a thread of its own.
    ///
    /// # Errors
    /// If the address or the identity cannot be used.
    pub fn start(options: ServerOptions) -> Result<Self, BackupError> {
        let config = options.identity.server()?;
        let lost = |source| BackupError::Connection { address: options.listen.clone(), source };
        let listener = TcpListener::bind(&options.listen).map_err(lost)?;
        let owner = Owner::this_process().map_err(|errno| lost(errno.into()))?;
        let address = listener.local_addr().map_err(lost)?;
        let shared = Arc::new(Shared::default());
        let accepting = shared.clone();
        let work = {
            let options = options.clone();
            move || accept(&listener, &accepting, &config, &options)
        };
        let thread = thread::Builder::new().name("firn-app-accept".into()).spawn(work);
        Ok(Self { shared, address, thread: Some(thread.map_err(lost)?), owner })
    }

    /// The address it listens on.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// The process that runs the server.
    pub(super) fn owner(&self) -> Owner {
        self.owner
    }

    /// Ends all connections, and returns the log and state of a session.
    pub(super) fn take(mut self, name: &str) -> Option<Store> {
        self.close();
        let store = locked(&self.shared.stores).remove(name)?;
        locked(&store).take()
    }

    fn close(&mut self) {
        if !self.owner.is_here() {
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
        for stream in locked(&self.shared.open).values() {
            let _ = stream.shutdown(Shutdown::Both);
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.close();
    }
}

impl std::fmt::Debug for Server {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("BackupServer").field("address", &self.address).finish_non_exhaustive()
    }
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn accept(
    listener: &TcpListener,
    shared: &Arc<Shared>,
    config: &Arc<ServerConfig>,
    options: &ServerOptions,
) {
    while let Ok((socket, _)) = listener.accept() {
        if shared.closing.load(Ordering::Acquire) {
            return;
        }
        let number = shared.next.fetch_add(1, Ordering::Relaxed) + 1;
        let Ok(copy) = socket.try_clone() else { continue };
        let mut open = locked(&shared.open);
        if open.len() >= CONNECTIONS_MAX {
            continue;
        }
        open.insert(number, copy);
        drop(open);
        let connection = Connection { number, shared: shared.clone(), options: options.clone() };
        let config = config.clone();
        let serve = move || connection.serve(socket, config);
        // If no thread starts, the connection is closed, and the peer retries.
        let _ = thread::Builder::new().name("firn-app-serve".into()).spawn(serve);
    }
}

/// One connection of an application.
struct Connection {
    number: u64,
    shared: Arc<Shared>,
    options: ServerOptions,
}

impl Drop for Connection {
    fn drop(&mut self) {
        locked(&self.shared.open).remove(&self.number);
    }
}

type Stream = StreamOwned<ServerConnection, TcpStream>;

impl Connection {
    fn serve(&self, socket: TcpStream, config: Arc<ServerConfig>) {
        let Ok(mut stream) = greet(socket, config) else { return };
        // The peer is sent the reason for the end of a connection, but not before it is
        // authenticated.
        let Err(error) = self.converse(&mut stream) else { return };
        if stream.conn.is_handshaking() {
            return;
        }
        let _ = wire::send(&mut stream, &Message::Error(error.to_string()));
        let _ = stream.flush();
    }

    fn converse(&self, stream: &mut Stream) -> Result<(), BackupError> {
        let Message::Hello { version, flags, name } = self.receive(stream)? else {
            return Err(BackupError::Malformed("the first message is no greeting"));
        };
        if version != wire::VERSION {
            return Err(BackupError::Malformed("the peer uses another protocol version"));
        }
        let store = self.store(&name)?;
        let sequence = self.with(&store, |store| {
            store.connection = self.number;
            Ok(store.image.sequence())
        })?;
        self.send(stream, &Message::Acknowledge(sequence))?;
        // A connection may be silent for as long as its application is.
        stream.sock.set_read_timeout(None).map_err(|error| self.lost(error))?;
        loop {
            match self.receive(stream)? {
                Message::Get => {
                    let record = self
                        .with(&store, |store| Ok(encode_state(&store.image, Compression::Lz4)))?;
                    wire::send_record(stream, &record).map_err(|error| self.lost(error))?;
                    stream.flush().map_err(|error| self.lost(error))?;
                }
                Message::Record { header, payload, bytes } => {
                    let replace = flags & wire::REPLACE != 0;
                    self.with(&store, |store| self.put(store, &header, &payload, &bytes, replace))?;
                }
                Message::Flush => {
                    let sequence = self.with(&store, |store| self.settle(store))?;
                    self.send(stream, &Message::Acknowledge(sequence))?;
                }
                _ => return Err(BackupError::Malformed("a backup does not accept this message")),
            }
        }
    }

    fn lost(&self, source: io::Error) -> BackupError {
        BackupError::Connection { address: self.options.listen.clone(), source }
    }

    fn receive(&self, stream: &mut Stream) -> Result<Message, BackupError> {
        wire::receive(stream).map_err(|error| self.lost(error))
    }

    fn send(&self, stream: &mut Stream, message: &Message) -> Result<(), BackupError> {
        wire::send(stream, message).and_then(|()| stream.flush()).map_err(|error| self.lost(error))
    }

    /// The store of a session. The first request for it opens its log.
    fn store(&self, name: &str) -> Result<Arc<Mutex<Option<Store>>>, BackupError> {
        let plain = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
        if name.is_empty() || name.starts_with('.') || !name.chars().all(plain) {
            return Err(BackupError::Refused("a session's name has only letters, digits, - _ .".into()));
        }
        let mut stores = locked(&self.shared.stores);
        if let Some(store) = stores.get(name).filter(|store| locked(store).is_some()) {
            return Ok(store.clone());
        }
        let path = self.options.directory.join(format!("{name}.log"));
        let (log, image) = Log::open(&path, name)?;
        let store =
            Store { log, image, connection: self.number, synced: Instant::now(), broken: false };
        let store = Arc::new(Mutex::new(Some(store)));
        stores.insert(name.to_owned(), store.clone());
        Ok(store)
    }

    /// Calls `work` with the store, if this connection is the newest one of the session.
    fn with<T>(
        &self,
        store: &Mutex<Option<Store>>,
        work: impl FnOnce(&mut Store) -> Result<T, BackupError>,
    ) -> Result<T, BackupError> {
        let mut slot = locked(store);
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

    fn put(
        &self,
        store: &mut Store,
        header: &Header,
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
            RecordKind::State => Image::default(),
            // Moved out, so that an error in the middle leaves no state that no transaction
            // committed.
            RecordKind::Change => std::mem::take(&mut store.image),
        };
        let applied = image.apply(header.kind, header.sequence, payload);
        let written = applied.and_then(|()| match header.kind {
            RecordKind::State => store.log.replace(bytes),
            RecordKind::Change => store.log.append(bytes),
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

    fn settle(&self, store: &mut Store) -> Result<u64, BackupError> {
        let due = match self.options.fsync {
            Fsync::EveryCommit => true,
            Fsync::Interval(time) => store.synced.elapsed() >= time,
            Fsync::Never => false,
        };
        if due {
            store.log.sync()?;
            store.synced = Instant::now();
        }
        store.log.compact_if_large(&store.image, Compression::Lz4)?;
        Ok(store.image.sequence())
    }
}

fn greet(socket: TcpStream, config: Arc<ServerConfig>) -> io::Result<Stream> {
    socket.set_nodelay(true)?;
    socket.set_read_timeout(Some(GREETING))?;
    socket.set_write_timeout(Some(GREETING))?;
    rustix::net::sockopt::set_socket_keepalive(&socket, true)?;
    let tls = ServerConnection::new(config).map_err(io::Error::other)?;
    Ok(StreamOwned::new(tls, socket))
}
