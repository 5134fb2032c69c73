//! Messages between an application and a backup process, inside of TLS.
//!
//! ```text
//!   application                                   backup
//!   H version u16, flags u8, name length u8, name
//!                                                 A sequence     of the state that the backup has
//!   G                                             R record       its state
//!   R record, R record, ... F                     A sequence     once all of them are stored
//!                                                 E length u16, text: an error; the connection ends
//! ```

use std::io::{self, Read, Write};

use super::error::BackupError;
use super::record::{HEADER, RecordHeader};

pub(crate) const VERSION: u16 = 1;
/// Flag of the greeting: the backup may replace its state by an older one.
pub(crate) const REPLACE: u8 = 1;
/// The maximum stored size of a record in bytes: a greater length is taken for an error.
const STORED_MAX: u64 = 1 << 36;
/// Bytes of a record that are read at once: memory grows with the bytes that have arrived, not with
/// the announced length.
const CHUNK: u64 = 1 << 20;

/// One message.
#[derive(Debug)]
pub(crate) enum BackupMessage {
    Hello { version: u16, flags: u8, name: String },
    Get,
    Record { header: RecordHeader, payload: Vec<u8>, bytes: Vec<u8> },
    Flush,
    Acknowledge(u64),
    Error(String),
}

/// Writes a message.
pub(crate) fn send_message(to: &mut impl Write, message: &BackupMessage) -> io::Result<()> {
    let mut bytes = Vec::new();
    match message {
        BackupMessage::Hello { version, flags, name } => {
            bytes.push(b'H');
            bytes.extend(version.to_le_bytes());
            bytes.extend([*flags, name.len() as u8]);
            bytes.extend(name.as_bytes());
        }
        BackupMessage::Get => bytes.push(b'G'),
        BackupMessage::Flush => bytes.push(b'F'),
        BackupMessage::Acknowledge(sequence) => {
            bytes.push(b'A');
            bytes.extend(sequence.to_le_bytes());
        }
        BackupMessage::Error(text) => {
            let text = &text.as_bytes()[..text.len().min(1000)];
            bytes.push(b'E');
            bytes.extend((text.len() as u16).to_le_bytes());
            bytes.extend(text);
        }
        BackupMessage::Record { bytes: record, .. } => return send_record(to, record),
    }
    to.write_all(&bytes)
}

/// Writes a record.
pub(crate) fn send_record(to: &mut impl Write, record: &[u8]) -> io::Result<()> {
    to.write_all(b"R")?;
    to.write_all(record)
}

/// Reads a message.
pub(crate) fn receive_message(from: &mut impl Read) -> io::Result<BackupMessage> {
    Ok(match read_array::<1>(from)?[0] {
        b'H' => {
            let [low, high, flags, len] = read_array(from)?;
            let name = read_text(from, u64::from(len))?;
            BackupMessage::Hello { version: u16::from_le_bytes([low, high]), flags, name }
        }
        b'G' => BackupMessage::Get,
        b'F' => BackupMessage::Flush,
        b'A' => BackupMessage::Acknowledge(u64::from_le_bytes(read_array(from)?)),
        b'E' => {
            let len = u16::from_le_bytes(read_array(from)?);
            BackupMessage::Error(read_text(from, u64::from(len))?)
        }
        b'R' => receive_record(from)?,
        _ => return Err(malformed_message("unknown kind of message")),
    })
}

fn receive_record(from: &mut impl Read) -> io::Result<BackupMessage> {
    let head: [u8; HEADER] = read_array(from)?;
    let header = RecordHeader::parse_header(&head).map_err(invalid_data)?;
    if header.stored > STORED_MAX {
        return Err(malformed_message("the record is too long"));
    }
    let mut bytes = head.to_vec();
    read_bytes(from, header.stored, &mut bytes)?;
    let payload = header.decode_payload(&head, &bytes[HEADER..]).map_err(invalid_data)?;
    Ok(BackupMessage::Record { header, payload, bytes })
}

fn read_bytes(from: &mut impl Read, len: u64, to: &mut Vec<u8>) -> io::Result<()> {
    let mut left = len;
    while left > 0 {
        let now = left.min(CHUNK);
        let start = to.len();
        to.resize(start + now as usize, 0);
        from.read_exact(&mut to[start..])?;
        left -= now;
    }
    Ok(())
}

fn read_text(from: &mut impl Read, len: u64) -> io::Result<String> {
    let mut bytes = Vec::new();
    read_bytes(from, len, &mut bytes)?;
    String::from_utf8(bytes).map_err(|_| malformed_message("a text is not UTF-8"))
}

fn read_array<const N: usize>(from: &mut impl Read) -> io::Result<[u8; N]> {
    let mut bytes = [0; N];
    from.read_exact(&mut bytes).map(|()| bytes)
}

fn invalid_data(error: BackupError) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, error)
}

fn malformed_message(why: &'static str) -> io::Error {
    invalid_data(BackupError::Malformed(why))
}
