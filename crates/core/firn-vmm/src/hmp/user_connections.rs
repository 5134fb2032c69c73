//! Parser of `info usernet`: the connections of QEMU's user networking.
//!
//! ```text
//!   Hub -1 (net):
//!     Protocol[State]    FD  Source Address  Port   Dest. Address  Port RecvQ SendQ
//!     TCP[ESTABLISHED]   15       10.0.2.15 51234        10.0.2.2  8080     0     0
//!     TCP[HOST_FORWARD]  12       127.0.0.1  2222       10.0.2.15    22     0     0
//!     UDP[236 sec]       16       10.0.2.15 48512        10.0.2.3    53     0     0
//! ```

use std::net::SocketAddrV4;

use serde::{Deserialize, Serialize};

/// States in which a TCP connection carries no more data, and those of no connection.
const OTHER_STATES: [&str; 6] =
    ["HOST_FORWARD", "NONE", "CLOSED", "LISTEN", "TIME_WAIT", "SYN_SENT"];

/// A TCP connection that the guest has made by QEMU's user networking, as the guest sees it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct UserConnection {
    /// QEMU's name for the back end.
    pub netdev: String,
    /// The guest's end.
    pub guest: SocketAddrV4,
    /// The other end.
    pub peer: SocketAddrV4,
}

/// The TCP connections in the output of `info usernet`.
pub fn parse_user_connections(text: &str) -> Vec<UserConnection> {
    let (mut connections, mut netdev) = (Vec::new(), "");
    for line in text.lines() {
        if let Some(name) = parse_back_end(line) {
            netdev = name;
        } else if let Some((guest, peer)) = parse_connection(line) {
            connections.push(UserConnection { netdev: netdev.to_owned(), guest, peer });
        }
    }
    connections
}

fn parse_back_end(line: &str) -> Option<&str> {
    let (_, name) = line.trim_end().strip_prefix("Hub ")?.split_once(" (")?;
    name.strip_suffix("):")
}

fn parse_connection(line: &str) -> Option<(SocketAddrV4, SocketAddrV4)> {
    let (state, rest) = line.trim().strip_prefix("TCP[")?.split_once(']')?;
    if OTHER_STATES.contains(&state) {
        return None;
    }
    let mut words = rest.split_whitespace().skip(1);
    let mut parse_address = || {
        let (ip, port) = (words.next()?.parse().ok()?, words.next()?.parse().ok()?);
        Some(SocketAddrV4::new(ip, port))
    };
    Some((parse_address()?, parse_address()?))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const TEXT: &str = "Hub -1 (one):\r\n  Protocol[State]    FD  Source Address  Port   Dest. Address  Port RecvQ SendQ\r\n  \
        TCP[ESTABLISHED]   15       10.0.2.15 51234        10.0.2.2  8080     0     0\r\n  \
        TCP[HOST_FORWARD]  12       127.0.0.1  2222       10.0.2.15    22     0     0\r\n  \
        TCP[TIME_WAIT]     13       10.0.2.15 51235        10.0.2.2  8080     0     0\r\n  \
        UDP[236 sec]       16       10.0.2.15 48512        10.0.2.3    53     0     0\r\n\
        Hub 0 (two):\r\n  TCP[CLOSE_WAIT]    18       10.0.3.15  1234  192.0.2.7   443     0     0\r\n";

    #[test]
    fn connections_have_their_back_end_and_both_ends() {
        let connection = |netdev: &str, guest: &str, peer: &str| UserConnection {
            netdev: netdev.to_owned(),
            guest: guest.parse().unwrap(),
            peer: peer.parse().unwrap(),
        };
        let expected = [
            connection("one", "10.0.2.15:51234", "10.0.2.2:8080"),
            connection("two", "10.0.3.15:1234", "192.0.2.7:443"),
        ];
        assert_eq!(parse_user_connections(TEXT), expected);
    }

    proptest! {
        #[test]
        fn no_text_makes_it_panic(text in "(Hub | \\(|\\):|TCP\\[|\\] 1| 10.0.2.2 | 5 |\n){0,30}") {
            parse_user_connections(&text);
        }
    }
}
