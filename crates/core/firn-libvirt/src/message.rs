//! One message of libvirt's RPC: its header, and what follows it.
//!
//! ```text
//!   length | program, version, procedure, kind, serial, status | [number of descriptors] | payload
//!    4 B   |                  6 x 4 B                          |           4 B           |
//! ```
//!
//! The length counts itself. Descriptors follow the message, each with one byte. Source: libvirt
//! `src/rpc/virnetprotocol.x`, `src/remote/remote_protocol.x`, `src/remote/qemu_protocol.x`; the
//! numbers do not change, because clients and daemons of different versions work together.

use crate::error::LibvirtError;
use crate::xdr::{XdrReader, XdrWriter};

/// The maximum length of a message, in bytes.
pub(crate) const MESSAGE_BYTES_MAX: usize = 16 << 20;
/// The length of the header, with the length of the message.
pub(crate) const HEADER_BYTES: usize = 28;

const VERSION: u32 = 1;
const STATUS_OK: u32 = 0;

/// A procedure of the daemon: its name, its program and its number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Procedure {
    pub(crate) name: &'static str,
    pub(crate) program: u32,
    pub(crate) number: i32,
}

impl Procedure {
    const fn remote(name: &'static str, number: i32) -> Self {
        Self { name, program: 0x2000_8086, number }
    }

    const fn qemu(name: &'static str, number: i32) -> Self {
        Self { name, program: 0x2000_8087, number }
    }
}

pub(crate) const OPEN: Procedure = Procedure::remote("opening the driver", 1);
pub(crate) const CLOSE: Procedure = Procedure::remote("closing the driver", 2);
pub(crate) const GET_TYPE: Procedure = Procedure::remote("asking for the driver's type", 3);
pub(crate) const CREATE: Procedure = Procedure::remote("creating the domain", 10);
pub(crate) const DEFINE: Procedure = Procedure::remote("defining the domain", 11);
pub(crate) const DESTROY: Procedure = Procedure::remote("ending the domain", 12);
pub(crate) const GET_XML: Procedure = Procedure::remote("reading the domain's XML", 14);
pub(crate) const FIND_BY_NAME: Procedure = Procedure::remote("finding the domain", 23);
pub(crate) const FIND_BY_UUID: Procedure = Procedure::remote("finding the domain", 24);
pub(crate) const RESUME: Procedure = Procedure::remote("resuming the domain", 28);
pub(crate) const LIST_AUTH: Procedure = Procedure::remote("listing ways to authenticate", 66);
pub(crate) const AUTH_POLKIT: Procedure = Procedure::remote("authenticating by polkit", 70);
pub(crate) const IS_PERSISTENT: Procedure = Procedure::remote("querying the domain", 151);
pub(crate) const MONITOR_COMMAND: Procedure = Procedure::qemu("executing a monitor command", 1);
pub(crate) const REGISTER_EVENTS: Procedure = Procedure::qemu("registering for events", 4);
pub(crate) const MONITOR_EVENT: Procedure = Procedure::qemu("reporting an event", 6);
pub(crate) const MONITOR_COMMAND_WITH_FILES: Procedure =
    Procedure::qemu("executing a monitor command with a descriptor", 7);

/// The kind of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum MessageKind {
    Call = 0,
    Reply = 1,
    Event = 2,
    CallWithFds = 4,
}

/// A message from the daemon.
#[derive(Debug)]
pub(crate) enum DaemonMessage<'a> {
    /// The reply to the call with this serial number.
    Reply {
        serial: u32,
        /// What the procedure returns, or why it failed.
        result: Result<XdrReader<'a>, LibvirtError>,
    },
    /// An event of a domain's monitor.
    MonitorEvent(XdrReader<'a>),
    /// Another event.
    Other,
}

/// Encodes a call.
pub(crate) fn encode_call(procedure: Procedure, serial: u32, payload: &[u8], fds: u32) -> Vec<u8> {
    let (kind, fds_bytes) = match fds {
        0 => (MessageKind::Call, 0),
        _ => (MessageKind::CallWithFds, 4),
    };
    let bytes = HEADER_BYTES + fds_bytes + payload.len();
    let header = XdrWriter(Vec::with_capacity(bytes)).number(bytes as u32);
    let header = header.number(procedure.program).number(VERSION).signed(procedure.number);
    let header = header.number(kind as u32).number(serial).number(STATUS_OK);
    let mut message = if fds > 0 { header.number(fds) } else { header }.0;
    message.extend(payload);
    message
}

/// Decodes a message, without its length.
pub(crate) fn decode_message(message: &[u8]) -> Result<DaemonMessage<'_>, LibvirtError> {
    let mut reader = XdrReader(message);
    let program = reader.number()?;
    let _version = reader.number()?;
    let number = reader.signed()?;
    let (kind, serial, status) = (reader.number()?, reader.number()?, reader.number()?);
    if kind == MessageKind::Reply as u32 {
        let result = match status {
            STATUS_OK => Ok(reader),
            _ => Err(decode_error(reader)?),
        };
        return Ok(DaemonMessage::Reply { serial, result });
    }
    let is_event = kind == MessageKind::Event as u32;
    match (is_event, program == MONITOR_EVENT.program && number == MONITOR_EVENT.number) {
        (true, true) => Ok(DaemonMessage::MonitorEvent(reader)),
        (true, false) => Ok(DaemonMessage::Other),
        (false, _) => Err(LibvirtError::Message { what: "it is neither a reply nor an event" }),
    }
}

fn decode_error(mut reader: XdrReader<'_>) -> Result<LibvirtError, LibvirtError> {
    let (code, _domain) = (reader.signed()?, reader.signed()?);
    let text = reader.optional_string()?.unwrap_or_default();
    Ok(LibvirtError::Refused { code, text })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_call_has_the_form_of_the_protocol() {
        let plain = encode_call(OPEN, 7, b"abcd", 0);
        let expected: [u32; 7] = [32, 0x2000_8086, 1, 1, 0, 7, 0];
        let bytes: Vec<u8> = expected.iter().flat_map(|it| it.to_be_bytes()).collect();
        assert_eq!(plain[..HEADER_BYTES], bytes);
        assert_eq!(&plain[HEADER_BYTES..], b"abcd");
        let with_fd = encode_call(MONITOR_COMMAND_WITH_FILES, 8, b"abcd", 1);
        assert_eq!(with_fd.len(), 36);
        assert_eq!(with_fd[16..20], 4u32.to_be_bytes(), "the kind");
        assert_eq!(with_fd[28..32], 1u32.to_be_bytes(), "the number of descriptors");
    }

    #[test]
    fn an_error_has_a_number_and_a_text() {
        let header = [0x2000_8086, 1, 23, 1, 5, 1]
            .iter()
            .fold(XdrWriter::default(), |it, &number| it.number(number));
        let message = header.signed(42).signed(10).optional_string(Some("no domain")).0;
        let Ok(DaemonMessage::Reply { serial: 5, result: Err(error) }) = decode_message(&message)
        else {
            panic!("no reply")
        };
        assert!(error.is_no_domain());
        assert_eq!(error.to_string(), "libvirt says: no domain");
    }

    proptest! {
        #[test]
        fn any_bytes_are_a_message_or_an_error(bytes in proptest::collection::vec(any::<u8>(), 0..80)) {
            let _ = decode_message(&bytes);
        }
    }
}
