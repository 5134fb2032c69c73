//! The connections of the ring: from the previous VM, from clients outside, and to the next VM.

use std::io;
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

use anyhow::{Context as _, Result};
use serde_json::{Value, json};

use super::{Passed, Ring};
use crate::lines::Lines;
use crate::pace::Pace;

/// Interval between attempts to send a token to the next VM.
const AGAIN: Duration = Duration::from_millis(50);

struct Shared {
    passed: Mutex<Passed>,
    vms: u64,
    next: Sender<u64>,
}

/// Passes tokens on for ever.
pub(super) fn serve(args: &Ring) -> Result<()> {
    let port = args.next.port();
    let listener = TcpListener::bind((Ipv4Addr::UNSPECIFIED, port))
        .with_context(|| format!("cannot bind TCP port {port}"))?;
    serve_at(&listener, args);
    Ok(())
}

fn serve_at(listener: &TcpListener, args: &Ring) {
    let (next, tokens) = channel();
    let shared = Arc::new(Shared { passed: Mutex::default(), vms: args.vms, next });
    println!("{}", json!({"ready": true}));
    let (passing, args) = (Arc::clone(&shared), args.clone());
    thread::spawn(move || passing.pass(&tokens, args.next, args.rate));
    for stream in listener.incoming().flatten() {
        let shared = Arc::clone(&shared);
        // The previous VM makes another connection if this one breaks.
        thread::spawn(move || shared.hear(stream));
    }
}

impl Shared {
    fn passed(&self) -> MutexGuard<'_, Passed> {
        self.passed.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Receives lines until the connection breaks.
    fn hear(&self, stream: TcpStream) -> io::Result<()> {
        let mut lines = Lines::new(stream)?;
        let mut is_first = true;
        loop {
            let said: Value = lines.hear()?;
            if let Some(number) = said["token"].as_u64() {
                if self.passed().see(number, self.vms, is_first) {
                    self.pass_on(number + 1);
                }
                is_first = false;
                lines.say(&json!({"got": number}))?;
            } else if said["begin"] == true {
                self.pass_on(1);
                lines.say(&json!({"begun": true}))?;
            } else {
                let passed = *self.passed();
                lines.say(&passed)?;
            }
        }
    }

    fn pass_on(&self, number: u64) {
        // The receiver lives as long as the program.
        let _ = self.next.send(number);
    }

    fn pass(&self, tokens: &Receiver<u64>, to: SocketAddr, rate: f64) {
        let (mut link, mut pace) = (None, Pace::new(rate));
        for number in tokens {
            pace.wait(1);
            while let Err(error) = tell(&mut link, to, number) {
                link = None;
                self.passed().broken += 1;
                println!("{}", json!({"token": number, "broken": error.to_string()}));
                thread::sleep(AGAIN);
            }
        }
    }
}

fn tell(link: &mut Option<Lines>, to: SocketAddr, number: u64) -> io::Result<()> {
    let open = match link.take() {
        Some(open) => open,
        None => Lines::connect(to)?,
    };
    let open = link.insert(open);
    open.say(&json!({"token": number}))?;
    let said: Value = open.hear()?;
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
            let ring = Ring { vms: 3, next: vms[(number + 1) % 3], rate: 0.0 };
            thread::spawn(move || serve_at(&listener, &ring));
        }
        let mut outside = vms.map(|vm| Lines::connect(vm).unwrap());
        outside[0].say(&json!({"begin": true})).unwrap();
        outside[0].hear::<Value>().unwrap();
        let mut asked = |vm: usize| -> Passed {
            outside[vm].say(&json!({"ask": true})).unwrap();
            outside[vm].hear().unwrap()
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
