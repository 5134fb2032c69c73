//! One connection of an application to a backup server.

use std::io::{self, Write as _};
use std::net::TcpStream;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use rustls::{ServerConfig, ServerConnection, StreamOwned};

use super::store::SessionStore;
use super::{BackupServerOptions, BackupServerState, SessionSlot, lock_ignoring_poison};
use crate::backup::access::{self, PeerCertificate, Roles};
use crate::backup::error::BackupError;
use crate::backup::settings::Compression;
use crate::backup::transaction::encode_state;
use crate::backup::wire::{self, BackupMessage, PeerError};

/// A connection on which no bytes arrive for this time during the greeting is closed.
const GREETING_TIMEOUT: Duration = Duration::from_secs(30);

type ServerTlsStream = StreamOwned<ServerConnection, TcpStream>;

/// One connection of an application.
pub(super) struct LogConnection {
    pub(super) number: u64,
    pub(super) shared: Arc<BackupServerState>,
    pub(super) options: BackupServerOptions,
}

/// A session that a connection has opened.
struct OpenedSession {
    slot: SessionSlot,
    /// 0: the connection only reads.
    generation: u64,
    roles: Roles,
}

impl Drop for LogConnection {
    fn drop(&mut self) {
        lock_ignoring_poison(&self.shared.open).remove(&self.number);
    }
}

impl LogConnection {
    pub(super) fn serve_connection(&self, socket: TcpStream, config: Arc<ServerConfig>) {
        let Ok(mut stream) = accept_tls(socket, config) else { return };
        // The peer is sent the reason for the end of a connection, but not before it is
        // authenticated.
        let Err(error) = self.serve_messages(&mut stream) else { return };
        if stream.conn.is_handshaking() {
            return;
        }
        let reason = BackupMessage::Error(PeerError::from_error(&error));
        let _ = wire::send_message(&mut stream, &reason);
        stream.conn.send_close_notify();
        let _ = stream.flush();
    }

    fn serve_messages(&self, stream: &mut ServerTlsStream) -> Result<(), BackupError> {
        let session = self.receive_greeting(stream)?;
        let id = self.with_store(&session, |store| Ok(store.image.id()))?;
        self.send_message(stream, &BackupMessage::Acknowledge(id))?;
        // A connection may be silent for as long as its application is.
        stream.sock.set_read_timeout(None).map_err(|error| self.connection_error(error))?;
        loop {
            match self.receive_message(stream)? {
                BackupMessage::Get => self.send_state(stream, &session)?,
                BackupMessage::Record { header, payload, record } if session.generation > 0 => {
                    let (generation, can_replace) = (session.generation, session.roles.take_over);
                    self.with_store(&session, |store| {
                        store.store_record(&header, &payload, &record, generation, can_replace)
                    })?;
                }
                BackupMessage::Flush if session.generation > 0 => {
                    let id = self.with_store(&session, |store| {
                        store.make_safe(self.options.fsync)?;
                        Ok(store.image.id())
                    })?;
                    self.send_message(stream, &BackupMessage::Acknowledge(id))?;
                }
                _ => return Err(BackupError::Malformed("a backup does not accept this message")),
            }
        }
    }

    fn receive_greeting(&self, stream: &mut ServerTlsStream) -> Result<OpenedSession, BackupError> {
        let BackupMessage::Hello { version, generation, name } = self.receive_message(stream)?
        else {
            return Err(BackupError::Malformed("the first message is no greeting"));
        };
        if version != wire::VERSION {
            return Err(BackupError::Malformed("the peer uses another protocol version"));
        }
        let certificates = stream.conn.peer_certificates().unwrap_or_default();
        let certificate = certificates
            .first()
            .ok_or_else(|| BackupError::Refused("the peer has no certificate".into()))?;
        self.open_session(&name, generation, &PeerCertificate::from_der(certificate)?)
    }

    fn send_state(
        &self,
        stream: &mut ServerTlsStream,
        session: &OpenedSession,
    ) -> Result<(), BackupError> {
        if !session.roles.read {
            let why = "the certificate lacks the role read, which fetching the state needs";
            return Err(BackupError::Refused(why.into()));
        }
        // A copy: the writer need not wait for a reader.
        let state = self.with_store(session, |store| Ok(store.image.clone()))?;
        encode_state(&state, Compression::Lz4, |record| wire::send_record(stream, record))
            .and_then(|()| stream.flush())
            .map_err(|error| self.connection_error(error))
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

    /// Opens a session for a certificate that may use it. The first connection opens its log.
    fn open_session(
        &self,
        name: &str,
        generation: u64,
        peer: &PeerCertificate,
    ) -> Result<OpenedSession, BackupError> {
        check_name(name)?;
        let (directory, table) = (&self.options.directory, self.options.sessions.as_deref());
        let is_writer = generation > 0;
        // One connection at a time: two certificates can't both create a session.
        let mut stores = lock_ignoring_poison(&self.shared.stores);
        let access = access::authorize(directory, table, name, peer, is_writer)?;
        let path = directory.join(format!("{name}.log"));
        if access.is_new_owner && !path.exists() {
            access::write_owner(directory, name, peer.key())?;
        }
        let slot = match stores.get(name).filter(|slot| lock_ignoring_poison(slot).is_some()) {
            Some(slot) => slot.clone(),
            None => {
                let store = SessionStore::open(&path, name)?;
                let slot = Arc::new(Mutex::new(Some(store)));
                stores.insert(name.to_owned(), slot.clone());
                slot
            }
        };
        let session = OpenedSession { slot, generation, roles: access.roles };
        if is_writer {
            self.use_store(&session, |store| store.admit_writer(generation, self.number))?;
        }
        if access.is_new_owner {
            access::write_owner(directory, name, peer.key())?;
        }
        Ok(session)
    }

    /// Calls `work` with the store, if this connection may still use it.
    fn with_store<T>(
        &self,
        session: &OpenedSession,
        work: impl FnOnce(&mut SessionStore) -> Result<T, BackupError>,
    ) -> Result<T, BackupError> {
        self.use_store(session, |store| {
            if session.generation > 0 {
                store.check_writer(session.generation, self.number)?;
            }
            work(store)
        })
    }

    fn use_store<T>(
        &self,
        session: &OpenedSession,
        work: impl FnOnce(&mut SessionStore) -> Result<T, BackupError>,
    ) -> Result<T, BackupError> {
        let mut slot = lock_ignoring_poison(&session.slot);
        let is_closing = self.shared.closing.load(Ordering::Acquire);
        let Some(store) = slot.as_mut().filter(|_| !is_closing) else {
            let why = match is_closing {
                true => "the standby has taken over",
                false => "the log is being read again",
            };
            return Err(BackupError::Failed(why.into()));
        };
        let result = work(store);
        if store.is_broken {
            *slot = None;
        }
        result
    }
}

fn check_name(name: &str) -> Result<(), BackupError> {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
    match name.is_empty() || name.starts_with('.') || !name.chars().all(is_plain) {
        true => {
            Err(BackupError::Refused("a session's name has only letters, digits, - _ .".into()))
        }
        false => Ok(()),
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
