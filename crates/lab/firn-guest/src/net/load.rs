//! The sender: messages whose echoes can be checked.
//!
//! ```text
//!   byte  0          8                              the rest
//!         | SEQUENCE | noise drawn from SEQUENCE ... |
//! ```

use std::io::{self, Read as _, Write as _};
use std::net::{Ipv4Addr, SocketAddr, TcpStream, UdpSocket};
use std::time::{Duration, Instant};

use crate::rate_limiter::RateLimiter;
use crate::stamp::mix;

/// How long an echo may take before it counts as lost.
const ECHO_TIMEOUT: Duration = Duration::from_millis(300);

/// The result of a load.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct EchoReport {
    /// Messages sent.
    pub sent: u64,
    /// Echoes that were right.
    pub echoed: u64,
    /// Echoes that were wrong.
    pub wrong: u64,
}

/// Sends messages to a `firn-guest net-dma echo` and checks the echoes. Connects when needed, and
/// again when the connection breaks.
#[derive(Debug)]
pub struct EchoLoad {
    to: SocketAddr,
    udp: bool,
    bytes: usize,
    link: Option<EchoLink>,
    report: EchoReport,
}

#[derive(Debug)]
enum EchoLink {
    Udp(UdpSocket),
    Tcp(TcpStream),
}

impl EchoLoad {
    /// A load with messages of `bytes` bytes (at least 8).
    pub fn new(to: SocketAddr, udp: bool, bytes: usize) -> Self {
        let bytes = bytes.clamp(8, 60_000);
        Self { to, udp, bytes, link: None, report: EchoReport::default() }
    }

    /// Sends for this duration, at most `rate` messages per second (0: as fast as echoes arrive).
    pub fn run_for(&mut self, duration: Duration, rate: f64) -> EchoReport {
        let start = Instant::now();
        let mut limiter = RateLimiter::new(rate);
        while start.elapsed() < duration {
            self.exchange_one();
            limiter.wait_for(1);
        }
        self.report
    }

    /// Sends one message and waits for its echo. True if the echo was right.
    pub fn exchange_one(&mut self) -> bool {
        let message = build_message(self.report.sent, self.bytes);
        self.report.sent += 1;
        match self.try_exchange(&message) {
            Ok(echo) if echo == message => {
                self.report.echoed += 1;
                true
            }
            Ok(_) => {
                self.report.wrong += 1;
                false
            }
            Err(_) => {
                self.link = None;
                std::thread::sleep(Duration::from_millis(5));
                false
            }
        }
    }

    fn try_exchange(&mut self, message: &[u8]) -> io::Result<Vec<u8>> {
        let link = match self.link.take() {
            Some(link) => link,
            None => EchoLink::open_link(self.to, self.udp)?,
        };
        self.link.insert(link).send_and_receive(message)
    }
}

impl EchoLink {
    fn open_link(to: SocketAddr, udp: bool) -> io::Result<Self> {
        if udp {
            let socket = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0))?;
            socket.connect(to)?;
            socket.set_read_timeout(Some(ECHO_TIMEOUT))?;
            return Ok(Self::Udp(socket));
        }
        let stream = TcpStream::connect_timeout(&to, ECHO_TIMEOUT)?;
        stream.set_nodelay(true)?;
        stream.set_read_timeout(Some(ECHO_TIMEOUT))?;
        stream.set_write_timeout(Some(ECHO_TIMEOUT))?;
        Ok(Self::Tcp(stream))
    }

    fn send_and_receive(&mut self, message: &[u8]) -> io::Result<Vec<u8>> {
        let mut echo = vec![0; message.len()];
        match self {
            Self::Udp(socket) => {
                socket.send(message)?;
                let sequence = &message[..8];
                // Late echoes of earlier messages, which count as lost, may still arrive.
                loop {
                    let bytes = socket.recv(&mut echo)?;
                    if echo[..8] >= *sequence || bytes < 8 {
                        echo.truncate(bytes);
                        return Ok(echo);
                    }
                }
            }
            Self::Tcp(stream) => {
                stream.write_all(message)?;
                stream.read_exact(&mut echo)?;
                Ok(echo)
            }
        }
    }
}

/// The message with this number; big endian, so that later messages are greater.
pub(super) fn build_message(sequence: u64, bytes: usize) -> Vec<u8> {
    let mut message = sequence.to_be_bytes().to_vec();
    let mut state = mix(sequence);
    while message.len() < bytes {
        state = mix(state);
        message.extend_from_slice(&state.to_le_bytes());
    }
    message.truncate(bytes);
    message
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::TcpListener;

    #[test]
    fn echoes_are_right() {
        let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        std::thread::spawn(move || super::super::echo::serve_echoes(port));
        for udp in [true, false] {
            let mut load = EchoLoad::new(([127, 0, 0, 1], port).into(), udp, 1200);
            while !load.exchange_one() {}
            let report = load.run_for(Duration::from_millis(50), 0.0);
            assert!(report.echoed > 1, "{report:?}");
            assert_eq!(report.wrong, 0);
        }
    }

    #[test]
    fn a_missing_server_is_no_wrong_answer() {
        let mut load = EchoLoad::new(([127, 0, 0, 1], 9).into(), false, 100);
        assert_eq!(load.run_for(Duration::from_millis(20), 0.0).wrong, 0);
    }
}
