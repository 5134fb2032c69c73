//! Messages between an application and a backup process, inside of TLS.
//!
//! ```text
//!   application                                        backup
//!   H version u16, generation u64, name length u8, name
//!                                                      A generation u64, sequence u64: the state that the backup has
//!   G                                                  R record: its state
//!   R record, R record, ... F                          A generation, sequence, once all of them are stored
//!                                                      E code u8, number u64, length u16, text: the connection ends
//! ```
//!
//! A greeting of generation 0 is for reading only. A greeting with another generation makes this
//! connection the writer of the session: connections of older generations are refused from then on.

use std::borrow::Cow;
use std::io::{self, Read, Write};

use super::error::BackupError;
use super::image::StateId;
use super::record::{EncodedRecord, HEADER, RecordHeader};

pub(crate) const VERSION: u16 = 3;
/// The maximum length of an error's text in bytes.
const ERROR_BYTES_MAX: usize = 1000;
/// Bytes of a record that are read at once: memory grows with the bytes that have arrived, not with
/// the announced length.
const CHUNK: u64 = 1 << 20;

/// One message.
#[derive(Debug)]
pub(crate) enum BackupMessage {
    Hello { version: u16, generation: u64, name: String },
    Get,
    Record { header: RecordHeader, payload: Vec<u8>, record: EncodedRecord<'static> },
    Flush,
    Acknowledge(StateId),
    Error(PeerError),
}

/// Why the backup ends a connection.
#[derive(Debug)]
pub(crate) enum PeerError {
    /// It cannot do it now.
    Failed(String),
    /// It does not do it.
    Refused(String),
    /// A later session, of this generation, has taken over.
    Superseded(u64),
}

impl PeerError {
    /// The error as a peer is to see it.
    pub(crate) fn from_error(error: &BackupError) -> Self {
        match error {
            BackupError::Superseded { generation } => Self::Superseded(*generation),
            BackupError::Refused(text) => Self::Refused(text.clone()),
            BackupError::File { .. }
            | BackupError::InUse { .. }
            | BackupError::Failed(_)
            | BackupError::Connection { .. } => Self::Failed(error.describe()),
            _ => Self::Refused(error.describe()),
        }
    }

    fn code_and_text(&self) -> (u8, u64, &str) {
        match self {
            Self::Failed(text) => (0, 0, text),
            Self::Refused(text) => (1, 0, text),
            Self::Superseded(generation) => (2, *generation, ""),
        }
    }
}

impl From<PeerError> for BackupError {
    fn from(error: PeerError) -> Self {
        match error {
            PeerError::Failed(text) => Self::Failed(text),
            PeerError::Refused(text) => Self::Refused(text),
            PeerError::Superseded(generation) => Self::Superseded { generation },
        }
    }
}

/// Writes a message.
pub(crate) fn send_message(to: &mut impl Write, message: &BackupMessage) -> io::Result<()> {
    let mut bytes = Vec::new();
    match message {
        BackupMessage::Hello { version, generation, name } => {
            bytes.push(b'H');
            bytes.extend(version.to_le_bytes());
            bytes.extend(generation.to_le_bytes());
            bytes.push(name.len() as u8);
            bytes.extend(name.as_bytes());
        }
        BackupMessage::Get => bytes.push(b'G'),
        BackupMessage::Flush => bytes.push(b'F'),
        BackupMessage::Acknowledge(id) => {
            bytes.push(b'A');
            bytes.extend(id.generation.to_le_bytes());
            bytes.extend(id.sequence.to_le_bytes());
        }
        BackupMessage::Error(error) => {
            let (code, number, text) = error.code_and_text();
            let text = shorten_text(text).as_bytes();
            bytes.extend([b'E', code]);
            bytes.extend(number.to_le_bytes());
            bytes.extend((text.len() as u16).to_le_bytes());
            bytes.extend(text);
        }
        BackupMessage::Record { record, .. } => return send_record(to, record),
    }
    to.write_all(&bytes)
}

/// The beginning of a text, cut after a whole character.
fn shorten_text(text: &str) -> &str {
    let ends = text.char_indices().map(|(at, char)| at + char.len_utf8());
    &text[..ends.take_while(|end| *end <= ERROR_BYTES_MAX).last().unwrap_or(0)]
}

/// Writes a record.
pub(crate) fn send_record(to: &mut impl Write, record: &EncodedRecord<'_>) -> io::Result<()> {
    to.write_all(b"R")?;
    record.write_to(to)
}

/// Reads a message.
pub(crate) fn receive_message(from: &mut impl Read) -> io::Result<BackupMessage> {
    Ok(match read_array::<1>(from)?[0] {
        b'H' => {
            let version = u16::from_le_bytes(read_array(from)?);
            let generation = u64::from_le_bytes(read_array(from)?);
            let [len] = read_array(from)?;
            let name = read_text(from, u64::from(len))?;
            BackupMessage::Hello { version, generation, name }
        }
        b'G' => BackupMessage::Get,
        b'F' => BackupMessage::Flush,
        b'A' => {
            let generation = u64::from_le_bytes(read_array(from)?);
            let sequence = u64::from_le_bytes(read_array(from)?);
            BackupMessage::Acknowledge(StateId { generation, sequence })
        }
        b'E' => BackupMessage::Error(receive_error(from)?),
        b'R' => receive_record(from)?,
        _ => return Err(malformed_message("unknown kind of message")),
    })
}

fn receive_error(from: &mut impl Read) -> io::Result<PeerError> {
    let [code] = read_array(from)?;
    let number = u64::from_le_bytes(read_array(from)?);
    let len = u16::from_le_bytes(read_array(from)?);
    let text = read_text(from, u64::from(len))?;
    match code {
        0 => Ok(PeerError::Failed(text)),
        1 => Ok(PeerError::Refused(text)),
        2 => Ok(PeerError::Superseded(number)),
        _ => Err(malformed_message("unknown kind of error")),
    }
}

fn receive_record(from: &mut impl Read) -> io::Result<BackupMessage> {
    let head: [u8; HEADER] = read_array(from)?;
    let header = RecordHeader::parse_header(&head).map_err(invalid_data)?;
    let mut stored = Vec::new();
    read_bytes(from, header.stored, &mut stored)?;
    let payload = header.decode_payload(&head, &stored).map_err(invalid_data)?.into_owned();
    let record = EncodedRecord { head, stored: Cow::Owned(stored) };
    Ok(BackupMessage::Record { header, payload, record })
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
