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

use crate::rate_limiter::RateLimiter;

/// The interval between progress lines.
const PROGRESS_INTERVAL: Duration = Duration::from_millis(200);

/// The counts of one of the two programs.
#[derive(Debug, Default)]
struct GossipState {
    sent: u64,
    received: u64,
    orphans: u64,
    repeated: u64,
    missing: u64,
}

impl GossipState {
    fn next_message(&mut self) -> [u8; 16] {
        self.sent += 1;
        let mut message = [0; 16];
        message[..8].copy_from_slice(&self.sent.to_le_bytes());
        message[8..].copy_from_slice(&self.received.to_le_bytes());
        message
    }

    fn receive_message(&mut self, message: &[u8]) {
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

    fn progress_line(&self) -> Value {
        json!({ "sent": self.sent, "received": self.received, "orphans": self.orphans,
            "repeated": self.repeated, "missing": self.missing })
    }
}

/// Sends and receives for ever.
pub(super) fn run_gossip(port: u16, to: SocketAddr, rate: f64) -> Result<()> {
    let socket = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, port))
        .with_context(|| format!("cannot bind UDP port {port}"))?;
    socket.set_nonblocking(true)?;
    let (mut known, mut limiter, mut datagram) =
        (GossipState::default(), RateLimiter::new(rate), [0; 64]);
    let mut last_report = Instant::now();
    loop {
        // Errors are those of earlier messages, sent before the other listened.
        let _ = socket.send_to(&known.next_message(), to);
        while let Ok((bytes, _)) = socket.recv_from(&mut datagram) {
            known.receive_message(&datagram[..bytes]);
        }
        if last_report.elapsed() >= PROGRESS_INTERVAL {
            println!("{}", known.progress_line());
            last_report = Instant::now();
        }
        limiter.wait_for(1);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_vm_that_was_rolled_back_alone_is_detected() {
        let (mut one, mut other) = (GossipState::default(), GossipState::default());
        for _ in 0..3 {
            other.receive_message(&one.next_message());
            one.receive_message(&other.next_message());
        }
        assert_eq!((one.orphans, one.repeated, one.missing), (0, 0, 0));
        let mut back = GossipState { sent: 1, received: 1, ..GossipState::default() };
        back.receive_message(&other.next_message());
        assert_eq!((back.orphans, back.missing), (1, 2));
        other.receive_message(&back.next_message());
        assert_eq!((other.orphans, other.repeated), (0, 1));
        other.receive_message(b"short");
        assert_eq!(other.received, 3);
    }
}
