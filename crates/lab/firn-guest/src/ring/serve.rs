//! The connections of the ring: from the previous VM, from clients outside, and to the next VM.

use std::io;
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

use anyhow::{Context as _, Result};
use serde_json::{Value, json};

use super::{RingArgs, TokenRecord};
use crate::lines::JsonLines;
use crate::rate_limiter::RateLimiter;

/// Interval between attempts to send a token to the next VM.
const RETRY_INTERVAL: Duration = Duration::from_millis(50);

struct RingServer {
    passed: Mutex<TokenRecord>,
    vms: u64,
    next: Sender<u64>,
}

/// Passes tokens on for ever.
pub(super) fn serve_ring(args: &RingArgs) -> Result<()> {
    let port = args.next.port();
    let listener = TcpListener::bind((Ipv4Addr::UNSPECIFIED, port))
        .with_context(|| format!("cannot bind TCP port {port}"))?;
    serve_at(&listener, args);
    Ok(())
}

fn serve_at(listener: &TcpListener, args: &RingArgs) {
    let (next, tokens) = channel();
    let shared = Arc::new(RingServer { passed: Mutex::default(), vms: args.vms, next });
    println!("{}", json!({"ready": true}));
    let (passing, args) = (Arc::clone(&shared), args.clone());
    thread::spawn(move || passing.forward_tokens(&tokens, args.next, args.rate));
    for stream in listener.incoming().flatten() {
        let shared = Arc::clone(&shared);
        // The previous VM makes another connection if this one breaks.
        thread::spawn(move || shared.serve_connection(stream));
    }
}

impl RingServer {
    fn lock_record(&self) -> MutexGuard<'_, TokenRecord> {
        self.passed.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Receives lines until the connection breaks.
    fn serve_connection(&self, stream: TcpStream) -> io::Result<()> {
        let mut lines = JsonLines::new(stream)?;
        let mut is_first = true;
        loop {
            let said: Value = lines.receive_line()?;
            if let Some(number) = said["token"].as_u64() {
                if self.lock_record().record_token(number, self.vms, is_first) {
                    self.queue_token(number + 1);
                }
                is_first = false;
                lines.send_line(&json!({"got": number}))?;
            } else if said["begin"] == true {
                self.queue_token(1);
                lines.send_line(&json!({"begun": true}))?;
            } else {
                let passed = *self.lock_record();
                lines.send_line(&passed)?;
            }
        }
    }

    fn queue_token(&self, number: u64) {
        // The receiver lives as long as the program.
        let _ = self.next.send(number);
    }

    fn forward_tokens(&self, tokens: &Receiver<u64>, to: SocketAddr, rate: f64) {
        let (mut link, mut limiter) = (None, RateLimiter::new(rate));
        for number in tokens {
            limiter.wait_for(1);
            while let Err(error) = send_token(&mut link, to, number) {
                link = None;
                self.lock_record().broken += 1;
                println!("{}", json!({"token": number, "broken": error.to_string()}));
                thread::sleep(RETRY_INTERVAL);
            }
        }
    }
}

fn send_token(link: &mut Option<JsonLines>, to: SocketAddr, number: u64) -> io::Result<()> {
    let open = match link.take() {
        Some(open) => open,
        None => JsonLines::connect(to)?,
    };
    let open = link.insert(open);
    open.send_line(&json!({"token": number}))?;
    let said: Value = open.receive_line()?;
    if said["got"] == number { Ok(()) } else { Err(io::Error::other(said.to_string())) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_token_goes_round() {
        let listeners = [0; 3].map(|_| TcpListener::bind("127.0.0.1:0").unwrap());
        let vms = listeners.each_ref().map(|it| it.local_addr().unwrap());
        for (number, listener) in listeners.into_iter().enumerate() {
            let ring = RingArgs { vms: 3, next: vms[(number + 1) % 3], rate: 0.0 };
            thread::spawn(move || serve_at(&listener, &ring));
        }
        let mut outside = vms.map(|vm| JsonLines::connect(vm).unwrap());
        outside[0].send_line(&json!({"begin": true})).unwrap();
        outside[0].receive_line::<Value>().unwrap();
        let mut asked = |vm: usize| -> TokenRecord {
            outside[vm].send_line(&json!({"ask": true})).unwrap();
            outside[vm].receive_line().unwrap()
        };
        while asked(0).passed < 100 {
            thread::sleep(Duration::from_millis(1));
        }
        for vm in 0..3 {
            let passed = asked(vm);
            assert_eq!((passed.wrong, passed.broken), (0, 0));
            assert_eq!(passed.last % 3, vm as u64);
        }
    }
}
