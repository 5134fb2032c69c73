//! The outside of a VM's network card: who listens at its uplink, has an address there, and asks the guest for the next number.
//!
//! ```text
//!   frame      | to (6) | from (6) | type (2) | ...                                       behind its length (4, big endian)
//!   UDP        | ... IPv4 header (20) | from, to, length, checksum: 2 each | question (8) | number (8) |
//! ```

use std::collections::BTreeMap;
use std::io::{self, Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard};
use std::thread;
use std::time::{Duration, Instant};

use crate::session::eventually;

/// How often a number is asked for.
const EVERY: Duration = Duration::from_millis(5);
const PATIENCE: Duration = Duration::from_secs(60);

/// The first card of a QEMU.
const GUEST: [u8; 6] = [0x52, 0x54, 0, 0x12, 0x34, 0x56];
const GUEST_IP: [u8; 4] = [10, 0, 2, 15];
const OUTSIDE: [u8; 6] = [2, 0, 0, 0, 0, 1];
const OUTSIDE_IP: [u8; 4] = [10, 0, 2, 2];
const PORT: u16 = 7008;
const ARP: [u8; 2] = [8, 6];
const RARP: [u8; 2] = [0x80, 0x35];
const IPV4: [u8; 2] = [8, 0];

/// What was heard of the guest.
#[derive(Default)]
pub struct Heard {
    pub answers: u64,
    /// The highest number.
    pub newest: u64,
    /// Questions and numbers of which the one was heard with another of the other before: what the guest had done was undone.
    pub undone: Vec<(u64, u64)>,
    /// How many answers came once more, the same as before: frames may come twice.
    pub repeated: u64,
    /// How long answers took, in milliseconds.
    pub delays_ms: Vec<f64>,
    /// The longest time between two answers, and when the newest came.
    longest_gap: Duration,
    answered_at: Option<Instant>,
    /// How many frames came by each connection.
    pub frames_by: Vec<u64>,
    /// The connection by which the guest was heard last: there it is asked, as a switch does.
    port: Option<usize>,
    /// How often the guest's address was announced.
    pub announced: u64,
    asked: BTreeMap<u64, Instant>,
    /// The question that each number answered, and the number of each question.
    answered: BTreeMap<u64, u64>,
    numbers: BTreeMap<u64, u64>,
}

/// Who has connected to the uplink.
struct Connection {
    number: usize,
    stream: UnixStream,
    /// What is left of a frame of which a part was written.
    rest: Vec<u8>,
}

impl Connection {
    /// Sends a frame, if there is room. A frame that was begun is finished first. `false` if the other end is closed.
    fn send(&mut self, frame: &[u8]) -> bool {
        if self.rest.is_empty() {
            self.rest.extend_from_slice(frame);
        }
        match self.stream.write(&self.rest) {
            Ok(bytes) => drop(self.rest.drain(..bytes)),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            Err(_) => return false,
        }
        true
    }
}

/// The client; it asks until it is dropped.
#[derive(Default)]
pub struct Outside(Arc<Station>);

#[derive(Default)]
struct Station {
    connections: Mutex<Vec<Connection>>,
    heard: Mutex<Heard>,
}

impl Outside {
    /// Begins to ask, by every uplink that somebody connects to.
    pub fn start() -> Self {
        let outside = Self::default();
        let station = Arc::downgrade(&outside.0);
        thread::spawn(move || {
            for question in 1.. {
                let Some(station) = station.upgrade() else { return };
                station.ask(question);
                drop(station);
                thread::sleep(EVERY);
            }
        });
        outside
    }

    /// Is an uplink.
    pub fn listen(&self, path: &Path) {
        let listener = UnixListener::bind(path).unwrap();
        let station = Arc::downgrade(&self.0);
        thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let Some(station) = station.upgrade() else { return };
                stream.set_write_timeout(Some(EVERY)).unwrap();
                let number = {
                    let mut heard = station.heard.lock().unwrap();
                    heard.frames_by.push(0);
                    heard.frames_by.len() - 1
                };
                let (writer, rest) = (stream.try_clone().unwrap(), Vec::new());
                let connection = Connection { number, stream: writer, rest };
                station.connections.lock().unwrap().push(connection);
                thread::spawn(move || station.hear(stream, number));
            }
        });
    }

    pub fn heard(&self) -> MutexGuard<'_, Heard> {
        self.0.heard.lock().unwrap()
    }

    /// Waits until the guest has answered so many questions that were asked from now on.
    #[track_caller]
    pub fn is_answered(&self, answers: u64) {
        let before = {
            let mut heard = self.heard();
            heard.asked.clear();
            heard.answers
        };
        eventually("answers", PATIENCE, || self.heard().answers >= before + answers);
    }

    /// The longest time without an answer since this was called before, or since the first answer.
    pub fn longest_gap(&self) -> Duration {
        std::mem::take(&mut self.heard().longest_gap)
    }

    /// The numbers that the guest has given, up to the newest, and that were never heard.
    pub fn unheard(&self) -> Vec<u64> {
        let heard = self.heard();
        let first = heard.answered.keys().next().copied().unwrap_or_default();
        (first..heard.newest).filter(|number| !heard.answered.contains_key(number)).collect()
    }

    /// Nothing is heard of the guest for a while.
    #[track_caller]
    pub fn hears_nothing(&self) {
        // What has left may still be under way.
        thread::sleep(Duration::from_millis(100));
        let before = self.heard().answers;
        thread::sleep(Duration::from_millis(400));
        assert_eq!(self.heard().answers, before);
    }

    /// How long answers took: half of them, and 95 of 100. Forgets them.
    pub fn delays_ms(&self) -> (f64, f64) {
        let mut delays = std::mem::take(&mut self.heard().delays_ms);
        delays.sort_by(f64::total_cmp);
        let at = |percent: usize| delays.get(delays.len() * percent / 100).copied();
        (at(50).unwrap_or_default(), at(95).unwrap_or_default())
    }
}

impl Station {
    fn ask(&self, question: u64) {
        self.heard.lock().unwrap().asked.insert(question, Instant::now());
        let frame = behind_length(&datagram(question));
        let mut connections = self.connections.lock().unwrap();
        let port = self.heard.lock().unwrap().port;
        let is_known = connections.iter().any(|connection| Some(connection.number) == port);
        // A guest that takes nothing now, such as one that boots, isn't asked now.
        connections.retain_mut(|connection| {
            (is_known && Some(connection.number) != port) || connection.send(&frame)
        });
    }

    fn hear(&self, mut stream: UnixStream, number: usize) {
        let mut length = [0; 4];
        while stream.read_exact(&mut length).is_ok() {
            let mut frame = vec![0; u32::from_be_bytes(length) as usize];
            if stream.read_exact(&mut frame).is_err() {
                return;
            }
            {
                let mut heard = self.heard.lock().unwrap();
                heard.frames_by[number] += 1;
                heard.port = Some(number);
            }
            match frame.get(12..14) {
                Some(kind) if kind == ARP => {
                    if let Some(answer) = arp_answer(&frame) {
                        let _ = stream.write_all(&behind_length(&answer));
                    }
                }
                Some(kind) if kind == RARP => self.heard.lock().unwrap().announced += 1,
                Some(kind) if kind == IPV4 => self.hear_number(&frame),
                _ => {}
            }
        }
    }

    fn hear_number(&self, frame: &[u8]) {
        let Some(payload) = frame.get(42..58).filter(|_| frame[23] == 17) else { return };
        let number = |at: usize| u64::from_le_bytes(payload[at..at + 8].try_into().unwrap());
        let (question, number) = (number(0), number(8));
        let mut heard = self.heard.lock().unwrap();
        let heard = &mut *heard;
        let now = Instant::now();
        let before = heard.answered_at.replace(now).unwrap_or(now);
        heard.longest_gap = heard.longest_gap.max(now - before);
        heard.answers += u64::from(heard.asked.contains_key(&question));
        if let Some(asked) = heard.asked.remove(&question) {
            heard.delays_ms.push(asked.elapsed().as_secs_f64() * 1e3);
        }
        let before = *heard.answered.entry(number).or_insert(question);
        let numbered = heard.numbers.insert(question, number);
        match numbered {
            Some(same) if same == number => heard.repeated += 1,
            None if before == question => {}
            _ => heard.undone.push((question, number)),
        }
        heard.newest = heard.newest.max(number);
    }
}

fn behind_length(frame: &[u8]) -> Vec<u8> {
    [&(frame.len() as u32).to_be_bytes()[..], frame].concat()
}

/// A question (RFC 768, RFC 791). UDP goes without its checksum, which is allowed.
fn datagram(question: u64) -> Vec<u8> {
    let payload = [question.to_le_bytes(), [0; 8]].concat();
    let udp_bytes = 8 + payload.len() as u16;
    let mut ip =
        [&[0x45, 0][..], &(20 + udp_bytes).to_be_bytes(), &[0, 0, 0, 0, 64, 17, 0, 0]].concat();
    ip.extend([OUTSIDE_IP, GUEST_IP].concat());
    let sum: u32 = ip.chunks(2).map(|pair| u32::from(u16::from_be_bytes([pair[0], pair[1]]))).sum();
    let check = !((sum & 0xffff) + (sum >> 16)) as u16;
    ip[10..12].copy_from_slice(&check.to_be_bytes());
    let ports = [40_000_u16.to_be_bytes(), PORT.to_be_bytes()].concat();
    let udp = [&ports[..], &udp_bytes.to_be_bytes(), &[0, 0]].concat();
    [&GUEST[..], &OUTSIDE, &IPV4, &ip, &udp, &payload].concat()
}

/// What to say to who asks for the outside's address (RFC 826).
fn arp_answer(frame: &[u8]) -> Option<Vec<u8>> {
    let asks = frame.get(20..22)? == [0, 1] && frame.get(38..42)? == OUTSIDE_IP;
    let (mac, ip) = (frame.get(22..28)?, frame.get(28..32)?);
    let head = [mac, &OUTSIDE, &ARP, &[0, 1, 8, 0, 6, 4, 0, 2]].concat();
    asks.then(|| [&head[..], &OUTSIDE, &OUTSIDE_IP, mac, ip].concat())
}
