//! A backup process on another host: sends it transactions by TLS.

use std::io::{self, Write as _};
use std::net::{TcpStream, ToSocketAddrs as _};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use rustls::{ClientConfig, ClientConnection, StreamOwned};

use super::error::BackupError;
use super::helper::{Job, Sink};
use super::record::{RecordKind, encode, encode_state};
use super::tls::{self, Identity};
use super::wire::{self, Message};
use super::{Compression, Image};

/// How long to wait for a reply before the connection counts as lost.
const ANSWER: Duration = Duration::from_secs(30);
/// Interval between attempts to connect.
const PAUSE: Duration = Duration::from_millis(100);

type Stream = StreamOwned<ClientConnection, TcpStream>;

/// A connection to a backup process, and the state that it should have.
pub(crate) struct Remote {
    address: String,
    name: String,
    config: Arc<ClientConfig>,
    patience: Duration,
    compression: Compression,
    stream: Option<Stream>,
    image: Image,
}

impl Remote {
    /// Connects, and returns the sequence of the state that the backup has.
    pub(crate) fn open(
        address: &str,
        name: &str,
        identity: &Identity,
        patience: Duration,
        compression: Compression,
    ) -> Result<(Self, u64), BackupError> {
        let mut remote = Self {
            address: address.to_owned(),
            name: name.to_owned(),
            config: identity.client()?,
            patience,
            compression,
            stream: None,
            image: Image::default(),
        };
        let (stream, sequence) = remote.patiently(|remote| remote.connect(0))?;
        remote.stream = Some(stream);
        Ok((remote, sequence))
    }

    /// Requests the state that the backup has.
    pub(crate) fn get(&mut self) -> Result<Image, BackupError> {
        let mut image = Image::default();
        let answer = self.ask(|stream| wire::send(stream, &Message::Get))?;
        let Message::Record { header, payload, .. } = answer else {
            return Err(BackupError::Refused("it does not reply with its state".into()));
        };
        image.apply(header.kind, header.sequence, &payload)?;
        Ok(image)
    }

    /// Replaces the backup's state by this one, whichever it has.
    pub(crate) fn replace(&mut self, image: Image) -> Result<(), BackupError> {
        self.image = image;
        self.stream = None;
        self.patiently(|remote| remote.catch_up(wire::REPLACE))
    }

    fn lost(&self, source: io::Error) -> BackupError {
        BackupError::Connection { address: self.address.clone(), source }
    }

    /// Retries until the reconnect timeout, with a new connection each time the old one is lost.
    fn patiently<T>(
        &mut self,
        mut attempt: impl FnMut(&mut Self) -> Result<T, BackupError>,
    ) -> Result<T, BackupError> {
        let start = Instant::now();
        loop {
            match attempt(self) {
                Err(error) if error.is_passing() && start.elapsed() < self.patience => {
                    self.stream = None;
                    thread::sleep(PAUSE);
                }
                result => return result,
            }
        }
    }

    fn connect(&self, flags: u8) -> Result<(Stream, u64), BackupError> {
        let mut stream = self.dial().map_err(|error| self.lost(error))?;
        let hello = Message::Hello { version: wire::VERSION, flags, name: self.name.clone() };
        let answer = wire::send(&mut stream, &hello)
            .and_then(|()| stream.flush())
            .and_then(|()| wire::receive(&mut stream));
        match answer.map_err(|error| self.lost(error))? {
            Message::Acknowledge(sequence) => Ok((stream, sequence)),
            Message::Error(text) => Err(BackupError::Refused(text)),
            _ => Err(BackupError::Refused("it does not reply to a greeting".into())),
        }
    }

    fn dial(&self) -> io::Result<Stream> {
        let name = tls::server_name(&self.address).map_err(io::Error::other)?;
        let mut last = io::Error::new(io::ErrorKind::NotFound, "no such host");
        for address in self.address.to_socket_addrs()? {
            match TcpStream::connect_timeout(&address, ANSWER) {
                Ok(socket) => {
                    socket.set_nodelay(true)?;
                    socket.set_read_timeout(Some(ANSWER))?;
                    socket.set_write_timeout(Some(ANSWER))?;
                    let tls = ClientConnection::new(self.config.clone(), name);
                    return Ok(StreamOwned::new(tls.map_err(io::Error::other)?, socket));
                }
                Err(error) => last = error,
            }
        }
        Err(last)
    }

    /// Reconnects, and sends the whole state.
    fn catch_up(&mut self, flags: u8) -> Result<(), BackupError> {
        let (stream, _) = self.connect(flags)?;
        self.stream = Some(stream);
        let record = encode_state(&self.image, self.compression);
        self.deliver(&[record])
    }

    /// Sends records, and waits until they are stored safely.
    fn deliver(&mut self, records: &[Vec<u8>]) -> Result<(), BackupError> {
        let answer = self.ask(|stream| {
            records.iter().try_for_each(|record| wire::send_record(stream, record))?;
            wire::send(stream, &Message::Flush)
        })?;
        match answer {
            Message::Acknowledge(sequence) if sequence == self.image.sequence() => Ok(()),
            _ => Err(BackupError::Refused("it acknowledges another transaction".into())),
        }
    }

    fn ask(
        &mut self,
        send: impl FnOnce(&mut Stream) -> io::Result<()>,
    ) -> Result<Message, BackupError> {
        let lost = |error| BackupError::Connection { address: self.address.clone(), source: error };
        let Some(stream) = &mut self.stream else {
            return Err(lost(io::ErrorKind::NotConnected.into()));
        };
        let answer =
            send(stream).and_then(|()| stream.flush()).and_then(|()| wire::receive(stream));
        match answer.map_err(lost)? {
            Message::Error(text) => Err(BackupError::Refused(text)),
            message => Ok(message),
        }
    }
}

impl Sink for Remote {
    fn put(&mut self, jobs: &[Job]) -> Result<u64, BackupError> {
        let mut records = Vec::with_capacity(jobs.len());
        for job in jobs {
            records.push(encode(RecordKind::Change, job.sequence, &job.payload, self.compression));
            self.image.apply(RecordKind::Change, job.sequence, &job.payload)?;
        }
        match self.deliver(&records) {
            // How many of them the backup has stored is unknown: send it the whole state.
            Err(error) if error.is_passing() => {
                self.stream = None;
                self.patiently(|remote| remote.catch_up(0))?;
            }
            result => result?,
        }
        Ok(self.image.sequence())
    }
}

impl Remote {
    /// Records that the backup has this state.
    pub(crate) fn agree(&mut self, image: Image) {
        self.image = image;
    }
}
