//! NBD requests: requests and replies of the transmission phase. Pure; numbers are big-endian.
//!
//! ```text
//!   request    0x25609513 (4) flags (2) command (2) cookie (8) at (8) length (4)   data of a write
//!   reply      0x67446698 (4) error (4) cookie (8)                                 data of a read
//! ```

use std::io;

/// The bytes of a request, without data.
pub const REQUEST_BYTES: usize = 28;
/// The bytes of a reply, without data.
pub const REPLY_BYTES: usize = 16;
/// The maximum length of a read or write in bytes, as advertised to clients. A client that has not
/// requested this limit may exceed it, and gets an error.
pub const BYTES_MAX: u32 = super::handshake::TRANSFER_BYTES_MAX;
/// Longer reads are executed one after another.
const LARGE_READ_BYTES: u32 = 256 << 10;

const REQUEST_MAGIC: u32 = 0x2560_9513;
const REPLY_MAGIC: u32 = 0x6744_6698;

const FLAG_FUA: u16 = 1;
const FLAG_NO_HOLE: u16 = 2;

const EIO: u32 = 5;
const EINVAL: u32 = 22;
const ENOSPC: u32 = 28;
const ESHUTDOWN: u32 = 108;

/// The command of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NbdCommand {
    /// Read bytes.
    Read,
    /// Write bytes.
    Write,
    /// End the connection.
    Disconnect,
    /// Make acknowledged changes durable: they must survive a loss of power.
    Flush,
    /// Discard bytes.
    Trim,
    /// Write zeros.
    WriteZeroes,
    /// A command that Firn does not support.
    Unknown(u16),
}

/// A request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NbdRequest {
    /// The command.
    pub command: NbdCommand,
    /// The flags of the command.
    pub flags: u16,
    /// The client's identifier of the request, which the reply repeats.
    pub cookie: u64,
    /// The offset of the first byte.
    pub at: u64,
    /// The number of bytes.
    pub length: u32,
}

impl NbdRequest {
    /// Parses a request; `None` if the magic number is wrong.
    pub fn parse(bytes: &[u8; REQUEST_BYTES]) -> Option<Self> {
        let number = |range: std::ops::Range<usize>| {
            bytes[range].iter().fold(0_u64, |number, &byte| number << 8 | u64::from(byte))
        };
        let request = Self {
            command: parse_command(number(6..8) as u16),
            flags: number(4..6) as u16,
            cookie: number(8..16),
            at: number(16..24),
            length: number(24..28) as u32,
        };
        (number(0..4) == u64::from(REQUEST_MAGIC)).then_some(request)
    }

    /// Whether it is a read whose reply takes much memory. A client can request such a reply
    /// without having sent data.
    pub fn is_large_read(&self) -> bool {
        self.command == NbdCommand::Read && self.length > LARGE_READ_BYTES
    }

    /// The number of bytes of data that follow the request.
    pub fn data_bytes(&self) -> u32 {
        if self.command == NbdCommand::Write { self.length } else { 0 }
    }

    /// Whether the client requires that the change is durable before the reply (FUA).
    pub fn requires_durability(&self) -> bool {
        self.flags & FLAG_FUA != 0
    }

    /// Whether the zeros may be a hole.
    pub fn may_be_hole(&self) -> bool {
        self.flags & FLAG_NO_HOLE == 0
    }

    /// Checks the request against a disk of `size` bytes. The error is the number that the reply
    /// needs.
    ///
    /// # Errors
    /// `EINVAL`; `ENOSPC` for a write beyond the end, as the protocol requires.
    pub fn check_request(&self, size: u64) -> Result<(), u32> {
        let allowed = match self.command {
            NbdCommand::WriteZeroes => FLAG_FUA | FLAG_NO_HOLE,
            _ => FLAG_FUA,
        };
        let moves = matches!(self.command, NbdCommand::Read | NbdCommand::Write);
        let writes = matches!(self.command, NbdCommand::Write | NbdCommand::WriteZeroes);
        let end = self.at.checked_add(self.length.into());
        let is_within = self.command == NbdCommand::Flush || end.is_some_and(|end| end <= size);
        match self.command {
            NbdCommand::Unknown(_) => Err(EINVAL),
            _ if self.flags & !allowed != 0 => Err(EINVAL),
            _ if moves && self.length > BYTES_MAX => Err(EINVAL),
            _ if !is_within => Err(if writes { ENOSPC } else { EINVAL }),
            _ => Ok(()),
        }
    }
}

fn parse_command(number: u16) -> NbdCommand {
    match number {
        0 => NbdCommand::Read,
        1 => NbdCommand::Write,
        2 => NbdCommand::Disconnect,
        3 => NbdCommand::Flush,
        4 => NbdCommand::Trim,
        6 => NbdCommand::WriteZeroes,
        other => NbdCommand::Unknown(other),
    }
}

/// The header of a reply; `error` is 0 after success.
pub fn reply_header(cookie: u64, error: u32) -> [u8; REPLY_BYTES] {
    let mut reply = [0; REPLY_BYTES];
    reply[..4].copy_from_slice(&REPLY_MAGIC.to_be_bytes());
    reply[4..8].copy_from_slice(&error.to_be_bytes());
    reply[8..].copy_from_slice(&cookie.to_be_bytes());
    reply
}

/// The error number of the protocol for an error of the system.
pub fn error_number(error: &io::Error) -> u32 {
    use rustix::io::Errno;
    match Errno::from_io_error(error) {
        Some(Errno::NOSPC | Errno::DQUOT | Errno::FBIG) => ENOSPC,
        Some(Errno::SHUTDOWN) => ESHUTDOWN,
        _ => EIO,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SIZE: u64 = 1000;

    fn request(command: NbdCommand, flags: u16, at: u64, length: u32) -> NbdRequest {
        NbdRequest { command, flags, cookie: 1, at, length }
    }

    #[test]
    fn a_request_is_read() {
        let bytes = [
            &REQUEST_MAGIC.to_be_bytes()[..],
            &[0, 1, 0, 1],
            &7_u64.to_be_bytes(),
            &(1_u64 << 40).to_be_bytes(),
            &512_u32.to_be_bytes(),
        ];
        let mut bytes: [u8; REQUEST_BYTES] = bytes.concat().try_into().unwrap();
        let expected = NbdRequest {
            command: NbdCommand::Write,
            flags: 1,
            cookie: 7,
            at: 1 << 40,
            length: 512,
        };
        assert_eq!(NbdRequest::parse(&bytes), Some(expected));
        assert!(expected.requires_durability() && expected.data_bytes() == 512);
        bytes[0] ^= 1;
        assert_eq!(NbdRequest::parse(&bytes), None);
    }

    #[test]
    fn an_invalid_request_has_the_protocols_error() {
        use NbdCommand::*;
        for (command, beyond) in [(Read, 22), (Write, 28), (Trim, 22), (WriteZeroes, 28)] {
            assert_eq!(request(command, 1, 990, 10).check_request(SIZE), Ok(()));
            assert_eq!(request(command, 0, 990, 11).check_request(SIZE), Err(beyond));
            assert_eq!(request(command, 0, u64::MAX, 2).check_request(SIZE), Err(beyond));
            assert_eq!(request(command, 4, 0, 1).check_request(SIZE), Err(EINVAL));
        }
        assert_eq!(request(WriteZeroes, 2, 0, 1).check_request(SIZE), Ok(()));
        assert_eq!(request(Write, 2, 0, 1).check_request(SIZE), Err(EINVAL));
        assert_eq!(request(Flush, 0, 0, 0).check_request(0), Ok(()));
        assert_eq!(request(Unknown(7), 0, 0, 1).check_request(SIZE), Err(EINVAL));
        assert_eq!(request(Read, 0, 0, BYTES_MAX + 1).check_request(u64::MAX), Err(EINVAL));
        assert_eq!(request(Trim, 0, 0, u32::MAX).check_request(u64::MAX), Ok(()));
    }

    #[test]
    fn errors_of_the_system_are_those_of_the_protocol() {
        use rustix::io::Errno;
        for (errno, expected) in [
            (Errno::NOSPC, 28),
            (Errno::DQUOT, 28),
            (Errno::FBIG, 28),
            (Errno::IO, 5),
            (Errno::PERM, 5),
            (Errno::SHUTDOWN, 108),
        ] {
            assert_eq!(error_number(&errno.into()), expected);
        }
    }
}
