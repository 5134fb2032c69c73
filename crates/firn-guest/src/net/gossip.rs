//! Two programs that send each other their progress continuously, to detect that one of them went
//! back alone.
//!
//! ```text
//!   | number: u64 | received: u64 |      UDP, little-endian: the sender's count, and the newest number that it has
//!                                        received from the other
//! ```
//!
//! Both numbers are in this program's memory alone. If the other has received more than this
//! program has sent, this guest went back and the other did not (an *orphan*). If a number arrives
//! that is not higher than the last, the other went back and this one did not.

use std::net::{Ipv4Addr, SocketAddr, UdpSocket};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use serde_json::{Value, json};

use crate::pace::Pace;

/// The interval between progress lines.
const TELL_EVERY: Duration = Duration::from_millis(200);

/// The counts of one of the two programs.
#[derive(Debug, Default)]
struct Known {
    sent: u64,
    received: u64,
    orphans: u64,
    repeated: u64,
    missing: u64,
}

impl Known {
    fn message(&mut self) -> [u8; 16] {
        self.sent += 1;
        let mut message = [0; 16];
        message[..8].copy_from_slice(&self.sent.to_le_bytes());
        message[8..].copy_from_slice(&self.received.to_le_bytes());
        message
    }

    fn hear(&mut self, message: &[u8]) {
        let (Some(number), Some(received)) =
            (message.first_chunk::<8>(), message.get(8..).and_then(|rest| rest.first_chunk::<8>()))
        else {
            return;
        };
        let (number, received) = (u64::from_le_bytes(*number), u64::from_le_bytes(*received));
        self.orphans += u64::from(received > self.sent);
        self.repeated += u64::from(number <= self.received);
        // The first message may follow others that were sent before this program listened.
        if self.received > 0 {
            self.missing += number.saturating_sub(self.received + 1);
        }
        self.received = self.received.max(number);
    }

    fn told(&self) -> Value {
        json!({ "sent": self.sent, "received": self.received, "orphans": self.orphans,
            "repeated": self.repeated, "missing": self.missing })
    }
}

/// Sends and receives for ever.
pub(super) fn gossip(port: u16, to: SocketAddr, rate: f64) -> Result<()> {
    let socket = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, port))
        .with_context(|| format!("cannot bind UDP port {port}"))?;
    socket.set_nonblocking(true)?;
    let (mut known, mut pace, mut datagram) = (Known::default(), Pace::new(rate), [0; 64]);
    let mut told = Instant::now();
    loop {
        // Errors are those of earlier messages, sent before the other listened.
        let _ = socket.send_to(&known.message(), to);
        while let Ok((bytes, _)) = socket.recv_from(&mut datagram) {
            known.hear(&datagram[..bytes]);
        }
        if told.elapsed() >= TELL_EVERY {
            println!("{}", known.told());
            told = Instant::now();
        }
        pace.wait(1);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_went_back_alone_is_found_out() {
        let (mut one, mut other) = (Known::default(), Known::default());
        for _ in 0..3 {
            other.hear(&one.message());
            one.hear(&other.message());
        }
        assert_eq!((one.orphans, one.repeated, one.missing), (0, 0, 0));
        let mut back = Known { sent: 1, received: 1, ..Known::default() };
        back.hear(&other.message());
        assert_eq!((back.orphans, back.missing), (1, 2));
        other.hear(&back.message());
        assert_eq!((other.orphans, other.repeated), (0, 1));
        other.hear(b"short");
        assert_eq!(other.received, 3);
    }
}
