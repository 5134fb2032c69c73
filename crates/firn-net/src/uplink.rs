//! The connection to where a card's frames go: a Unix socket that speaks QEMU's `-netdev stream`.
//!
//! ```text
//!   | length: u32, big endian | frame ... | length | frame ... |          both directions
//! ```
//!
//! passt(1) listens so with `--socket`. Nothing here waits: what can't be written or read now is tried again when the socket is ready.

use std::collections::VecDeque;
use std::io::{self, ErrorKind, Read, Write};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;

use firn_cluster::switch::{Decoder, head};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with};

/// How much is read at once.
const READ_BYTES: usize = 64 << 10;

/// A connection.
#[derive(Debug)]
pub struct Uplink {
    stream: UnixStream,
    decoder: Decoder,
    /// The frame that is being written, with its length, and how much of that is.
    leaving: Vec<u8>,
    written: usize,
    buffer: Vec<u8>,
}

impl Uplink {
    /// Connects to who listens at `path`, now or not at all.
    ///
    /// # Errors
    /// If nobody listens there, or the other side has no room for a connection now.
    pub fn connect(path: &Path) -> io::Result<Self> {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
        connect(&socket, &SocketAddrUnix::new(path)?)?;
        Ok(Self {
            stream: socket.into(),
            decoder: Decoder::new(),
            leaving: Vec::new(),
            written: 0,
            buffer: vec![0; READ_BYTES],
        })
    }

    /// Whether it can be given a frame.
    pub fn is_free(&self) -> bool {
        self.leaving.is_empty()
    }

    /// Takes a frame, if it is free. One longer than any frame can be is left out.
    pub fn give(&mut self, frame: &[u8]) {
        if let (true, Some(head)) = (self.is_free(), head(frame)) {
            self.leaving.extend_from_slice(&head);
            self.leaving.extend_from_slice(frame);
        }
    }

    /// Writes what it can; `true` once the whole frame is written.
    ///
    /// # Errors
    /// If the connection has ended.
    pub fn write(&mut self) -> io::Result<bool> {
        while self.written < self.leaving.len() {
            match self.stream.write(&self.leaving[self.written..]) {
                Ok(0) => return Err(ErrorKind::WriteZero.into()),
                Ok(bytes) => self.written += bytes,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(false),
                Err(error) => return Err(error),
            }
        }
        self.leaving.clear();
        self.written = 0;
        Ok(true)
    }

    /// Reads what is there, and adds the frames that are whole.
    ///
    /// # Errors
    /// If the connection has ended, or what comes makes no sense.
    pub fn read(&mut self, frames: &mut VecDeque<Vec<u8>>) -> io::Result<()> {
        match self.stream.read(&mut self.buffer) {
            Ok(0) => Err(ErrorKind::UnexpectedEof.into()),
            Ok(bytes) => self
                .decoder
                .push(&self.buffer[..bytes], |frame| frames.push_back(frame.to_vec()))
                .map_err(io::Error::other),
            Err(error)
                if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) =>
            {
                Ok(())
            }
            Err(error) => Err(error),
        }
    }
}

impl AsFd for Uplink {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.stream.as_fd()
    }
}
