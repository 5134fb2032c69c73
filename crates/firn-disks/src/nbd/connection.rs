//! One client: the handshake, then a few threads that take turns.
//!
//! A thread takes the next request from the socket, lets the others at the socket, carries the request out, and answers. So reads go
//! on beside each other and beside a slow flush, and nothing passes from thread to thread. If all wait (for room in a log), no request is
//! taken any more.

use std::io::{self, BufReader, Read, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use thiserror::Error;

use super::handshake::{GREETING, Handshake, Next, OPTION_BYTES_MAX, OPTION_MAGIC};
use super::request::{self, Command, REPLY_BYTES, REQUEST_BYTES, Request};
use super::server::Exports;
use crate::disk::Disk;

/// Requests carried out at once.
const THREADS: usize = 4;
/// How long each step of the handshake may take.
const HANDSHAKE_WAIT: Duration = Duration::from_secs(10);
/// Options until a disk is chosen; QEMU sends three.
const OPTIONS_MAX: usize = 64;
/// Requests without data that are taken from the socket at once, in bytes.
const BUFFER_BYTES: usize = 16 << 10;
/// Memory taken for data before it is there, in bytes.
const DATA_BYTES_AHEAD: u32 = 256 << 10;

/// Why a connection ended.
#[derive(Debug, Error)]
pub(super) enum ConnectionError {
    /// It failed, or ended in the middle of something.
    #[error("the connection failed")]
    Io(#[from] io::Error),
    /// The client does not keep to the protocol.
    #[error("the client does not speak NBD as Firn does: {0}")]
    Protocol(&'static str),
}

/// Serves a client until it goes.
pub(super) fn serve(stream: &UnixStream, exports: &Exports) -> Result<(), ConnectionError> {
    stream.set_read_timeout(Some(HANDSHAKE_WAIT))?;
    let Some(disk) = choose(stream, exports)? else { return Ok(()) };
    stream.set_read_timeout(None)?;
    Connection::new(stream, disk).transmit()
}

/// The handshake. `None` if the client goes without having chosen a disk.
fn choose(
    mut stream: &UnixStream,
    exports: &Exports,
) -> Result<Option<Arc<Disk>>, ConnectionError> {
    stream.write_all(&GREETING)?;
    let flags = number(stream)?;
    let handshake =
        Handshake::new(exports, flags).ok_or(ConnectionError::Protocol("unknown flags"))?;
    for _ in 0..OPTIONS_MAX {
        let (option, data) = option(stream)?;
        let (answer, end) = match handshake.option(option, &data) {
            Next::More(answer) => (answer, None),
            Next::Serve(answer, disk) => (answer, Some(Some(disk))),
            Next::End(answer) => (answer, Some(None)),
        };
        stream.write_all(&answer)?;
        if let Some(end) = end {
            return Ok(end);
        }
    }
    Err(ConnectionError::Protocol("it sends options without end"))
}

fn option(mut stream: &UnixStream) -> Result<(u32, Vec<u8>), ConnectionError> {
    let mut magic = [0; 8];
    stream.read_exact(&mut magic)?;
    if magic != OPTION_MAGIC {
        return Err(ConnectionError::Protocol("no option where one was expected"));
    }
    let (option, length) = (number(stream)?, number(stream)? as usize);
    if length > OPTION_BYTES_MAX {
        return Err(ConnectionError::Protocol("an option is too long"));
    }
    let mut data = vec![0; length];
    stream.read_exact(&mut data)?;
    Ok((option, data))
}

fn number(mut stream: &UnixStream) -> io::Result<u32> {
    let mut bytes = [0; 4];
    stream.read_exact(&mut bytes)?;
    Ok(u32::from_be_bytes(bytes))
}

/// The end of a connection that takes requests.
struct Incoming<'a> {
    from: BufReader<&'a UnixStream>,
    /// Nothing more is taken; why, if not because the client wanted so.
    over: Option<Result<(), ConnectionError>>,
}

/// A client that has chosen a disk.
struct Connection<'a> {
    stream: &'a UnixStream,
    disk: Arc<Disk>,
    incoming: Mutex<Incoming<'a>>,
    outgoing: Mutex<&'a UnixStream>,
    /// Who reads much at once has its turn until the client has taken it.
    much: Mutex<()>,
}

impl<'a> Connection<'a> {
    fn new(stream: &'a UnixStream, disk: Arc<Disk>) -> Self {
        let from = BufReader::with_capacity(BUFFER_BYTES, stream);
        let incoming = Mutex::new(Incoming { from, over: None });
        Self { stream, disk, incoming, outgoing: Mutex::new(stream), much: Mutex::new(()) }
    }

    /// Until the client goes; all that was taken is answered.
    fn transmit(self) -> Result<(), ConnectionError> {
        thread::scope(|scope| {
            for _ in 1..THREADS {
                let worker = thread::Builder::new().name("firn-nbd".into());
                // With fewer of them it is slower.
                if let Err(error) = worker.spawn_scoped(scope, || self.work()) {
                    tracing::warn!("a disk is served by fewer threads: {error}");
                }
            }
            self.work();
        });
        let incoming = self.incoming.into_inner().unwrap_or_else(PoisonError::into_inner);
        incoming.over.unwrap_or(Ok(()))
    }

    fn work(&self) {
        let _dying = EndIfPanicking(self.stream);
        while let Some((request, data)) = self.next() {
            let _turn = request.reads_much().then(|| lock(&self.much));
            let reply = self.reply(&request, data);
            if lock(&self.outgoing).write_all(&reply).is_err() {
                // Whoever waits for a request wakes up.
                let _ = self.stream.shutdown(Shutdown::Both);
                return;
            }
        }
    }

    /// The next request, when it is this thread's turn.
    fn next(&self) -> Option<(Request, Vec<u8>)> {
        let mut incoming = lock(&self.incoming);
        if incoming.over.is_some() {
            return None;
        }
        match take(&mut incoming.from) {
            Ok(Some(taken)) => Some(taken),
            Ok(None) => {
                incoming.over = Some(Ok(()));
                None
            }
            Err(error) => {
                incoming.over = Some(Err(error));
                None
            }
        }
    }

    fn reply(&self, request: &Request, data: Vec<u8>) -> Vec<u8> {
        let done = request.check(self.disk.size()).and_then(|()| {
            self.carry_out(request, data).map_err(|error| {
                let (command, at, length) = (request.command, request.at, request.length);
                tracing::warn!("{command:?} of {length} bytes at {at} failed: {error}");
                request::error_number(&error)
            })
        });
        match done {
            Ok(mut reply) => {
                reply[..REPLY_BYTES].copy_from_slice(&request::reply(request.cookie, 0));
                reply
            }
            Err(number) => request::reply(request.cookie, number).to_vec(),
        }
    }

    /// The client has not gone. One that asks again elsewhere has gone here before.
    fn is_there(&self) -> bool {
        let mut all = [PollFd::new(self.stream, PollFlags::empty())];
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        poll(&mut all, Some(&now)).is_ok()
            && !all[0].revents().intersects(PollFlags::HUP | PollFlags::ERR)
    }

    /// What to answer, with room for a head.
    fn carry_out(&self, request: &Request, data: Vec<u8>) -> io::Result<Vec<u8>> {
        let (disk, at, length) = (&self.disk, request.at, u64::from(request.length));
        let is_there = || self.is_there();
        let changing = disk.by(&is_there);
        let mut reply = vec![0; REPLY_BYTES];
        match request.command {
            _ if length == 0 && request.command != Command::Flush => {}
            Command::Read => {
                reply.resize(REPLY_BYTES + request.length as usize, 0);
                disk.read(at, &mut reply[REPLY_BYTES..])?;
            }
            Command::Write => changing.write(at, data)?,
            Command::WriteZeroes => changing.zero(at, length, request.may_be_hole())?,
            Command::Trim => changing.trim(at, length)?,
            Command::Flush => disk.flush()?,
            Command::Disconnect | Command::Unknown(_) => {}
        }
        if request.is_durable() && !matches!(request.command, Command::Read | Command::Flush) {
            disk.flush()?;
        }
        Ok(reply)
    }
}

/// A request and its data; `None` if the client is done. Data that is too long is passed over: there is an error for it.
fn take(from: &mut BufReader<&UnixStream>) -> Result<Option<(Request, Vec<u8>)>, ConnectionError> {
    let mut head = [0; REQUEST_BYTES];
    if from.read(&mut head[..1])? == 0 {
        return Ok(None);
    }
    from.read_exact(&mut head[1..])?;
    let request = Request::parse(&head).ok_or(ConnectionError::Protocol("no request"))?;
    let bytes = request.data_bytes();
    let mut taken = from.take(bytes.into());
    let mut data = Vec::new();
    let count = match bytes <= request::BYTES_MAX {
        true => {
            data.reserve_exact(bytes.min(DATA_BYTES_AHEAD) as usize);
            taken.read_to_end(&mut data)? as u64
        }
        false => io::copy(&mut taken, &mut io::sink())?,
    };
    match request.command {
        _ if count < bytes.into() => Err(io::Error::from(io::ErrorKind::UnexpectedEof).into()),
        Command::Disconnect => Ok(None),
        _ => Ok(Some((request, data))),
    }
}

/// A request whose thread has died is never answered: the connection ends, and the client asks again on another.
struct EndIfPanicking<'a>(&'a UnixStream);

impl Drop for EndIfPanicking<'_> {
    fn drop(&mut self) {
        if thread::panicking() {
            let _ = self.0.shutdown(Shutdown::Both);
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
