//! A client outside, which asks all guests again and again, and notes when each has answered.
//!
//! ```text
//!   UDP    question (8), little endian  --->  port COUNT_PORT of each guest
//!                                       <---  question (8) | number (8)
//! ```
//!
//! An answer counts only if its question was asked since [`OutsideClient::ask_anew`]: an answer
//! that was buffered is from no guest that runs now. The client's kernel has permanent entries for
//! the guests' addresses: how soon it would resolve them again is not measured.

use std::io;
use std::net::{IpAddr, Ipv4Addr, UdpSocket};
use std::process::Command;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};
use firn_guest::net::COUNT_PORT;

use crate::site::HostSite;

/// Time between two questions to each guest.
const QUESTION_INTERVAL: Duration = Duration::from_millis(10);

/// The client. It asks until it is dropped.
#[derive(Debug)]
pub struct OutsideClient(Arc<Mutex<ClientState>>);

#[derive(Debug)]
struct ClientState {
    guests: Vec<Ipv4Addr>,
    question: u64,
    /// The first question that counts.
    from: u64,
    /// When each guest answered a question that counts for the first time.
    answered: Vec<Option<Instant>>,
}

impl ClientState {
    fn new(guests: Vec<Ipv4Addr>) -> Self {
        let answered = vec![None; guests.len()];
        Self { guests, question: 0, from: 0, answered }
    }

    fn forget_answers(&mut self) {
        self.from = self.question + 1;
        self.answered.fill(None);
    }

    fn record_answer(&mut self, from: IpAddr, answer: &[u8], now: Instant) {
        let question = answer.first_chunk().copied().map(u64::from_le_bytes);
        let guest = self.guests.iter().position(|guest| from == *guest);
        let counts = question.is_some_and(|question| question >= self.from);
        if let Some(guest) = guest.filter(|_| counts) {
            self.answered[guest].get_or_insert(now);
        }
    }
}

impl OutsideClient {
    /// Starts to ask the guests with these numbers ([`HostSite::vm_address`]).
    ///
    /// # Errors
    /// If the site has no outside.
    pub fn start_client(site: &HostSite, guests: impl Iterator<Item = u8>) -> Result<Self> {
        let guests: Vec<u8> = guests.collect();
        let addresses = guests.iter().map(|&guest| HostSite::vm_address(guest)).collect();
        let asked = Arc::new(Mutex::new(ClientState::new(addresses)));
        let (station, outside) = (Arc::downgrade(&asked), site.outside_namespace()?);
        let (ready_sender, ready) = mpsc::channel();
        thread::spawn(move || {
            let ready = outside.enter().and_then(|()| open_sockets(&guests));
            match ready {
                Ok((asking, hearing)) => {
                    let clients = station.clone();
                    thread::spawn(move || receive_answers(&clients, &hearing));
                    // The caller may have given up.
                    let _ = ready_sender.send(Ok(()));
                    send_questions(&station, &asking);
                }
                Err(error) => drop(ready_sender.send(Err(error))),
            }
        });
        ready.recv().context("the client ended")??;
        Ok(Self(asked))
    }

    /// Forgets all answers: questions asked before now do not count.
    pub fn ask_anew(&self) {
        lock_state(&self.0).forget_answers();
    }

    /// When each of the first `guests` guests answered for the first time; `None` while one has
    /// not.
    pub fn first_answers(&self, guests: usize) -> Option<Vec<Instant>> {
        lock_state(&self.0).answered.iter().take(guests).copied().collect()
    }
}

fn lock_state(asked: &Mutex<ClientState>) -> MutexGuard<'_, ClientState> {
    asked.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A socket in this thread's network namespace, twice.
fn open_sockets(guests: &[u8]) -> Result<(UdpSocket, UdpSocket)> {
    guests.iter().try_for_each(|&guest| add_neighbour(guest))?;
    let socket = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0)).context("the client's socket")?;
    socket.set_read_timeout(Some(10 * QUESTION_INTERVAL))?;
    Ok((socket.try_clone()?, socket))
}

/// Adds a permanent entry for a guest's Ethernet address to the kernel.
fn add_neighbour(guest: u8) -> Result<()> {
    let (address, mac) =
        (HostSite::vm_address(guest).to_string(), format!("52:54:00:12:34:{guest:02x}"));
    let route = Command::new("ip").args(["-o", "route", "get", &address]).output()?;
    let route = String::from_utf8_lossy(&route.stdout).into_owned();
    let device = route.split_whitespace().skip_while(|word| *word != "dev").nth(1);
    let device = device.with_context(|| format!("there is no route to {address}"))?;
    let neighbour =
        ["neigh", "replace", &address, "lladdr", &mac, "nud", "permanent", "dev", device];
    let done = Command::new("ip").args(neighbour).output()?;
    if !done.status.success() {
        bail!("ip neigh: {}", String::from_utf8_lossy(&done.stderr).trim());
    }
    Ok(())
}

fn send_questions(station: &Weak<Mutex<ClientState>>, socket: &UdpSocket) {
    while let Some(asked) = station.upgrade() {
        let (question, guests) = {
            let mut asked = lock_state(&asked);
            asked.question += 1;
            (asked.question, asked.guests.clone())
        };
        drop(asked);
        for guest in guests {
            // The guest may not run now.
            let _ = socket.send_to(&question.to_le_bytes(), (guest, COUNT_PORT));
        }
        thread::sleep(QUESTION_INTERVAL);
    }
}

fn receive_answers(station: &Weak<Mutex<ClientState>>, socket: &UdpSocket) {
    let mut answer = [0; 64];
    loop {
        let received = socket.recv_from(&mut answer);
        let Some(asked) = station.upgrade() else { return };
        match received {
            Ok((bytes, from)) => {
                lock_state(&asked).record_answer(from.ip(), &answer[..bytes], Instant::now());
            }
            // No answer within the timeout, or a guest that does not listen yet.
            Err(error) if error.kind() != io::ErrorKind::InvalidInput => {}
            Err(_) => return,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_answer_to_an_earlier_question_does_not_count() {
        let guests: Vec<Ipv4Addr> = [1, 2].map(HostSite::vm_address).into();
        let [one, other] = [guests[0], guests[1]].map(IpAddr::from);
        let mut asked = ClientState::new(guests);
        asked.question = 4;
        asked.forget_answers();
        let now = Instant::now();
        let answer = |question: u64| [question.to_le_bytes(), [1; 8]].concat();
        asked.record_answer(one, &answer(4), now);
        assert_eq!(asked.answered, [None, None]);
        asked.record_answer(one, &answer(5), now);
        asked.record_answer(one, &answer(6), now + QUESTION_INTERVAL);
        asked.record_answer(other, b"short", now);
        asked.record_answer(Ipv4Addr::LOCALHOST.into(), &answer(6), now);
        assert_eq!(asked.answered, [Some(now), None]);
        asked.forget_answers();
        assert_eq!(asked.answered, [None, None]);
    }
}
