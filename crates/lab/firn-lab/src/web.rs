//! Clients of the full guest's web server.
//!
//! Clients choose pages as in Halite, section 8.2.3: at random with a Gaussian distribution, so
//! that they often request pages in the middle, and hardly ever those at the ends. A client keeps
//! its connection for the next page, as browsers do.

use std::io::{self, BufRead as _, BufReader, Read as _, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc;
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use firn_guest::stamp::mix;

/// Pages of the full guest: `/page/N.html` for each N below this number.
pub const PAGES: u32 = 5000;
/// Standard deviations from the middle to either end.
const DEVIATIONS: f64 = 5.0;
/// How long a client waits before it tries again where no server listens yet.
const RETRY_INTERVAL: Duration = Duration::from_millis(1);

/// Page numbers with a Gaussian distribution around the middle, from a seed.
#[derive(Clone, Debug)]
pub struct GaussianPages {
    state: u64,
}

impl GaussianPages {
    /// The same seed gives the same pages.
    pub fn new(seed: u64) -> Self {
        Self { state: mix(seed) }
    }

    fn next_uniform(&mut self) -> f64 {
        self.state = self.state.wrapping_add(1);
        (mix(self.state) >> 11) as f64 / (1_u64 << 53) as f64
    }
}

impl Iterator for GaussianPages {
    type Item = u32;

    /// The sum of twelve uniform numbers is close to a normal one, with a variance of 1.
    fn next(&mut self) -> Option<u32> {
        let normal = (0..12).map(|_| self.next_uniform()).sum::<f64>() - 6.0;
        let middle = f64::from(PAGES) / 2.0;
        let page = middle + normal * middle / DEVIATIONS;
        Some(page.clamp(0.0, f64::from(PAGES - 1)) as u32)
    }
}

/// A client of the web server, on one connection as long as the server keeps it.
#[derive(Debug)]
pub struct WebClient {
    address: SocketAddr,
    patience: Duration,
    stream: Option<BufReader<TcpStream>>,
}

/// The head of a response.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct ResponseHead {
    length: u64,
    closes: bool,
}

impl WebClient {
    /// Creates a client of which no operation takes longer than `patience`.
    pub fn new(address: SocketAddr, patience: Duration) -> Self {
        Self { address, patience, stream: None }
    }

    /// Requests a page and reads all of it. Connects first if there is no connection.
    pub fn get_page(&mut self, page: u32) -> io::Result<()> {
        let mut stream = match self.stream.take() {
            Some(stream) => stream,
            None => self.open_connection()?,
        };
        let request = format!("GET /page/{page}.html HTTP/1.1\r\nHost: guest\r\n\r\n");
        stream.get_mut().write_all(request.as_bytes())?;
        let head = read_head(&mut stream)?;
        let read = io::copy(&mut (&mut stream).take(head.length), &mut io::sink())?;
        if read != head.length {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        self.stream = Some(stream).filter(|_| !head.closes);
        Ok(())
    }

    fn open_connection(&self) -> io::Result<BufReader<TcpStream>> {
        let stream = TcpStream::connect_timeout(&self.address, self.patience)?;
        stream.set_nodelay(true)?;
        stream.set_read_timeout(Some(self.patience))?;
        stream.set_write_timeout(Some(self.patience))?;
        Ok(BufReader::new(stream))
    }
}

/// Reads the head of a response, which must have status 200.
fn read_head(stream: &mut BufReader<TcpStream>) -> io::Result<ResponseHead> {
    if !read_line(stream)?.starts_with("http/1.1 200") {
        return Err(io::ErrorKind::InvalidData.into());
    }
    let (mut length, mut closes) = (None, false);
    loop {
        let line = read_line(stream)?;
        if line.trim().is_empty() {
            let length = length.ok_or(io::ErrorKind::InvalidData)?;
            return Ok(ResponseHead { length, closes });
        }
        length = line.strip_prefix("content-length:").map_or(length, |n| n.trim().parse().ok());
        closes |= line.starts_with("connection: close");
    }
}

fn read_line(stream: &mut BufReader<TcpStream>) -> io::Result<String> {
    let mut line = String::new();
    match stream.read_line(&mut line)? {
        0 => Err(io::ErrorKind::UnexpectedEof.into()),
        _ => Ok(line.to_ascii_lowercase()),
    }
}

/// Requests a page until a response arrives. Each time `again` has passed, it opens one more
/// connection, while earlier ones continue. The first response counts.
///
/// # Errors
/// The last one, if no page was answered within `limit`.
pub fn wait_for_page(
    address: SocketAddr,
    page: u32,
    again: Duration,
    limit: Duration,
) -> io::Result<()> {
    let deadline = Instant::now() + limit;
    let (sender, answers) = mpsc::channel();
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        let (sender, mut client) =
            (sender.clone(), WebClient::new(address, left.max(RETRY_INTERVAL)));
        thread::spawn(move || drop(sender.send(client.get_page(page))));
        let error = match answers.recv_timeout(again) {
            Ok(Ok(())) => return Ok(()),
            Ok(Err(error)) => {
                thread::sleep(RETRY_INTERVAL);
                error
            }
            Err(_) => io::ErrorKind::TimedOut.into(),
        };
        if Instant::now() >= deadline {
            return Err(error);
        }
    }
}

/// Clients that request pages as fast as the server responds. Dropping them stops them.
#[derive(Debug)]
pub struct WebLoad {
    stop: Arc<AtomicBool>,
    clients: Vec<JoinHandle<()>>,
}

impl WebLoad {
    /// Starts `clients` clients; more than two stall in QEMU's user networking.
    pub fn start(address: SocketAddr, clients: u64, seed: u64, patience: Duration) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let start = |number| {
            let (stop, pages) = (Arc::clone(&stop), GaussianPages::new(seed + number));
            thread::spawn(move || request_pages(address, pages, patience, &stop))
        };
        let clients = (0..clients).map(start).collect();
        Self { stop, clients }
    }
}

fn request_pages(address: SocketAddr, pages: GaussianPages, patience: Duration, stop: &AtomicBool) {
    let mut client = WebClient::new(address, patience);
    for page in pages.take_while(|_| !stop.load(Ordering::Relaxed)) {
        if client.get_page(page).is_err() {
            thread::sleep(RETRY_INTERVAL);
        }
    }
}

impl Drop for WebLoad {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        // A client that panicked requests nothing any more.
        self.clients.drain(..).for_each(|client| drop(client.join()));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::TcpListener;

    const SOON: Duration = Duration::from_secs(5);

    /// Answers one connection with these bytes, whatever it requests.
    fn server(answer: &'static str) -> (SocketAddr, JoinHandle<()>) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let thread = thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            let mut request = [0; 1024];
            let _ = stream.read(&mut request).unwrap();
            stream.write_all(answer.as_bytes()).unwrap();
        });
        (address, thread)
    }

    #[test]
    fn pages_crowd_in_the_middle() {
        let pages: Vec<u32> = GaussianPages::new(3).take(20_000).collect();
        let near = pages.iter().filter(|&&page| page.abs_diff(PAGES / 2) < PAGES / 10).count();
        assert!((12_000..15_500).contains(&near), "{near} within a standard deviation");
        assert!(pages.iter().all(|&page| page < PAGES));
        assert_eq!(GaussianPages::new(3).next(), Some(pages[0]));
        assert_ne!(GaussianPages::new(4).take(5).collect::<Vec<_>>(), pages[..5]);
    }

    #[test]
    fn a_page_is_read_to_its_end() {
        let (address, thread) = server("HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello");
        let mut client = WebClient::new(address, SOON);
        client.get_page(1).unwrap();
        assert!(client.stream.is_some(), "the connection is kept");
        thread.join().unwrap();
    }

    #[test]
    fn a_server_that_closes_is_asked_on_a_new_connection() {
        let close = "HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 2\r\n\r\nhi";
        let (address, thread) = server(close);
        let mut client = WebClient::new(address, SOON);
        client.get_page(1).unwrap();
        assert!(client.stream.is_none());
        thread.join().unwrap();
    }

    #[test]
    fn an_invalid_page_is_an_error() {
        for answer in
            ["HTTP/1.1 404 Not Found\r\n\r\n", "HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nx"]
        {
            let (address, thread) = server(answer);
            assert!(WebClient::new(address, SOON).get_page(1).is_err());
            thread.join().unwrap();
        }
    }

    #[test]
    fn a_missing_server_is_an_error() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        drop(listener);
        assert!(wait_for_page(address, 1, SOON, Duration::from_millis(20)).is_err());
    }
}
