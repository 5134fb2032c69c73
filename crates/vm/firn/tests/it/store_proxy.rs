//! A proxy between Firn and a store that misbehaves when a test wants that.
//!
//! ```text
//!   firn-store ----> proxy ----> s3s-fs
//!               <-- 403 ExpiredToken     requests with a token that has expired
//!               (nothing)                it stalls
//!               <-- end of connection    after this many bytes of requests, once or from then on
//! ```

use std::io::{Read as _, Write as _};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Mutex, MutexGuard};
use std::thread;
use std::time::Duration;

/// How the proxy treats what it receives.
#[derive(Clone, Default)]
struct ProxyOrders {
    expired_token: Option<String>,
    is_stalled: bool,
    /// Bytes of requests until it ends all connections.
    cut_after: Option<u64>,
    /// It ends each connection at once.
    is_cut: bool,
    /// It ended connections this many times.
    cuts: u64,
}

/// A running proxy. Its threads end with the test.
pub struct StoreProxy {
    address: SocketAddr,
    orders: Arc<Mutex<ProxyOrders>>,
}

impl StoreProxy {
    pub fn start(server: &str) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let (address, orders) = (listener.local_addr().unwrap(), Arc::default());
        let (shared, server) = (Arc::clone(&orders), server.to_owned());
        thread::spawn(move || {
            for client in listener.incoming().flatten() {
                let (orders, server) = (Arc::clone(&shared), server.clone());
                thread::spawn(move || pass_connection(&client, &server, &orders));
            }
        });
        Self { address, orders }
    }

    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Denies requests with this session token.
    pub fn expire(&self, token: &str) {
        self.orders().expired_token = Some(token.to_owned());
    }

    pub fn stall(&self) {
        self.orders().is_stalled = true;
    }

    /// Ends all connections after this many bytes of requests; new ones are passed on.
    pub fn cut_after(&self, bytes: u64) {
        self.orders().cut_after = Some(bytes);
    }

    /// How often it ended connections for that.
    pub fn cuts(&self) -> u64 {
        self.orders().cuts
    }

    /// The store is away from now on.
    pub fn cut(&self) {
        self.orders().is_cut = true;
    }

    /// Passes everything on.
    pub fn behave(&self) {
        let cuts = self.cuts();
        *self.orders() = ProxyOrders { cuts, ..ProxyOrders::default() };
    }

    fn orders(&self) -> MutexGuard<'_, ProxyOrders> {
        self.orders.lock().unwrap()
    }
}

fn pass_connection(client: &TcpStream, server: &str, orders: &Mutex<ProxyOrders>) {
    let Ok(server) = TcpStream::connect(server) else { return };
    thread::scope(|scope| {
        scope.spawn(|| pass_replies(&server, client, orders));
        pass_requests(client, &server, orders);
        let _ = server.shutdown(Shutdown::Both);
        let _ = client.shutdown(Shutdown::Both);
    });
}

fn pass_requests(client: &TcpStream, server: &TcpStream, orders: &Mutex<ProxyOrders>) {
    let (mut from, mut to) = (client, server);
    let mut bytes = vec![0; 16 << 10];
    while let Ok(count @ 1..) = from.read(&mut bytes) {
        let Some(len) = admit_bytes(&bytes[..count], orders) else { return };
        let is_expired = {
            let token = orders.lock().unwrap().expired_token.clone();
            token.is_some_and(|token| String::from_utf8_lossy(&bytes[..len]).contains(&token))
        };
        if is_expired {
            deny_request(client);
            return;
        }
        if to.write_all(&bytes[..len]).is_err() || len < count {
            return;
        }
    }
}

/// How many of these bytes are passed on; `None` if the connection is to end.
fn admit_bytes(bytes: &[u8], orders: &Mutex<ProxyOrders>) -> Option<usize> {
    while orders.lock().unwrap().is_stalled {
        thread::sleep(Duration::from_millis(10));
    }
    let mut orders = orders.lock().unwrap();
    if orders.is_cut {
        return None;
    }
    let Some(left) = orders.cut_after else { return Some(bytes.len()) };
    match left.checked_sub(bytes.len() as u64) {
        Some(left) => {
            orders.cut_after = Some(left);
            Some(bytes.len())
        }
        None => {
            orders.cut_after = None;
            orders.cuts += 1;
            Some(left as usize)
        }
    }
}

fn pass_replies(server: &TcpStream, client: &TcpStream, orders: &Mutex<ProxyOrders>) {
    let (mut from, mut to) = (server, client);
    let mut bytes = vec![0; 64 << 10];
    while let Ok(count @ 1..) = from.read(&mut bytes) {
        while orders.lock().unwrap().is_stalled {
            thread::sleep(Duration::from_millis(10));
        }
        if orders.lock().unwrap().is_cut || to.write_all(&bytes[..count]).is_err() {
            break;
        }
    }
    let _ = client.shutdown(Shutdown::Both);
}

/// The answer of S3 to a token that has expired.
fn deny_request(mut client: &TcpStream) {
    let body = "<?xml version=\"1.0\" encoding=\"UTF-8\"?><Error><Code>ExpiredToken</Code>\
        <Message>The provided token has expired.</Message></Error>";
    let head = format!(
        "HTTP/1.1 400 Bad Request\r\nContent-Type: application/xml\r\nContent-Length: {}\r\n\
         Connection: close\r\n\r\n",
        body.len()
    );
    let _ = client.write_all((head + body).as_bytes());
}
