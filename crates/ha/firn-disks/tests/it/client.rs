//! An NBD client for tests, which sends valid or invalid messages as ordered.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

/// A server that does not reply for this time hangs.
const PATIENCE: Duration = Duration::from_secs(60);

pub const GO: u32 = 7;
pub const READ: u16 = 0;
pub const WRITE: u16 = 1;
pub const TRIM: u16 = 4;
pub const ZEROES: u16 = 6;

pub struct Client(pub UnixStream);

impl Client {
    /// Connects, and reads the greeting.
    pub fn connect(socket: &Path) -> Self {
        let mut client = Self(UnixStream::connect(socket).unwrap());
        client.0.set_read_timeout(Some(PATIENCE)).unwrap();
        assert_eq!(client.take(18), b"NBDMAGICIHAVEOPT\0\x03");
        client
    }

    /// Ready to send requests.
    pub fn ready(socket: &Path) -> Self {
        let mut client = Self::connect(socket);
        client.0.write_all(&3_u32.to_be_bytes()).unwrap();
        client.option(GO, b"\0\0\0\x03vda\0\0", None);
        while client.option_reply().0 != 1 {}
        client
    }

    /// Sends an option, with a length of its own if one is given.
    pub fn option(&mut self, option: u32, data: &[u8], length: Option<u32>) {
        let length = length.unwrap_or(data.len() as u32);
        let head = [&b"IHAVEOPT"[..], &option.to_be_bytes(), &length.to_be_bytes(), data].concat();
        self.0.write_all(&head).unwrap();
    }

    /// Reads the type and the data of a reply.
    pub fn option_reply(&mut self) -> (u32, Vec<u8>) {
        let head = self.take(20);
        let number = |at: usize| u32::from_be_bytes(head[at..at + 4].try_into().unwrap());
        (number(12), self.take(number(16) as usize))
    }

    pub fn request(&mut self, command: u16, flags: u16, at: u64, length: u32, data: &[u8]) {
        let head = [
            &0x2560_9513_u32.to_be_bytes()[..],
            &flags.to_be_bytes(),
            &command.to_be_bytes(),
            &at.to_be_bytes(),
            &at.to_be_bytes(),
            &length.to_be_bytes(),
            data,
        ];
        self.0.write_all(&head.concat()).unwrap();
    }

    /// Reads the error of a reply, whose cookie has to be `at`.
    pub fn reply(&mut self, at: u64) -> u32 {
        let head = self.take(16);
        assert_eq!(head[..4], 0x6744_6698_u32.to_be_bytes());
        assert_eq!(head[8..], at.to_be_bytes());
        u32::from_be_bytes(head[4..8].try_into().unwrap())
    }

    pub fn take(&mut self, length: usize) -> Vec<u8> {
        let mut bytes = vec![0; length];
        self.0.read_exact(&mut bytes).unwrap();
        bytes
    }

    /// Checks that the server ends the connection without another reply.
    pub fn ended(mut self) -> bool {
        match self.0.read(&mut [0; 64]) {
            Ok(count) => count == 0,
            Err(error) => error.kind() == std::io::ErrorKind::ConnectionReset,
        }
    }
}
