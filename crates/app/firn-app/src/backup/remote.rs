//! A target on another host: sends commits to a backup process by TLS.

use std::io::{self, Write as _};
use std::net::{Shutdown, TcpStream, ToSocketAddrs as _};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use rustls::{ClientConfig, ClientConnection, StreamOwned};

use super::error::BackupError;
use super::helper::BackupConnection;
use super::image::{ApplicationState, StagedState, StateId};
use super::record::RecordKind;
use super::settings::Compression;
use super::tls::{self, TlsIdentity};
use super::transaction::{Commit, encode_state};
use super::wire::{self, BackupMessage};

/// The limits of the time to wait for a reply before the connection counts as lost.
const REPLY_TIMEOUTS: [Duration; 2] = [Duration::from_secs(1), Duration::from_secs(30)];
/// Bytes of a state that a backup stores in a second, at least: it gets more time for a larger one.
const STORED_PER_SECOND_MIN: u64 = 8 << 20;
/// The interval between checks of a connection on which nothing is sent.
const CHECK_INTERVAL: Duration = Duration::from_millis(500);
/// A peer that does not answer for this time is lost, also while nothing is sent.
const KEEPALIVE_IDLE: Duration = Duration::from_secs(10);
const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(3);
const KEEPALIVE_PROBES: u32 = 3;

type ClientTlsStream = StreamOwned<ClientConnection, TcpStream>;
/// A handle of the open socket, by which another thread can shut it down.
pub(crate) type SocketHandle = Arc<Mutex<Option<TcpStream>>>;

/// A connection to a backup process.
pub(crate) struct RemoteTarget {
    address: String,
    session: String,
    config: Arc<ClientConfig>,
    generation: u64,
    timeout: Duration,
    compression: Compression,
    stream: Option<ClientTlsStream>,
    socket: SocketHandle,
    /// The state that the backup had when the session was opened, until the helper has read it.
    opened: Option<StateId>,
}

impl RemoteTarget {
    /// A target that is not connected yet.
    ///
    /// # Errors
    /// If the certificates cannot be used.
    pub(crate) fn new(
        address: &str,
        session: &str,
        identity: &TlsIdentity,
        timeout: Duration,
        compression: Compression,
    ) -> Result<Self, BackupError> {
        Ok(Self {
            address: address.to_owned(),
            session: session.to_owned(),
            config: identity.client_config()?,
            generation: 0,
            timeout: timeout.clamp(REPLY_TIMEOUTS[0], REPLY_TIMEOUTS[1]),
            compression,
            stream: None,
            socket: SocketHandle::default(),
            opened: None,
        })
    }

    /// Connects as the session of this generation: older ones can't write the backup any more.
    pub(crate) fn open(&mut self, generation: u64) -> Result<StateId, BackupError> {
        self.generation = generation;
        let id = self.reconnect()?;
        self.opened = Some(id);
        Ok(id)
    }

    /// Requests the state that the backup has.
    pub(crate) fn fetch_state(&mut self) -> Result<ApplicationState, BackupError> {
        let mut answer =
            self.exchange_messages(0, |stream| wire::send_message(stream, &BackupMessage::Get))?;
        let mut staged: Option<StagedState> = None;
        loop {
            let BackupMessage::Record { header, payload, .. } = answer else {
                return Err(BackupError::Refused("it does not reply with its state".into()));
            };
            if header.kind != RecordKind::State {
                return Err(BackupError::Malformed("a record that is no state"));
            }
            let before = ApplicationState::default();
            let mut now = staged.take().map_or_else(|| StagedState::begin(&before, &header), Ok)?;
            now.apply_record(&header, &payload)?;
            if !header.is_continued {
                return Ok(now.into_state());
            }
            staged = Some(now);
            answer = self.exchange_messages(0, |_| Ok(()))?;
        }
    }

    /// The handle of the socket.
    pub(crate) fn socket(&self) -> SocketHandle {
        self.socket.clone()
    }

    fn connection_error(&self, source: io::Error) -> BackupError {
        let cause = source.get_ref().and_then(|error| error.downcast_ref::<rustls::Error>());
        match cause {
            Some(error) => BackupError::Tls(format!("{}: {error}", self.address)),
            None => BackupError::Connection { address: self.address.clone(), source },
        }
    }

    fn disconnect(&mut self) {
        self.stream = None;
        *self.socket.lock().unwrap_or_else(PoisonError::into_inner) = None;
    }

    fn reconnect(&mut self) -> Result<StateId, BackupError> {
        self.disconnect();
        self.stream = Some(self.open_stream().map_err(|error| self.connection_error(error))?);
        let hello = BackupMessage::Hello {
            version: wire::VERSION,
            generation: self.generation,
            name: self.session.clone(),
        };
        match self.exchange_messages(0, |stream| wire::send_message(stream, &hello))? {
            BackupMessage::Acknowledge(id) => Ok(id),
            _ => Err(BackupError::Refused("it does not reply to a greeting".into())),
        }
    }

    fn open_stream(&self) -> io::Result<ClientTlsStream> {
        let name = tls::server_name(&self.address).map_err(io::Error::other)?;
        let mut last = io::Error::new(io::ErrorKind::NotFound, "no such host");
        for address in self.address.to_socket_addrs()? {
            match TcpStream::connect_timeout(&address, self.timeout) {
                Ok(socket) => {
                    self.prepare_socket(&socket)?;
                    let tls = ClientConnection::new(self.config.clone(), name);
                    return Ok(StreamOwned::new(tls.map_err(io::Error::other)?, socket));
                }
                Err(error) => last = error,
            }
        }
        Err(last)
    }

    fn prepare_socket(&self, socket: &TcpStream) -> io::Result<()> {
        use rustix::net::sockopt;
        socket.set_nodelay(true)?;
        socket.set_write_timeout(Some(self.timeout))?;
        sockopt::set_socket_keepalive(socket, true)?;
        sockopt::set_tcp_keepidle(socket, KEEPALIVE_IDLE)?;
        sockopt::set_tcp_keepintvl(socket, KEEPALIVE_INTERVAL)?;
        sockopt::set_tcp_keepcnt(socket, KEEPALIVE_PROBES)?;
        let handle = socket.try_clone()?;
        *self.socket.lock().unwrap_or_else(PoisonError::into_inner) = Some(handle);
        Ok(())
    }

    /// Sends messages, and receives the reply. `len` is the size of what the backup has to store
    /// before it replies.
    fn exchange_messages(
        &mut self,
        len: u64,
        send: impl FnOnce(&mut ClientTlsStream) -> io::Result<()>,
    ) -> Result<BackupMessage, BackupError> {
        let timeout = self.timeout + Duration::from_secs(len / STORED_PER_SECOND_MIN);
        let answer = match &mut self.stream {
            None => Err(io::ErrorKind::NotConnected.into()),
            Some(stream) => exchange_on(stream, timeout, send),
        };
        match answer.map_err(|error| self.connection_error(name_loss(error)))? {
            BackupMessage::Error(error) => Err(error.into()),
            message => Ok(message),
        }
    }

    /// Sends records, and waits until they are stored safely.
    fn send_records(
        &mut self,
        id: StateId,
        len: u64,
        send: impl FnOnce(&mut ClientTlsStream) -> io::Result<()>,
    ) -> Result<(), BackupError> {
        let answer = self.exchange_messages(len, |stream| {
            send(stream)?;
            wire::send_message(stream, &BackupMessage::Flush)
        })?;
        match answer {
            BackupMessage::Acknowledge(stored) if stored == id => Ok(()),
            _ => Err(BackupError::Failed("it acknowledges another transaction".into())),
        }
    }
}

impl BackupConnection for RemoteTarget {
    fn connect(&mut self) -> Result<Option<StateId>, BackupError> {
        match self.opened.take() {
            Some(id) => Ok(Some(id)),
            None => self.reconnect().map(Some),
        }
    }

    fn append_commits(&mut self, commits: &[Commit]) -> Result<(), BackupError> {
        let Some(last) = commits.last() else { return Ok(()) };
        let len = commits.iter().map(Commit::byte_count).sum();
        let codec = self.compression;
        self.send_records(last.id, len, |stream| {
            commits.iter().try_for_each(|commit| {
                commit.encode(codec, |record| wire::send_record(stream, record))
            })
        })
    }

    fn replace_state(&mut self, state: &ApplicationState) -> Result<(), BackupError> {
        let codec = self.compression;
        self.send_records(state.id(), state.byte_count(), |stream| {
            encode_state(state, codec, |record| wire::send_record(stream, record))
        })
    }

    fn idle_timeout(&self) -> Duration {
        CHECK_INTERVAL
    }

    /// A backup sends nothing that was not requested, but the reason for the end of a connection.
    fn do_idle_work(&mut self) -> Result<(), BackupError> {
        let Some(stream) = &self.stream else { return Ok(()) };
        if is_silent(&stream.sock).map_err(|error| self.connection_error(error))? {
            return Ok(());
        }
        self.exchange_messages(0, |_| Ok(()))?;
        Err(BackupError::Failed("it sends a message that was not requested".into()))
    }

    fn finish(&mut self) -> Result<(), BackupError> {
        self.disconnect();
        Ok(())
    }
}

fn exchange_on(
    stream: &mut ClientTlsStream,
    timeout: Duration,
    send: impl FnOnce(&mut ClientTlsStream) -> io::Result<()>,
) -> io::Result<BackupMessage> {
    stream.sock.set_read_timeout(Some(timeout))?;
    let sent = send(stream).and_then(|()| stream.flush());
    match sent {
        Ok(()) => wire::receive_message(stream),
        // The backup may have sent the reason before it closed the connection.
        Err(error) => match wire::receive_message(stream) {
            Ok(reason @ BackupMessage::Error(_)) => Ok(reason),
            _ => Err(error),
        },
    }
}

/// The kernel reports a reply that does not arrive in time as `EAGAIN`, and TLS reports an end
/// without a farewell in a sentence for programmers.
fn name_loss(error: io::Error) -> io::Error {
    match error.kind() {
        io::ErrorKind::UnexpectedEof => io::Error::new(error.kind(), "it ended the connection"),
        io::ErrorKind::WouldBlock => io::Error::new(io::ErrorKind::TimedOut, "no reply in time"),
        _ => error,
    }
}

/// Whether nothing has arrived, also no end of the connection.
fn is_silent(socket: &TcpStream) -> io::Result<bool> {
    socket.set_nonblocking(true)?;
    let peeked = socket.peek(&mut [0]);
    socket.set_nonblocking(false)?;
    match peeked {
        Ok(_) => Ok(false),
        Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(true),
        Err(error) => Err(error),
    }
}

/// Ends a connection on which another thread waits.
pub(crate) fn cut_connection(socket: &SocketHandle) {
    if let Some(socket) = &*socket.lock().unwrap_or_else(PoisonError::into_inner) {
        // A connection that is closed already needs no cut.
        let _ = socket.shutdown(Shutdown::Both);
    }
}
