//! External clients: each writes one number after another, waits until primary and replica have it,
//! and sometimes reads all its own numbers at the replica.

use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};

use super::journal::Journal;
use crate::guest::{Redis, RedisError};
use crate::prober::Timeline;
use crate::site::Inside;

/// Number of clients. Output of a protected VM is buffered for some tenths of a second, and each
/// client waits for it.
const CLIENTS: usize = 48;
/// Minimum interval between a client's requests. With it the reply rate is about the same before
/// and after the VM is protected.
const EVERY: Duration = Duration::from_millis(200);
/// A client reads its numbers after this many writes.
const READ_EVERY: u64 = 8;
/// How long a reply may take before the client repeats the request on another connection.
const PATIENCE: Duration = Duration::from_millis(2500);
/// How long the primary waits for its replica. Traffic between the two is buffered too.
const REPLICATED: Duration = Duration::from_millis(2000);
/// How long a client waits after a refused connection.
const MOMENT: Duration = Duration::from_millis(50);

/// Clients that send requests until they are stopped.
#[derive(Debug)]
pub(super) struct Clients {
    started: Instant,
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<Result<Journal>>>,
    servers: Servers,
    outside: Inside,
}

/// Addresses of the Redis servers.
#[derive(Clone, Copy, Debug)]
pub(super) struct Servers {
    pub(super) primary: SocketAddr,
    pub(super) replica: SocketAddr,
}

impl Servers {
    /// Connects the replica to the primary, and waits until it has what the primary wrote.
    fn introduce(&self, limit: Duration) -> Result<()> {
        let mut primary = Redis::connect(self.primary, limit)?;
        Redis::connect(self.replica, limit)?.replicate(self.primary)?;
        let since = Instant::now();
        while !primary.append_twice("introduced", b".", REPLICATED)? {
            ensure!(since.elapsed() < limit, "the replica has nothing after {} s", limit.as_secs());
        }
        Ok(())
    }
}

#[derive(Debug, Default)]
struct Shared {
    is_over: AtomicBool,
    replies: Mutex<Vec<Duration>>,
}

impl Shared {
    fn replies(&self) -> MutexGuard<'_, Vec<Duration>> {
        self.replies.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// How many of all writes were acknowledged, and how many are lost.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Outcome {
    pub(super) acknowledged: usize,
    pub(super) lost: usize,
}

impl Clients {
    /// Waits until primary and replica work together, then starts the clients.
    pub(super) fn start(servers: Servers, outside: Inside, limit: Duration) -> Result<Self> {
        let inside = outside.clone();
        let knocks = thread::spawn(move || {
            inside.enter()?;
            servers.introduce(limit)
        });
        knocks.join().map_err(panicked)??;
        let (started, shared) = (Instant::now(), Arc::<Shared>::default());
        let begin = |id| {
            let (shared, outside) = (Arc::clone(&shared), outside.clone());
            thread::spawn(move || {
                outside.enter()?;
                Client { id, servers, journal: Journal::default(), started, shared }.work()
            })
        };
        let threads = (0..CLIENTS).map(begin).collect();
        Ok(Self { started, shared, threads, servers, outside })
    }

    /// The current time, on the timeline.
    pub(super) fn now(&self) -> Duration {
        self.started.elapsed()
    }

    /// The times of all replies.
    pub(super) fn timeline(&self) -> Timeline {
        Timeline::new(self.shared.replies().clone())
    }

    /// Stops the clients, and checks at primary and replica for all writes that were acknowledged.
    ///
    /// # Errors
    /// If a server has something that the clients did not write.
    pub(super) fn finish(mut self) -> Result<Outcome> {
        self.shared.is_over.store(true, Ordering::Release);
        let threads = std::mem::take(&mut self.threads);
        let ended = threads.into_iter().map(|it| it.join().map_err(panicked)?);
        let journals = ended.collect::<Result<Vec<Journal>>>()?;
        let (Servers { primary, replica }, outside) = (self.servers, self.outside.clone());
        let looked = thread::spawn(move || {
            outside.enter()?;
            let lost = [primary, replica].map(|server| lost_at(server, &journals));
            let acknowledged = journals.iter().map(Journal::acknowledged).sum();
            Ok(Outcome { acknowledged, lost: lost.into_iter().sum::<Result<usize>>()? })
        });
        looked.join().map_err(panicked)?
    }
}

fn panicked(_: Box<dyn std::any::Any + Send>) -> anyhow::Error {
    anyhow::anyhow!("a client panicked")
}

/// Counts the acknowledged writes that a server does not have.
fn lost_at(server: SocketAddr, journals: &[Journal]) -> Result<usize> {
    let mut redis = Redis::connect(server, 20 * PATIENCE)?;
    journals.iter().enumerate().map(|(id, journal)| look(journal, id, &mut redis)).sum()
}

/// Compares a journal with the stored value.
fn look(journal: &Journal, id: usize, redis: &mut Redis) -> Result<usize> {
    let there = redis.get(&key(id))?.unwrap_or_default();
    let text = std::str::from_utf8(&there).context("the stored value is no text")?;
    journal.lost(text).with_context(|| format!("{}: {text:?}", key(id)))
}

fn key(id: usize) -> String {
    format!("client:{id}")
}

impl Drop for Clients {
    fn drop(&mut self) {
        self.shared.is_over.store(true, Ordering::Release);
    }
}

/// One client.
struct Client {
    id: usize,
    servers: Servers,
    journal: Journal,
    started: Instant,
    shared: Arc<Shared>,
}

impl Client {
    /// Sends requests, on a new connection after each one that breaks.
    fn work(mut self) -> Result<Journal> {
        while !self.is_over() {
            let Ok((primary, replica)) = self.connected() else {
                thread::sleep(MOMENT);
                continue;
            };
            match self.work_by(primary, replica) {
                Err(error) if !is_broken(&error) => return Err(error),
                _ => {}
            }
        }
        Ok(self.journal)
    }

    fn connected(&self) -> std::io::Result<(Redis, Redis)> {
        let connect = |server| {
            let mut redis = Redis::try_connect(server, PATIENCE)?;
            redis.set_patience(PATIENCE).map(|()| redis)
        };
        Ok((connect(self.servers.primary)?, connect(self.servers.replica)?))
    }

    fn work_by(&mut self, mut primary: Redis, mut replica: Redis) -> Result<()> {
        while !self.is_over() {
            let (asked, number) = (Instant::now(), self.journal.ask());
            let entry = Journal::entry(number);
            if primary.append_twice(&key(self.id), entry.as_bytes(), REPLICATED)? {
                self.journal.acknowledge(number);
                self.heard();
            }
            if number % READ_EVERY == 0 {
                let lost = look(&self.journal, self.id, &mut replica)?;
                ensure!(lost == 0, "{lost} acknowledged writes of client {} are gone", self.id);
                self.heard();
            }
            thread::sleep(EVERY.saturating_sub(asked.elapsed()));
        }
        Ok(())
    }

    /// Records the time of a reply. All clients use one clock and take the time under the list's
    /// lock, so the list is in order.
    fn heard(&self) {
        let mut replies = self.shared.replies();
        replies.push(self.started.elapsed());
    }

    fn is_over(&self) -> bool {
        self.shared.is_over.load(Ordering::Acquire)
    }
}

/// Whether the connection failed, not the data that came through it.
fn is_broken(error: &anyhow::Error) -> bool {
    matches!(error.downcast_ref(), Some(RedisError::Broken(_) | RedisError::Unreachable(..)))
}
