//! A backup process on another host: sends it transactions by TLS.

use std::io::{self, Write as _};
use std::net::{TcpStream, ToSocketAddrs as _};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use rustls::{ClientConfig, ClientConnection, StreamOwned};

use super::error::BackupError;
use super::helper::{BackupJob, BackupSink};
use super::image::ApplicationState;
use super::record::{RecordKind, encode_record, encode_state};
use super::settings::Compression;
use super::tls::{self, TlsIdentity};
use super::wire::{self, BackupMessage};

/// How long to wait for a reply before the connection counts as lost.
const REPLY_TIMEOUT: Duration = Duration::from_secs(30);
/// Interval between attempts to connect.
const RECONNECT_INTERVAL: Duration = Duration::from_millis(100);

type ClientTlsStream = StreamOwned<ClientConnection, TcpStream>;

/// A connection to a backup process, and the state that it should have.
pub(crate) struct RemoteBackup {
    address: String,
    name: String,
    config: Arc<ClientConfig>,
    patience: Duration,
    compression: Compression,
    stream: Option<ClientTlsStream>,
    image: ApplicationState,
}

impl RemoteBackup {
    /// Connects, and returns the sequence of the state that the backup has.
    pub(crate) fn open(
        address: &str,
        name: &str,
        identity: &TlsIdentity,
        patience: Duration,
        compression: Compression,
    ) -> Result<(Self, u64), BackupError> {
        let mut remote = Self {
            address: address.to_owned(),
            name: name.to_owned(),
            config: identity.client_config()?,
            patience,
            compression,
            stream: None,
            image: ApplicationState::default(),
        };
        let (stream, sequence) = remote.retry(|remote| remote.connect(0))?;
        remote.stream = Some(stream);
        Ok((remote, sequence))
    }

    /// Requests the state that the backup has.
    pub(crate) fn fetch_state(&mut self) -> Result<ApplicationState, BackupError> {
        let mut image = ApplicationState::default();
        let answer =
            self.exchange_messages(|stream| wire::send_message(stream, &BackupMessage::Get))?;
        let BackupMessage::Record { header, payload, .. } = answer else {
            return Err(BackupError::Refused("it does not reply with its state".into()));
        };
        image.apply_record(header.kind, header.sequence, &payload)?;
        Ok(image)
    }

    /// Replaces the backup's state by this one, whichever it has.
    pub(crate) fn replace_state(&mut self, image: ApplicationState) -> Result<(), BackupError> {
        self.image = image;
        self.stream = None;
        self.retry(|remote| remote.send_state(wire::REPLACE))
    }

    fn connection_error(&self, source: io::Error) -> BackupError {
        BackupError::Connection { address: self.address.clone(), source }
    }

    /// Retries until the reconnect timeout, with a new connection each time the old one is lost.
    fn retry<T>(
        &mut self,
        mut attempt: impl FnMut(&mut Self) -> Result<T, BackupError>,
    ) -> Result<T, BackupError> {
        let start = Instant::now();
        loop {
            match attempt(self) {
                Err(error) if error.is_transient() && start.elapsed() < self.patience => {
                    self.stream = None;
                    thread::sleep(RECONNECT_INTERVAL);
                }
                result => return result,
            }
        }
    }

    fn connect(&self, flags: u8) -> Result<(ClientTlsStream, u64), BackupError> {
        let mut stream = self.open_stream().map_err(|error| self.connection_error(error))?;
        let hello = BackupMessage::Hello { version: wire::VERSION, flags, name: self.name.clone() };
        let answer = wire::send_message(&mut stream, &hello)
            .and_then(|()| stream.flush())
            .and_then(|()| wire::receive_message(&mut stream));
        match answer.map_err(|error| self.connection_error(error))? {
            BackupMessage::Acknowledge(sequence) => Ok((stream, sequence)),
            BackupMessage::Error(text) => Err(BackupError::Refused(text)),
            _ => Err(BackupError::Refused("it does not reply to a greeting".into())),
        }
    }

    fn open_stream(&self) -> io::Result<ClientTlsStream> {
        let name = tls::server_name(&self.address).map_err(io::Error::other)?;
        let mut last = io::Error::new(io::ErrorKind::NotFound, "no such host");
        for address in self.address.to_socket_addrs()? {
            match TcpStream::connect_timeout(&address, REPLY_TIMEOUT) {
                Ok(socket) => {
                    socket.set_nodelay(true)?;
                    socket.set_read_timeout(Some(REPLY_TIMEOUT))?;
                    socket.set_write_timeout(Some(REPLY_TIMEOUT))?;
                    let tls = ClientConnection::new(self.config.clone(), name);
                    return Ok(StreamOwned::new(tls.map_err(io::Error::other)?, socket));
                }
                Err(error) => last = error,
            }
        }
        Err(last)
    }

    /// Reconnects, and sends the whole state.
    fn send_state(&mut self, flags: u8) -> Result<(), BackupError> {
        let (stream, _) = self.connect(flags)?;
        self.stream = Some(stream);
        let record = encode_state(&self.image, self.compression);
        self.send_records(&[record])
    }

    /// Sends records, and waits until they are stored safely.
    fn send_records(&mut self, records: &[Vec<u8>]) -> Result<(), BackupError> {
        let answer = self.exchange_messages(|stream| {
            records.iter().try_for_each(|record| wire::send_record(stream, record))?;
            wire::send_message(stream, &BackupMessage::Flush)
        })?;
        match answer {
            BackupMessage::Acknowledge(sequence) if sequence == self.image.sequence() => Ok(()),
            _ => Err(BackupError::Refused("it acknowledges another transaction".into())),
        }
    }

    fn exchange_messages(
        &mut self,
        send: impl FnOnce(&mut ClientTlsStream) -> io::Result<()>,
    ) -> Result<BackupMessage, BackupError> {
        let lost = |error| BackupError::Connection { address: self.address.clone(), source: error };
        let Some(stream) = &mut self.stream else {
            return Err(lost(io::ErrorKind::NotConnected.into()));
        };
        let answer =
            send(stream).and_then(|()| stream.flush()).and_then(|()| wire::receive_message(stream));
        match answer.map_err(lost)? {
            BackupMessage::Error(text) => Err(BackupError::Refused(text)),
            message => Ok(message),
        }
    }
}

impl BackupSink for RemoteBackup {
    fn store_transactions(&mut self, jobs: &[BackupJob]) -> Result<u64, BackupError> {
        let mut records = Vec::with_capacity(jobs.len());
        for job in jobs {
            records.push(encode_record(
                RecordKind::Change,
                job.sequence,
                &job.payload,
                self.compression,
            ));
            self.image.apply_record(RecordKind::Change, job.sequence, &job.payload)?;
        }
        match self.send_records(&records) {
            // How many of them the backup has stored is unknown: send it the whole state.
            Err(error) if error.is_transient() => {
                self.stream = None;
                self.retry(|remote| remote.send_state(0))?;
            }
            result => result?,
        }
        Ok(self.image.sequence())
    }
}

impl RemoteBackup {
    /// Records that the backup has this state.
    pub(crate) fn set_state(&mut self, image: ApplicationState) {
        self.image = image;
    }
}
