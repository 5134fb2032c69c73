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

use super::handshake::{GREETING, HandshakeStep, NbdHandshake, OPTION_BYTES_MAX, OPTION_MAGIC};
use super::request::{self, NbdCommand, NbdRequest, REPLY_BYTES, REQUEST_BYTES};
use super::server::NbdExports;
use crate::disk::LoggedDisk;

/// The number of requests executed at a time.
const THREADS: usize = 4;
/// The time limit of each step of the handshake.
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(10);
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
pub(super) fn serve_client(
    stream: &UnixStream,
    exports: &NbdExports,
) -> Result<(), ConnectionError> {
    stream.set_read_timeout(Some(HANDSHAKE_TIMEOUT))?;
    let Some(disk) = negotiate_disk(stream, exports)? else { return Ok(()) };
    stream.set_read_timeout(None)?;
    NbdConnection::new(stream, disk).serve_requests()
}

/// Performs the handshake. `None` if the client disconnects without having chosen a disk.
fn negotiate_disk(
    mut stream: &UnixStream,
    exports: &NbdExports,
) -> Result<Option<Arc<LoggedDisk>>, ConnectionError> {
    stream.write_all(&GREETING)?;
    let flags = read_number(stream)?;
    let handshake =
        NbdHandshake::new(exports, flags).ok_or(ConnectionError::Protocol("unknown flags"))?;
    for _ in 0..OPTIONS_MAX {
        let (option, data) = read_option(stream)?;
        let (answer, end) = match handshake.handle_option(option, &data) {
            HandshakeStep::More(answer) => (answer, None),
            HandshakeStep::Serve(answer, disk) => (answer, Some(Some(disk))),
            HandshakeStep::End(answer) => (answer, Some(None)),
        };
        stream.write_all(&answer)?;
        if let Some(end) = end {
            return Ok(end);
        }
    }
    Err(ConnectionError::Protocol("it sends options without end"))
}

fn read_option(mut stream: &UnixStream) -> Result<(u32, Vec<u8>), ConnectionError> {
    let mut magic = [0; 8];
    stream.read_exact(&mut magic)?;
    if magic != OPTION_MAGIC {
        return Err(ConnectionError::Protocol("no option where one was expected"));
    }
    let (option, length) = (read_number(stream)?, read_number(stream)? as usize);
    if length > OPTION_BYTES_MAX {
        return Err(ConnectionError::Protocol("an option is too long"));
    }
    let mut data = vec![0; length];
    stream.read_exact(&mut data)?;
    Ok((option, data))
}

fn read_number(mut stream: &UnixStream) -> io::Result<u32> {
    let mut bytes = [0; 4];
    stream.read_exact(&mut bytes)?;
    Ok(u32::from_be_bytes(bytes))
}

/// The receiving half of a connection.
struct RequestReader<'a> {
    from: BufReader<&'a UnixStream>,
    /// Reading has ended: by the client's request, or because of this error.
    outcome: Option<Result<(), ConnectionError>>,
}

/// The connection of a client that has chosen a disk.
struct NbdConnection<'a> {
    stream: &'a UnixStream,
    disk: Arc<LoggedDisk>,
    incoming: Mutex<RequestReader<'a>>,
    outgoing: Mutex<&'a UnixStream>,
    /// Held from a large read until the client has received the reply, so that one is executed at a
    /// time.
    large_read: Mutex<()>,
}

impl<'a> NbdConnection<'a> {
    fn new(stream: &'a UnixStream, disk: Arc<LoggedDisk>) -> Self {
        let from = BufReader::with_capacity(BUFFER_BYTES, stream);
        let incoming = Mutex::new(RequestReader { from, outcome: None });
        Self { stream, disk, incoming, outgoing: Mutex::new(stream), large_read: Mutex::new(()) }
    }

    /// Executes requests until the client disconnects. Every request that was read gets a reply.
    fn serve_requests(self) -> Result<(), ConnectionError> {
        thread::scope(|scope| {
            for _ in 1..THREADS {
                let worker = thread::Builder::new().name("firn-nbd".into());
                // Fewer threads only make it slower.
                if let Err(error) = worker.spawn_scoped(scope, || self.run_worker()) {
                    tracing::warn!("a disk is served by fewer threads: {error}");
                }
            }
            self.run_worker();
        });
        let incoming = self.incoming.into_inner().unwrap_or_else(PoisonError::into_inner);
        incoming.outcome.unwrap_or(Ok(()))
    }

    fn run_worker(&self) {
        let _dying = PanicDisconnect(self.stream);
        while let Some((request, data)) = self.next_request() {
            let _turn = request.is_large_read().then(|| lock_mutex(&self.large_read));
            let reply = self.build_reply(&request, data);
            if lock_mutex(&self.outgoing).write_all(&reply).is_err() {
                // Wakes the thread that waits for a request.
                let _ = self.stream.shutdown(Shutdown::Both);
                return;
            }
        }
    }

    /// Waits for the reader's lock, then reads the next request.
    fn next_request(&self) -> Option<(NbdRequest, Vec<u8>)> {
        let mut incoming = lock_mutex(&self.incoming);
        if incoming.outcome.is_some() {
            return None;
        }
        match read_request(&mut incoming.from) {
            Ok(Some(taken)) => Some(taken),
            Ok(None) => {
                incoming.outcome = Some(Ok(()));
                None
            }
            Err(error) => {
                incoming.outcome = Some(Err(error));
                None
            }
        }
    }

    fn build_reply(&self, request: &NbdRequest, data: Vec<u8>) -> Vec<u8> {
        let done = request.check_request(self.disk.size()).and_then(|()| {
            self.execute_request(request, data).map_err(|error| {
                let (command, at, length) = (request.command, request.at, request.length);
                tracing::warn!("{command:?} of {length} bytes at {at} failed: {error}");
                request::error_number(&error)
            })
        });
        match done {
            Ok(mut reply) => {
                reply[..REPLY_BYTES].copy_from_slice(&request::reply_header(request.cookie, 0));
                reply
            }
            Err(number) => request::reply_header(request.cookie, number).to_vec(),
        }
    }

    /// Whether the client is connected. A client that repeats a request on another connection has
    /// closed this one before.
    fn is_client_connected(&self) -> bool {
        let mut all = [PollFd::new(self.stream, PollFlags::empty())];
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        poll(&mut all, Some(&now)).is_ok()
            && !all[0].revents().intersects(PollFlags::HUP | PollFlags::ERR)
    }

    /// Executes a request and returns the data of the reply, behind room for a header.
    fn execute_request(&self, request: &NbdRequest, data: Vec<u8>) -> io::Result<Vec<u8>> {
        let (disk, at, length) = (&self.disk, request.at, u64::from(request.length));
        let is_there = || self.is_client_connected();
        let changing = disk.for_client(&is_there);
        let mut reply = vec![0; REPLY_BYTES];
        match request.command {
            _ if length == 0 && request.command != NbdCommand::Flush => {}
            NbdCommand::Read => {
                reply.resize(REPLY_BYTES + request.length as usize, 0);
                disk.read_at(at, &mut reply[REPLY_BYTES..])?;
            }
            NbdCommand::Write => changing.write_at(at, data)?,
            NbdCommand::WriteZeroes => changing.zero_range(at, length, request.may_be_hole())?,
            NbdCommand::Trim => changing.trim_range(at, length)?,
            NbdCommand::Flush => disk.flush()?,
            NbdCommand::Disconnect | NbdCommand::Unknown(_) => {}
        }
        if request.requires_durability()
            && !matches!(request.command, NbdCommand::Read | NbdCommand::Flush)
        {
            disk.flush()?;
        }
        Ok(reply)
    }
}

/// Reads a request and its data; `None` if the client disconnects. Data that is too long is
/// skipped, and the request will get an error.
fn read_request(
    from: &mut BufReader<&UnixStream>,
) -> Result<Option<(NbdRequest, Vec<u8>)>, ConnectionError> {
    let mut head = [0; REQUEST_BYTES];
    if from.read(&mut head[..1])? == 0 {
        return Ok(None);
    }
    from.read_exact(&mut head[1..])?;
    let request = NbdRequest::parse(&head).ok_or(ConnectionError::Protocol("no request"))?;
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
        NbdCommand::Disconnect => Ok(None),
        _ => Ok(Some((request, data))),
    }
}

/// Ends the connection if its thread panics. The request of that thread never gets a reply, and the
/// client repeats it on another connection.
struct PanicDisconnect<'a>(&'a UnixStream);

impl Drop for PanicDisconnect<'_> {
    fn drop(&mut self) {
        if thread::panicking() {
            let _ = self.0.shutdown(Shutdown::Both);
        }
    }
}

fn lock_mutex<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
