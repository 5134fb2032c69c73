//! NBD connection: the handshake with one client, then a few threads that execute its requests.
//!
//! A thread reads the next request from the socket, lets another thread read the socket, executes
//! the request, and replies. So reads run in parallel with each other and with a slow flush, and no
//! data passes from thread to thread. If all threads wait (for room in a log), no request is read.

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

/// The number of requests executed at a time.
const THREADS: usize = 4;
/// The time limit of each step of the handshake.
const HANDSHAKE_WAIT: Duration = Duration::from_secs(10);
/// The maximum number of options before a disk is chosen; QEMU sends three.
const OPTIONS_MAX: usize = 64;
/// The bytes of requests without data that are read from the socket at a time.
const BUFFER_BYTES: usize = 16 << 10;
/// The maximum number of bytes of memory allocated for data before it has arrived.
const DATA_BYTES_AHEAD: u32 = 256 << 10;

/// Why a connection ended.
#[derive(Debug, Error)]
pub(super) enum ConnectionError {
    /// The connection failed, or ended in the middle of a message.
    #[error("the connection failed")]
    Io(#[from] io::Error),
    /// The client violates the protocol.
    #[error("the client does not speak NBD as Firn does: {0}")]
    Protocol(&'static str),
}

/// Serves a client until it disconnects.
pub(super) fn serve(stream: &UnixStream, exports: &Exports) -> Result<(), ConnectionError> {
    stream.set_read_timeout(Some(HANDSHAKE_WAIT))?;
    let Some(disk) = choose(stream, exports)? else { return Ok(()) };
    stream.set_read_timeout(None)?;
    Connection::new(stream, disk).transmit()
}

/// Performs the handshake. `None` if the client disconnects without having chosen a disk.
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

/// The receiving half of a connection.
struct Incoming<'a> {
    from: BufReader<&'a UnixStream>,
    /// Reading has ended: by the client's request, or because of this error.
    over: Option<Result<(), ConnectionError>>,
}

/// The connection of a client that has chosen a disk.
struct Connection<'a> {
    stream: &'a UnixStream,
    disk: Arc<Disk>,
    incoming: Mutex<Incoming<'a>>,
    outgoing: Mutex<&'a UnixStream>,
    /// Held from a large read until the client has received the reply, so that one is executed at a
    /// time.
    much: Mutex<()>,
}

impl<'a> Connection<'a> {
    fn new(stream: &'a UnixStream, disk: Arc<Disk>) -> Self {
        let from = BufReader::with_capacity(BUFFER_BYTES, stream);
        let incoming = Mutex::new(Incoming { from, over: None });
        Self { stream, disk, incoming, outgoing: Mutex::new(stream), much: Mutex::new(()) }
    }

    /// Executes requests until the client disconnects. Every request that was read gets a reply.
    fn transmit(self) -> Result<(), ConnectionError> {
        thread::scope(|scope| {
            for _ in 1..THREADS {
                let worker = thread::Builder::new().name("firn-nbd".into());
                // Fewer threads only make it slower.
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
                // Wakes the thread that waits for a request.
                let _ = self.stream.shutdown(Shutdown::Both);
                return;
            }
        }
    }

    /// Waits for the reader's lock, then reads the next request.
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

    /// Whether the client is connected. A client that repeats a request on another connection has
    /// closed this one before.
    fn is_there(&self) -> bool {
        let mut all = [PollFd::new(self.stream, PollFlags::empty())];
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        poll(&mut all, Some(&now)).is_ok()
            && !all[0].revents().intersects(PollFlags::HUP | PollFlags::ERR)
    }

    /// Executes a request and returns the data of the reply, behind room for a header.
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

/// Reads a request and its data; `None` if the client disconnects. Data that is too long is
/// skipped, and the request will get an error.
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

/// Ends the connection if its thread panics. The request of that thread never gets a reply, and the
/// client repeats it on another connection.
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
