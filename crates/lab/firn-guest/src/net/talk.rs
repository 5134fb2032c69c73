//! A check that one TCP connection survives.
//!
//! The other sender ([`super::load`]) gives up on a late echo and reconnects. This one waits for
//! the echo of each message for any time: so it shows that a connection survives the events at the
//! other end.

use std::io::{Read as _, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use serde_json::json;

use super::load::build_message;
use crate::rate_limiter::RateLimiter;

/// The interval between progress lines.
const PROGRESS_INTERVAL: Duration = Duration::from_millis(200);

/// Exchanges messages until the connection breaks. False if an echo was wrong.
pub(super) fn run_talk(to: SocketAddr, bytes: usize, rate: f64) -> Result<bool> {
    let mut stream = TcpStream::connect(to).with_context(|| format!("cannot connect to {to}"))?;
    stream.set_nodelay(true)?;
    let (mut limiter, mut echo) = (RateLimiter::new(rate), vec![0; bytes]);
    let (mut last_report, mut longest) = (Instant::now(), Duration::ZERO);
    for echoed in 0_u64.. {
        let (message, since) = (build_message(echoed, bytes), Instant::now());
        stream
            .write_all(&message)
            .and_then(|()| stream.read_exact(&mut echo))
            .with_context(|| format!("the connection broke after {echoed} echoes"))?;
        if echo != message {
            println!("{}", json!({ "wrong": echoed }));
            return Ok(false);
        }
        longest = longest.max(since.elapsed());
        if last_report.elapsed() >= PROGRESS_INTERVAL {
            println!("{}", json!({ "progress": echoed + 1, "longest_ms": longest.as_millis() }));
            last_report = Instant::now();
        }
        limiter.wait_for(1);
    }
    Ok(true)
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;
    use std::thread;

    use super::*;

    /// An echo server that echoes `messages` messages, and then changes one or closes the
    /// connection.
    fn echo(messages: usize, then: impl Fn(&mut [u8]) -> bool + Send + 'static) -> SocketAddr {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            let mut message = [0; 100];
            for number in 0.. {
                stream.read_exact(&mut message).unwrap();
                if number == messages && !then(&mut message) {
                    return;
                }
                stream.write_all(&message).unwrap();
            }
        });
        address
    }

    #[test]
    fn a_wrong_echo_and_a_broken_connection_are_reported() {
        let changed = echo(3, |message| {
            message[50] ^= 1;
            true
        });
        assert!(!run_talk(changed, 100, 0.0).unwrap());
        let broken = run_talk(echo(3, |_| false), 100, 0.0).unwrap_err();
        assert!(broken.to_string().contains("broke after 3 echoes"), "{broken}");
    }
}
