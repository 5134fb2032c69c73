//! Reading of lines from a byte stream, with a length limit and a deadline.

use std::io;
use std::os::fd::AsFd;
use std::time::Instant;

use rustix::net::RecvFlags;

use super::error::QmpError;
use crate::wait::wait_readable;

/// The maximum length of a line from QEMU, in bytes. `query-named-block-nodes` of a VM with
/// hundreds of disks and `info registers -a` of one with hundreds of vCPUs stay below a tenth of
/// it.
pub const LINE_BYTES_MAX: usize = 16 << 20;

/// Maximum number of bytes per read from the socket.
const READ_BYTES: usize = 64 << 10;

/// A buffer of bytes that were received and have not been returned as lines.
#[derive(Debug, Default)]
pub(crate) struct LineReader {
    buffer: Vec<u8>,
    /// The end of the line that was returned last. The next call removes that line.
    consumed: usize,
    /// The end of the part of the buffer that was searched for a newline.
    searched: usize,
}

/// The reason why no complete line could be read.
#[derive(Debug)]
pub(crate) enum LineError {
    Closed,
    TimedOut { waited_ms: u128 },
    TooLong,
    Io(io::Error),
}

impl LineError {
    pub(super) fn during_command(self, command: &str) -> QmpError {
        let command = command.to_owned();
        match self {
            Self::Closed => QmpError::Closed { command },
            Self::TimedOut { waited_ms } => QmpError::TimedOut { command, waited_ms },
            Self::TooLong => QmpError::LineTooLong { command, limit_bytes: LINE_BYTES_MAX },
            Self::Io(source) => QmpError::Io { command, source },
        }
    }
}

impl LineReader {
    /// The next line, without its newline. Blocks until it is complete or `deadline` has passed.
    pub(crate) fn next_line(
        &mut self,
        from: impl AsFd,
        deadline: Instant,
    ) -> Result<&[u8], LineError> {
        let begun = Instant::now();
        self.buffer.drain(..self.consumed);
        self.searched -= self.consumed;
        self.consumed = 0;
        loop {
            if let Some(end) = self.find_newline() {
                self.consumed = end + 1;
                self.searched = self.consumed;
                return Ok(self.buffer[..end].trim_ascii_end());
            }
            if self.buffer.len() >= LINE_BYTES_MAX {
                return Err(LineError::TooLong);
            }
            if !wait_readable(&from, deadline).map_err(LineError::Io)? {
                return Err(LineError::TimedOut { waited_ms: begun.elapsed().as_millis() });
            }
            self.fill_buffer(&from)?;
        }
    }

    fn find_newline(&mut self) -> Option<usize> {
        let fresh = &self.buffer[self.searched..];
        let found = fresh.iter().position(|&byte| byte == b'\n').map(|at| self.searched + at);
        if found.is_none() {
            self.searched = self.buffer.len();
        }
        found
    }

    fn fill_buffer(&mut self, from: &impl AsFd) -> Result<(), LineError> {
        self.buffer.reserve(READ_BYTES);
        let space = rustix::buffer::spare_capacity(&mut self.buffer);
        match rustix::net::recv(from, space, RecvFlags::DONTWAIT) {
            Ok((_, 0)) => Err(LineError::Closed),
            Ok(_) | Err(rustix::io::Errno::INTR | rustix::io::Errno::AGAIN) => Ok(()),
            Err(rustix::io::Errno::CONNRESET) => Err(LineError::Closed),
            Err(errno) => Err(LineError::Io(errno.into())),
        }
    }
}
