//! A network between hosts that can stop forwarding, without notifying any process.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

pub struct Relay {
    pub address: SocketAddr,
    is_cut: Arc<AtomicBool>,
}

impl Relay {
    /// Forwards bytes to that address.
    pub fn to(target: SocketAddr) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let is_cut: Arc<AtomicBool> = Arc::default();
        let cut = Arc::clone(&is_cut);
        thread::spawn(move || {
            for near in listener.incoming().flatten() {
                let Ok(far) = TcpStream::connect(target) else { continue };
                let (near2, far2) = (near.try_clone().unwrap(), far.try_clone().unwrap());
                let [one, other] = [Arc::clone(&cut), Arc::clone(&cut)];
                thread::spawn(move || pass(near, far, &one));
                thread::spawn(move || pass(far2, near2, &other));
            }
        });
        Self { address, is_cut }
    }

    /// From now on no bytes are forwarded; nor is the end of a connection.
    pub fn cut(&self, is_cut: bool) {
        self.is_cut.store(is_cut, Ordering::Release);
    }
}

fn pass(mut from: TcpStream, mut to: TcpStream, is_cut: &AtomicBool) {
    let mut piece = vec![0; 65_536];
    loop {
        let count = from.read(&mut piece).unwrap_or_default();
        while is_cut.load(Ordering::Acquire) {
            thread::sleep(Duration::from_millis(10));
        }
        if count == 0 || to.write_all(&piece[..count]).is_err() {
            let _ = to.shutdown(std::net::Shutdown::Both);
            return;
        }
    }
}
