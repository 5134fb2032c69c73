//! Uplink: the connection to the outside, a Unix socket with the protocol of QEMU's `-netdev
//! stream`.
//!
//! ```text
//!   | length: u32, big endian | frame ... | length | frame ... |          both directions
//! ```
//!
//! passt(1) listens in this way with `--socket`. No call here blocks: a write or read that can't be
//! done now is tried again when the socket is ready.

use std::collections::VecDeque;
use std::io::{self, ErrorKind, Read, Write};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;

use firn_cluster::switch::{FrameDecoder, length_prefix};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with};

/// The number of bytes read at a time.
const READ_BYTES: usize = 64 << 10;

/// A connection to the outside.
#[derive(Debug)]
pub struct UplinkStream {
    stream: UnixStream,
    decoder: FrameDecoder,
    /// The frame that is being written, behind its length.
    leaving: Vec<u8>,
    /// How many bytes of it are written.
    written: usize,
    buffer: Vec<u8>,
}

impl UplinkStream {
    /// Connects to the process that listens at `path`, without waiting.
    ///
    /// # Errors
    /// If no process listens there, or it has no room for a connection now.
    pub fn connect(path: &Path) -> io::Result<Self> {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
        connect(&socket, &SocketAddrUnix::new(path)?)?;
        Ok(Self::from_stream(socket.into()))
    }

    /// Uses a connection that does not block.
    pub(crate) fn from_stream(stream: UnixStream) -> Self {
        Self {
            stream,
            decoder: FrameDecoder::new(),
            leaving: Vec::new(),
            written: 0,
            buffer: vec![0; READ_BYTES],
        }
    }

    /// Whether it can take a frame.
    pub fn is_free(&self) -> bool {
        self.leaving.is_empty()
    }

    /// Takes a frame, if it is free. A frame that is too long is dropped.
    pub fn queue_frame(&mut self, frame: &[u8]) {
        if let (true, Some(head)) = (self.is_free(), length_prefix(frame)) {
            self.leaving.extend_from_slice(&head);
            self.leaving.extend_from_slice(frame);
        }
    }

    /// Writes as much as possible without blocking; `true` once the whole frame is written.
    ///
    /// # Errors
    /// If the connection has ended.
    pub fn write_pending(&mut self) -> io::Result<bool> {
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

    /// Reads the available bytes, and adds the complete frames.
    ///
    /// # Errors
    /// If the connection has ended, or the received bytes are invalid.
    pub fn read_frames(&mut self, frames: &mut VecDeque<Vec<u8>>) -> io::Result<()> {
        match self.stream.read(&mut self.buffer) {
            Ok(0) => Err(ErrorKind::UnexpectedEof.into()),
            Ok(bytes) => self
                .decoder
                .push_bytes(&self.buffer[..bytes], |frame| frames.push_back(frame.to_vec()))
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

impl AsFd for UplinkStream {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.stream.as_fd()
    }
}
