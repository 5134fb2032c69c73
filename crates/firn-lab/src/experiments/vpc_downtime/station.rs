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

use crate::site::Site;

/// Time between two questions to each guest.
const EVERY: Duration = Duration::from_millis(10);

/// The client. It asks until it is dropped.
#[derive(Debug)]
pub struct Station(Arc<Mutex<Asked>>);

#[derive(Debug)]
struct Asked {
    guests: Vec<Ipv4Addr>,
    question: u64,
    /// The first question that counts.
    from: u64,
    /// When each guest answered a question that counts for the first time.
    answered: Vec<Option<Instant>>,
}

impl Asked {
    fn new(guests: Vec<Ipv4Addr>) -> Self {
        let answered = vec![None; guests.len()];
        Self { guests, question: 0, from: 0, answered }
    }

    fn anew(&mut self) {
        self.from = self.question + 1;
        self.answered.fill(None);
    }

    fn answer(&mut self, from: IpAddr, answer: &[u8], now: Instant) {
        let question = answer.first_chunk().copied().map(u64::from_le_bytes);
        let guest = self.guests.iter().position(|guest| from == *guest);
        let counts = question.is_some_and(|question| question >= self.from);
        if let Some(guest) = guest.filter(|_| counts) {
            self.answered[guest].get_or_insert(now);
        }
    }
}

impl Station {
    /// Starts to ask the guests with these numbers ([`HostSite::vm_address`]).
    ///
    /// # Errors
    /// If the site has no outside.
    pub fn start(site: &Site, guests: impl Iterator<Item = u8>) -> Result<Self> {
        let guests: Vec<u8> = guests.collect();
        let addresses = guests.iter().map(|&guest| Site::vm_address(guest)).collect();
        let asked = Arc::new(Mutex::new(Asked::new(addresses)));
        let (station, outside) = (Arc::downgrade(&asked), site.outside()?);
        let (tell, told) = mpsc::channel();
        thread::spawn(move || {
            let ready = outside.enter().and_then(|()| socket(&guests));
            match ready {
                Ok((asking, hearing)) => {
                    let heard = station.clone();
                    thread::spawn(move || hear(&heard, &hearing));
                    // The caller may have given up.
                    let _ = tell.send(Ok(()));
                    ask(&station, &asking);
                }
                Err(error) => drop(tell.send(Err(error))),
            }
        });
        told.recv().context("the client ended")??;
        Ok(Self(asked))
    }

    /// Forgets all answers: questions asked before now do not count.
    pub fn ask_anew(&self) {
        locked(&self.0).anew();
    }

    /// When each of the first `guests` guests answered for the first time; `None` while one has
    /// not.
    pub fn answered(&self, guests: usize) -> Option<Vec<Instant>> {
        locked(&self.0).answered.iter().take(guests).copied().collect()
    }
}

fn locked(asked: &Mutex<Asked>) -> MutexGuard<'_, Asked> {
    asked.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A socket in this thread's network namespace, twice.
fn socket(guests: &[u8]) -> Result<(UdpSocket, UdpSocket)> {
    guests.iter().try_for_each(|&guest| make_known(guest))?;
    let socket = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0)).context("the client's socket")?;
    socket.set_read_timeout(Some(10 * EVERY))?;
    Ok((socket.try_clone()?, socket))
}

/// Adds a permanent entry for a guest's Ethernet address to the kernel.
fn make_known(guest: u8) -> Result<()> {
    let (address, mac) =
        (Site::vm_address(guest).to_string(), format!("52:54:00:12:34:{guest:02x}"));
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

fn ask(station: &Weak<Mutex<Asked>>, socket: &UdpSocket) {
    while let Some(asked) = station.upgrade() {
        let (question, guests) = {
            let mut asked = locked(&asked);
            asked.question += 1;
            (asked.question, asked.guests.clone())
        };
        drop(asked);
        for guest in guests {
            // The guest may not run now.
            let _ = socket.send_to(&question.to_le_bytes(), (guest, COUNT_PORT));
        }
        thread::sleep(EVERY);
    }
}

fn hear(station: &Weak<Mutex<Asked>>, socket: &UdpSocket) {
    let mut answer = [0; 64];
    loop {
        let heard = socket.recv_from(&mut answer);
        let Some(asked) = station.upgrade() else { return };
        match heard {
            Ok((bytes, from)) => {
                locked(&asked).answer(from.ip(), &answer[..bytes], Instant::now());
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
    fn what_was_asked_before_does_not_count() {
        let guests: Vec<Ipv4Addr> = [1, 2].map(Site::vm_address).into();
        let [one, other] = [guests[0], guests[1]].map(IpAddr::from);
        let mut asked = Asked::new(guests);
        asked.question = 4;
        asked.anew();
        let now = Instant::now();
        let answer = |question: u64| [question.to_le_bytes(), [1; 8]].concat();
        asked.answer(one, &answer(4), now);
        assert_eq!(asked.answered, [None, None]);
        asked.answer(one, &answer(5), now);
        asked.answer(one, &answer(6), now + EVERY);
        asked.answer(other, b"short", now);
        asked.answer(Ipv4Addr::LOCALHOST.into(), &answer(6), now);
        assert_eq!(asked.answered, [Some(now), None]);
        asked.anew();
        assert_eq!(asked.answered, [None, None]);
    }
}
