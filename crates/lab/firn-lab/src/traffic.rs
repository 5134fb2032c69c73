//! Redis clients: the keys that they request, and the rate.
//!
//! Clients choose keys by Zipf's law with the exponent 0.99 that key-value stores are usually
//! measured with: they request a few keys very often, and every key sometimes. Or they request a hot set
//! nearly always, as YCSB's hotspot distribution does: then most of memory is hardly used. A client sends
//! a fixed number of requests per second and falls behind if the guest does, as a front end would.
//!
//! Before the guest runs, a connection attempt may be lost, and TCP may repeat it only seconds
//! later. So the client opens one more connection every 15 ms and uses the first one on which a
//! reply arrives. This determines the time of the first reply to some milliseconds, whatever
//! happened to the attempts before it.

use std::io::{Read as _, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::time::{Duration, Instant};

use firn_guest::stamp::mix;
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::guest::RedisClient;
use crate::prober::ReplySource;

/// Zipf exponent.
const EXPONENT: f64 = 0.99;
/// How long the client waits for a reply before it repeats the request on a new connection.
const REPLY_TIMEOUT: Duration = Duration::from_millis(1000);
/// How often a client that has had no reply yet tries one more connection.
const PROBE_INTERVAL: Duration = Duration::from_millis(15);
/// Maximum number of simultaneous attempts: more than a few stall in QEMU's user networking.
const PROBES_MAX: usize = 8;

/// The number of keys in the hot set, and the share of the requests for it.
const HOT_KEYS: usize = 100;
const HOT_REQUESTS: f64 = 0.99;

/// How often each key is requested.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KeyPopularity {
    /// By Zipf's law.
    Zipf,
    /// A hundred keys with 99 % of the requests, all others alike.
    HotSet,
}

impl KeyPopularity {
    /// The weight of a rank below `count`.
    fn weight(self, rank: usize, count: usize) -> f64 {
        let hot = HOT_KEYS.min(count);
        match self {
            Self::Zipf => ((rank + 1) as f64).powf(-EXPONENT),
            Self::HotSet if rank < hot => HOT_REQUESTS / hot as f64,
            Self::HotSet => (1.0 - HOT_REQUESTS) / (count - hot).max(1) as f64,
        }
    }
}

/// Ranks by their popularity, from a seed.
#[derive(Clone, Debug)]
pub struct PopularRanks {
    /// For each rank, the probability of a rank up to and including it.
    cumulated: Vec<f64>,
    state: u64,
}

impl PopularRanks {
    /// Ranks below `count`.
    pub fn new(popularity: KeyPopularity, count: usize, seed: u64) -> Self {
        let count = count.max(1);
        let weights = (0..count).map(|rank| popularity.weight(rank, count));
        let mut sum = 0.0;
        let mut cumulated: Vec<f64> = weights
            .map(|weight| {
                sum += weight;
                sum
            })
            .collect();
        cumulated.iter_mut().for_each(|share| *share /= sum);
        Self { cumulated, state: seed }
    }
}

impl Iterator for PopularRanks {
    type Item = usize;

    fn next(&mut self) -> Option<usize> {
        self.state = self.state.wrapping_add(1);
        let chance = (mix(self.state) >> 11) as f64 / (1_u64 << 53) as f64;
        Some(self.cumulated.partition_point(|&share| share < chance).min(self.cumulated.len() - 1))
    }
}

/// Connections on which a client has sent a PING and waits for the reply.
#[derive(Debug, Default)]
pub(crate) struct ConnectionProbes {
    pending: Vec<TcpStream>,
    last: Option<Instant>,
}

impl ConnectionProbes {
    /// Whether a server replies within 2 ms. Then all attempts are dropped.
    pub(crate) fn poll_reply(&mut self, address: SocketAddr) -> bool {
        if self.last.is_none_or(|last| last.elapsed() >= PROBE_INTERVAL) {
            self.last = Some(Instant::now());
            self.open_probe(address);
        }
        let mut waiting: Vec<_> =
            self.pending.iter().map(|stream| PollFd::new(stream, PollFlags::IN)).collect();
        let moment = Timespec { tv_sec: 0, tv_nsec: 2_000_000 };
        let _ = poll(&mut waiting, Some(&moment));
        let ready: Vec<bool> = waiting.iter().map(|fd| !fd.revents().is_empty()).collect();
        let mut ready = ready.into_iter();
        let mut answered = false;
        self.pending.retain_mut(|stream| {
            let is_ready = ready.next().unwrap_or(false);
            answered |= is_ready && is_pong(stream);
            !is_ready
        });
        if answered {
            *self = Self::default();
        }
        answered
    }

    fn open_probe(&mut self, address: SocketAddr) {
        if self.pending.len() >= PROBES_MAX {
            self.pending.remove(0);
        }
        let stream = TcpStream::connect_timeout(&address, PROBE_INTERVAL);
        self.pending.extend(stream.ok().and_then(|mut stream| {
            stream.write_all(b"PING\r\n").ok()?;
            Some(stream)
        }));
    }
}

/// Whether a readable stream contains a PONG. A closed stream contains nothing.
fn is_pong(stream: &mut TcpStream) -> bool {
    let mut answer = [0; 5];
    stream.read_exact(&mut answer).is_ok() && answer == *b"+PONG"
}

/// GETs of keys `firn:N`, one at a time, on one connection.
#[derive(Debug)]
pub struct RedisGets {
    address: SocketAddr,
    redis: Option<RedisClient>,
    knocks: ConnectionProbes,
    keys: u64,
    ranks: PopularRanks,
}

impl RedisGets {
    /// Requests for `keys` keys at this address. The same keys are always popular; the seed
    /// determines the order.
    pub fn new(address: SocketAddr, keys: u64, popularity: KeyPopularity, seed: u64) -> Self {
        let ranks = PopularRanks::new(popularity, keys as usize, seed);
        Self { address, redis: None, knocks: ConnectionProbes::default(), keys, ranks }
    }

    /// Chooses a key. Popular keys are spread over all of memory.
    fn next_key(&mut self) -> u64 {
        let rank = self.ranks.next().unwrap_or_default() as u64;
        mix(rank) % self.keys.max(1)
    }

    fn get_next(&mut self) -> Option<()> {
        let Some(mut redis) = self.redis.take() else { return self.try_reconnect() };
        let key = self.next_key();
        redis.get(&format!("firn:{key}")).ok()?;
        self.redis = Some(redis);
        Some(())
    }

    fn try_reconnect(&mut self) -> Option<()> {
        if !self.knocks.poll_reply(self.address) {
            return None;
        }
        let mut redis = RedisClient::try_connect(self.address, REPLY_TIMEOUT).ok()?;
        redis.set_reply_timeout(REPLY_TIMEOUT).ok()?;
        self.redis = Some(redis);
        Some(())
    }
}

impl ReplySource for RedisGets {
    fn wait_reply(&mut self) -> bool {
        self.get_next().is_some()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn few_ranks_are_asked_for_often_and_every_rank_can_be() {
        let ranks: Vec<usize> =
            PopularRanks::new(KeyPopularity::Zipf, 1000, 7).take(100_000).collect();
        let share = |below| ranks.iter().filter(|&&rank| rank < below).count() as f64 / 1e5;
        assert!((0.10..0.17).contains(&share(1)), "{}", share(1));
        assert!((0.60..0.75).contains(&share(100)), "{}", share(100));
        assert!(ranks.iter().any(|&rank| rank > 990) && ranks.iter().all(|&rank| rank < 1000));
    }

    #[test]
    fn a_hot_set_has_nearly_all_requests() {
        let ranks: Vec<usize> =
            PopularRanks::new(KeyPopularity::HotSet, 10_000, 7).take(100_000).collect();
        let share = |below| ranks.iter().filter(|&&rank| rank < below).count() as f64 / 1e5;
        assert!((0.008..0.012).contains(&share(1)), "{}", share(1));
        assert!((0.985..0.995).contains(&share(100)), "{}", share(100));
        assert!(ranks.iter().any(|&rank| rank > 9000) && ranks.iter().all(|&rank| rank < 10_000));
        assert_eq!(PopularRanks::new(KeyPopularity::HotSet, 1, 7).next(), Some(0));
    }

    #[test]
    fn the_first_answer_ends_the_knocking() {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let mut knocks = ConnectionProbes::default();
        assert!(!knocks.poll_reply(address));
        std::thread::sleep(PROBE_INTERVAL);
        assert!(!knocks.poll_reply(address));
        let (_silent, mut second) = (listener.accept().unwrap(), listener.accept().unwrap().0);
        second.write_all(b"+PONG\r\n").unwrap();
        let answered = (0..500).any(|_| knocks.poll_reply(address));
        assert!(answered && knocks.pending.is_empty());
    }

    #[test]
    fn a_closed_connection_is_no_answer() {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let mut knocks = ConnectionProbes::default();
        assert!(!knocks.poll_reply(address));
        drop(listener);
        assert!((0..20).all(|_| !knocks.poll_reply(address)));
    }

    #[test]
    fn a_seed_gives_the_same_ranks_again() {
        let ranks =
            |seed| PopularRanks::new(KeyPopularity::Zipf, 50, seed).take(20).collect::<Vec<_>>();
        assert_eq!(ranks(3), ranks(3));
        assert_ne!(ranks(3), ranks(4));
        assert_eq!(PopularRanks::new(KeyPopularity::Zipf, 0, 1).next(), Some(0));
    }
}
