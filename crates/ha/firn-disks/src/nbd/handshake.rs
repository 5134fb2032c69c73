//! NBD handshake: options of a client in, replies out. Pure. Numbers are big-endian.
//!
//! ```text
//!   greeting   "NBDMAGIC" "IHAVEOPT" flags (2)
//!   client     flags (4)
//!   option     "IHAVEOPT" option (4) length (4) data
//!   reply      0x3e889045565a9 (8) option (4) type (4) length (4) data
//! ```

use std::sync::Arc;

use super::server::NbdExports;
use crate::disk::LoggedDisk;

/// The first bytes that the server sends.
pub const GREETING: [u8; 18] = *b"NBDMAGICIHAVEOPT\0\x03";
/// The first bytes of each option.
pub const OPTION_MAGIC: [u8; 8] = *b"IHAVEOPT";
/// The maximum length of an option's data in bytes. A name has up to 4096.
pub const OPTION_BYTES_MAX: usize = 16 << 10;
/// The maximum length of a read or write, in bytes, that the server advertises to clients. All
/// requests in flight when a VM is stopped must fit into memory.
pub const TRANSFER_BYTES_MAX: u32 = 4 << 20;

const REPLY_MAGIC: u64 = 0x0003_e889_0455_65a9;
const BLOCK_BYTES_PREFERRED: u32 = 4096;

const FIXED_NEWSTYLE: u32 = 1;
const NO_ZEROES: u32 = 2;

const EXPORT_NAME: u32 = 1;
const ABORT: u32 = 2;
const LIST: u32 = 3;
const INFO: u32 = 6;
const GO: u32 = 7;

const ACK: u32 = 1;
const SERVER: u32 = 2;
const REP_INFO: u32 = 3;
const ERR_UNSUPPORTED: u32 = 1 << 31 | 1;
const ERR_INVALID: u32 = 1 << 31 | 3;
const ERR_UNKNOWN: u32 = 1 << 31 | 6;

const INFO_EXPORT: u16 = 0;
const INFO_BLOCK_SIZE: u16 = 3;

/// The abilities of a disk: has flags, FLUSH, FUA, TRIM, WRITE_ZEROES.
const TRANSMISSION_FLAGS: u16 = 1 | 1 << 2 | 1 << 3 | 1 << 5 | 1 << 6;

/// How the connection continues after an option.
pub enum HandshakeStep {
    /// Send this reply, and expect another option.
    More(Vec<u8>),
    /// Send this reply, and serve the disk.
    Serve(Vec<u8>, Arc<LoggedDisk>),
    /// Send this reply, and end the connection.
    End(Vec<u8>),
}

/// The handshake with one client.
pub struct NbdHandshake<'a> {
    exports: &'a NbdExports,
    has_zeroes: bool,
}

impl<'a> NbdHandshake<'a> {
    /// Begins after the client's flags; `None` if it sets a flag that the server did not offer.
    pub fn new(exports: &'a NbdExports, flags: u32) -> Option<Self> {
        let is_known = flags & !(FIXED_NEWSTYLE | NO_ZEROES) == 0;
        is_known.then_some(Self { exports, has_zeroes: flags & NO_ZEROES == 0 })
    }

    /// Handles an option.
    pub fn handle_option(&self, option: u32, data: &[u8]) -> HandshakeStep {
        match option {
            EXPORT_NAME => self.handle_export_name(data),
            ABORT => HandshakeStep::End(option_reply(option, ACK, &[])),
            LIST => HandshakeStep::More(self.list_exports(data)),
            INFO | GO => self.handle_info(option, data),
            _ => HandshakeStep::More(error_reply(
                option,
                ERR_UNSUPPORTED,
                "Firn does not know this option",
            )),
        }
    }

    /// Handles the old option that chooses a disk, which has no error replies.
    fn handle_export_name(&self, name: &[u8]) -> HandshakeStep {
        let Some(disk) = self.exports.find_disk(name) else {
            return HandshakeStep::End(Vec::new());
        };
        let mut answer = disk.size().to_be_bytes().to_vec();
        answer.extend_from_slice(&TRANSMISSION_FLAGS.to_be_bytes());
        answer.resize(answer.len() + if self.has_zeroes { 124 } else { 0 }, 0);
        HandshakeStep::Serve(answer, disk)
    }

    fn list_exports(&self, data: &[u8]) -> Vec<u8> {
        if !data.is_empty() {
            return error_reply(LIST, ERR_INVALID, "a list is asked for without data");
        }
        let server = |name: &str| {
            option_reply(
                LIST,
                SERVER,
                &[&(name.len() as u32).to_be_bytes()[..], name.as_bytes()].concat(),
            )
        };
        let mut answer: Vec<u8> = self.exports.disk_names().flat_map(server).collect();
        answer.extend(option_reply(LIST, ACK, &[]));
        answer
    }

    fn handle_info(&self, option: u32, data: &[u8]) -> HandshakeStep {
        let Some(name) = parse_export_name(data) else {
            return HandshakeStep::More(error_reply(
                option,
                ERR_INVALID,
                "the lengths in this option are wrong",
            ));
        };
        let Some(disk) = self.exports.find_disk(name) else {
            return HandshakeStep::More(error_reply(
                option,
                ERR_UNKNOWN,
                &self.exports.unknown_disk_message(name),
            ));
        };
        let answer = describe_disk(option, &disk);
        match option {
            GO => HandshakeStep::Serve(answer, disk),
            _ => HandshakeStep::More(answer),
        }
    }
}

/// Parses the name in an option: length (4), name, count (2), then `count` numbers (2 each) of the
/// facts that the client requests. The server sends all facts anyway.
fn parse_export_name(data: &[u8]) -> Option<&[u8]> {
    let (length, rest) = data.split_first_chunk::<4>()?;
    let (name, rest) = rest.split_at_checked(u32::from_be_bytes(*length) as usize)?;
    let (count, wanted) = rest.split_first_chunk::<2>()?;
    (wanted.len() == 2 * usize::from(u16::from_be_bytes(*count))).then_some(name)
}

/// The replies that describe a disk.
fn describe_disk(option: u32, disk: &LoggedDisk) -> Vec<u8> {
    let mut export = INFO_EXPORT.to_be_bytes().to_vec();
    export.extend_from_slice(&disk.size().to_be_bytes());
    export.extend_from_slice(&TRANSMISSION_FLAGS.to_be_bytes());
    let mut blocks = INFO_BLOCK_SIZE.to_be_bytes().to_vec();
    for bytes in [1, BLOCK_BYTES_PREFERRED, TRANSFER_BYTES_MAX] {
        blocks.extend_from_slice(&bytes.to_be_bytes());
    }
    [
        option_reply(option, REP_INFO, &export),
        option_reply(option, REP_INFO, &blocks),
        option_reply(option, ACK, &[]),
    ]
    .concat()
}

fn error_reply(option: u32, kind: u32, words: &str) -> Vec<u8> {
    option_reply(option, kind, words.as_bytes())
}

fn option_reply(option: u32, kind: u32, data: &[u8]) -> Vec<u8> {
    let mut reply = REPLY_MAGIC.to_be_bytes().to_vec();
    for number in [option, kind, data.len() as u32] {
        reply.extend_from_slice(&number.to_be_bytes());
    }
    reply.extend_from_slice(data);
    reply
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::tests::Memory;

    fn exports() -> NbdExports {
        let disk = || Arc::new(LoggedDisk::new(Box::new(Memory::default()), 1 << 20));
        [("vda".to_owned(), disk()), ("vdb".to_owned(), disk())].into_iter().collect()
    }

    fn go(name: &[u8]) -> Vec<u8> {
        [&(name.len() as u32).to_be_bytes()[..], name, &[0, 1, 0, 3]].concat()
    }

    /// The types of the replies.
    fn kinds(mut replies: &[u8]) -> Vec<u32> {
        let mut kinds = Vec::new();
        while let Some((head, rest)) = replies.split_first_chunk::<20>() {
            assert_eq!(head[..8], REPLY_MAGIC.to_be_bytes());
            kinds.push(u32::from_be_bytes(head[12..16].try_into().unwrap()));
            let length = u32::from_be_bytes(head[16..].try_into().unwrap());
            replies = &rest[length as usize..];
        }
        kinds
    }

    fn asked(option: u32, data: &[u8]) -> Vec<u32> {
        let exports = exports();
        match NbdHandshake::new(&exports, 3).unwrap().handle_option(option, data) {
            HandshakeStep::More(replies)
            | HandshakeStep::Serve(replies, _)
            | HandshakeStep::End(replies) => kinds(&replies),
        }
    }

    #[test]
    fn each_option_has_its_replies() {
        assert_eq!(asked(GO, &go(b"vda")), [REP_INFO, REP_INFO, ACK]);
        assert_eq!(asked(INFO, &go(b"vdb")), [REP_INFO, REP_INFO, ACK]);
        assert_eq!(asked(LIST, b""), [SERVER, SERVER, ACK]);
        assert_eq!(asked(ABORT, b""), [ACK]);
        assert_eq!(asked(8, b""), [ERR_UNSUPPORTED]);
    }

    #[test]
    fn an_invalid_option_has_an_error_reply() {
        assert_eq!(asked(GO, &go(b"vdc")), [ERR_UNKNOWN]);
        assert_eq!(asked(GO, &go(b"")), [ERR_UNKNOWN], "there are two");
        assert_eq!(asked(GO, &go(b"vda")[..9]), [ERR_INVALID]);
        assert_eq!(asked(GO, &[255; 8]), [ERR_INVALID]);
        assert_eq!(asked(LIST, b"x"), [ERR_INVALID]);
        assert!(NbdHandshake::new(&exports(), 4).is_none());
    }

    #[test]
    fn export_name_sends_zeroes_unless_the_client_declines() {
        let exports = exports();
        for (flags, bytes) in [(1, 134), (3, 10)] {
            let handshake = NbdHandshake::new(&exports, flags).unwrap();
            let HandshakeStep::Serve(answer, _) = handshake.handle_option(EXPORT_NAME, b"vda")
            else {
                panic!()
            };
            assert_eq!(answer.len(), bytes);
            assert!(matches!(handshake.handle_option(EXPORT_NAME, b"x"), HandshakeStep::End(_)));
        }
    }

    proptest! {
        #[test]
        fn no_option_makes_it_panic(option in 0..12_u32, data in prop::collection::vec(any::<u8>(), 0..40)) {
            asked_anything(option, &data);
        }
    }

    fn asked_anything(option: u32, data: &[u8]) {
        let exports = exports();
        NbdHandshake::new(&exports, 3).unwrap().handle_option(option, data);
    }
}
