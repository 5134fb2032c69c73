//! A slow connection to a server of this host: a proxy that adds a round trip and bounds the bandwidth.
//!
//! ```text
//!   client --> proxy --- each piece of a request waits for the round trip --> server
//!          <-- all connections together: so many bytes per second ---------
//! ```
//!
//! A new connection waits for a round trip as well, for its handshake.

use std::io::{Read as _, Write as _};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

/// Bytes that are passed on at a time.
const PIECE_BYTES: usize = 16 << 10;

/// A slow connection.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct LinkSpeed {
    /// Added to each request.
    pub round_trip: Duration,
    /// Of all replies together.
    pub bytes_per_second: f64,
}

/// A proxy. Dropping it accepts no more connections.
pub struct SlowLink {
    address: SocketAddr,
    is_closed: Arc<AtomicBool>,
}

impl SlowLink {
    /// Starts a proxy to a server.
    pub fn start(server: SocketAddr, speed: LinkSpeed) -> std::io::Result<Self> {
        let listener = TcpListener::bind("127.0.0.1:0")?;
        let address = listener.local_addr()?;
        let is_closed = Arc::new(AtomicBool::new(false));
        let closed = Arc::clone(&is_closed);
        thread::spawn(move || {
            let free_at = Arc::new(Mutex::new(Instant::now()));
            for client in listener.incoming().flatten() {
                if closed.load(Ordering::Relaxed) {
                    return;
                }
                let free_at = Arc::clone(&free_at);
                thread::spawn(move || {
                    let _ = pass_both(client, server, speed, &free_at);
                });
            }
        });
        Ok(Self { address, is_closed })
    }

    /// Its address.
    pub fn address(&self) -> SocketAddr {
        self.address
    }
}

impl Drop for SlowLink {
    fn drop(&mut self) {
        self.is_closed.store(true, Ordering::Relaxed);
        // Wakes the thread that accepts.
        let _ = TcpStream::connect(self.address);
    }
}

fn pass_both(
    client: TcpStream,
    server: SocketAddr,
    speed: LinkSpeed,
    free_at: &Mutex<Instant>,
) -> std::io::Result<()> {
    thread::sleep(speed.round_trip);
    let server = TcpStream::connect(server)?;
    client.set_nodelay(true)?;
    server.set_nodelay(true)?;
    let (requests, replies) = (client.try_clone()?, server.try_clone()?);
    thread::scope(|scope| {
        scope.spawn(|| pass_on(&requests, &server, |_| thread::sleep(speed.round_trip)));
        pass_on(&replies, &client, |bytes| wait_for_link(bytes, speed, free_at));
    });
    Ok(())
}

/// Passes bytes on until one side closes.
fn pass_on(mut from: &TcpStream, mut to: &TcpStream, wait: impl Fn(usize)) {
    let mut piece = vec![0; PIECE_BYTES];
    while let Ok(read) = from.read(&mut piece) {
        wait(read);
        if read == 0 || to.write_all(piece.get(..read).unwrap_or_default()).is_err() {
            break;
        }
    }
    let _ = to.shutdown(Shutdown::Write);
    let _ = from.shutdown(Shutdown::Read);
}

/// Waits until the link has sent these bytes.
fn wait_for_link(bytes: usize, speed: LinkSpeed, free_at: &Mutex<Instant>) {
    let done = {
        let mut free_at = free_at.lock().unwrap_or_else(PoisonError::into_inner);
        let begin = Instant::now().max(*free_at);
        *free_at = begin + Duration::from_secs_f64(bytes as f64 / speed.bytes_per_second);
        *free_at
    };
    thread::sleep(done.saturating_duration_since(Instant::now()));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_slow_link_delays_a_request_and_bounds_the_reply() {
        let server = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = server.local_addr().unwrap();
        thread::spawn(move || {
            let (mut stream, _) = server.accept().unwrap();
            stream.read_exact(&mut [0]).unwrap();
            stream.write_all(&vec![7; 1 << 20]).unwrap();
        });
        let speed = LinkSpeed { round_trip: Duration::from_millis(50), bytes_per_second: 5e6 };
        let link = SlowLink::start(address, speed).unwrap();
        let mut client = TcpStream::connect(link.address()).unwrap();
        let begun = Instant::now();
        client.write_all(&[1]).unwrap();
        let mut reply = vec![0; 1 << 20];
        client.read_exact(&mut reply).unwrap();
        assert!(begun.elapsed() >= Duration::from_millis(100 + 190), "{:?}", begun.elapsed());
        assert!(reply.iter().all(|byte| *byte == 7));
    }
}
