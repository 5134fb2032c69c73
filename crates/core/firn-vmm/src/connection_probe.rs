//! Connection probe: has a restored guest find out which of its connections have ended.
//!
//! QEMU's user networking does not know the connections that a guest had at a checkpoint. It resets
//! such a connection as soon as the guest sends something, but a guest that only waits for data would
//! wait for ever. So Firn sends the guest a segment of each, with the flag SYN, as from its peer:
//!
//! ```text
//!   Firn      --- SYN, any number ----------> guest      it has the connection, so it does not accept the segment,
//!   netdev    <-- ACK, the right numbers ---- guest      and replies with what it expects (RFC 9293, 3.10.7.4)
//!   netdev    --- RST, the right number ----> guest      its program gets ECONNRESET
//! ```
//!
//! A guest that has closed the connection meanwhile replies with a reset, which the back end
//! ignores.
//!
//! The segments pass a filter-redirector that is there for as long as they need. `queue=tx` is the
//! direction in which the back end sends. QEMU closes the filter's socket when it has read it to its
//! end. If Firn dies before it removes the filter, that passes on all frames unchanged.

use std::io::{self, Read as _, Write as _};
use std::net::{Shutdown, SocketAddrV4};
use std::os::fd::AsFd as _;
use std::os::unix::net::UnixStream;
use std::time::Duration;

use etherparse::PacketBuilder;
use serde_json::json;

use crate::hmp::UserConnection;
use crate::qmp::{QmpClient, QmpError};

/// The name of the filter and of its character device.
const PROBE_ID: &str = "firn-probe";
/// The maximum wait until QEMU has read all segments.
const READ_WAIT: Duration = Duration::from_secs(1);
/// The hardware address that the segments come from: that of user networking's own router.
const ROUTER: [u8; 6] = [0x52, 0x55, 10, 0, 2, 2];
/// Sequence number and window of the segments; the guest ignores both.
const SEQUENCE: u32 = 1;
const WINDOW: u16 = 1024;
/// Hops that a segment may make.
const TIME_TO_LIVE: u8 = 64;

/// Sends a segment of each connection to the card with this address, which is at this back end.
pub(crate) fn probe_connections(
    qmp: &mut QmpClient,
    (netdev, card): (&str, [u8; 6]),
    connections: &[&UserConnection],
) -> Result<(), QmpError> {
    let failed =
        |source| QmpError::Io { command: "testing the guest's connections".into(), source };
    let (ours, theirs) = UnixStream::pair().map_err(failed)?;
    add_device(qmp, theirs)?;
    let filter = json!({ "qom-type": "filter-redirector", "id": PROBE_ID, "netdev": netdev,
        "queue": "tx", "indev": PROBE_ID });
    let sent = qmp.execute("object-add", filter).and_then(|_| {
        let sent = send_segments(ours, card, connections);
        qmp.execute("object-del", json!({ "id": PROBE_ID }))?;
        sent.map_err(failed)
    });
    qmp.execute("chardev-remove", json!({ "id": PROBE_ID }))?;
    sent
}

fn add_device(qmp: &mut QmpClient, socket: UnixStream) -> Result<(), QmpError> {
    qmp.send_fd(PROBE_ID, socket.as_fd())?;
    let address = json!({ "type": "fd", "data": { "str": PROBE_ID } });
    let backend = json!({ "type": "socket", "data": json!({ "addr": address, "server": false }) });
    let added = qmp.execute("chardev-add", json!({ "id": PROBE_ID, "backend": backend }));
    if added.is_err() {
        // A descriptor that was not used stays open in QEMU. If this fails too, the first error says why.
        let _ = qmp.execute("closefd", json!({ "fdname": PROBE_ID }));
    }
    added.map(drop)
}

/// Sends the segments, and waits until QEMU has read them.
fn send_segments(
    mut socket: UnixStream,
    card: [u8; 6],
    connections: &[&UserConnection],
) -> io::Result<()> {
    socket.set_write_timeout(Some(READ_WAIT))?;
    for connection in connections {
        let frame = build_segment(card, connection.peer, connection.guest)?;
        socket.write_all(&(frame.len() as u32).to_be_bytes())?;
        socket.write_all(&frame)?;
    }
    socket.shutdown(Shutdown::Write)?;
    socket.set_read_timeout(Some(READ_WAIT))?;
    socket.read(&mut [0; 1]).map(drop)
}

/// An Ethernet frame with a SYN segment.
fn build_segment(card: [u8; 6], from: SocketAddrV4, to: SocketAddrV4) -> io::Result<Vec<u8>> {
    let mut frame = Vec::new();
    PacketBuilder::ethernet2(ROUTER, card)
        .ipv4(from.ip().octets(), to.ip().octets(), TIME_TO_LIVE)
        .tcp(from.port(), to.port(), SEQUENCE, WINDOW)
        .syn()
        .write(&mut frame, &[])
        .map_err(io::Error::other)?;
    Ok(frame)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_segment_seems_to_come_from_the_peer() {
        let card = [0x52, 0x54, 0, 0x12, 0x34, 0x56];
        let (peer, guest) = ("192.0.2.7:443".parse().unwrap(), "10.0.2.15:1234".parse().unwrap());
        let frame = build_segment(card, peer, guest).unwrap();
        assert_eq!((&frame[..6], frame.len()), (&card[..], 14 + 20 + 20));
        assert_eq!((&frame[26..30], &frame[30..34]), (&[192, 0, 2, 7][..], &[10, 0, 2, 15][..]));
        assert_eq!((&frame[34..36], &frame[36..38]), (&[1, 187][..], &[4, 210][..]));
        assert_eq!(frame[47], 2, "only SYN");
    }
}
