//! External clients: each writes one number after another, waits until primary and replica have it,
//! and sometimes reads all its own numbers at the replica.

use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};

use super::journal::WriteJournal;
use crate::guest::{RedisClient, RedisError};
use crate::prober::ReplyTimeline;
use crate::site::NetworkNamespace;

/// Number of clients. Output of a protected VM is buffered for some tenths of a second, and each
/// client waits for it.
const CLIENTS: usize = 48;
/// Minimum interval between a client's requests. With it the reply rate is about the same before
/// and after the VM is protected.
const REQUEST_INTERVAL: Duration = Duration::from_millis(200);
/// A client reads its numbers after this many writes.
const WRITES_PER_READ: u64 = 8;
/// How long a reply may take before the client repeats the request on another connection.
const REPLY_TIMEOUT: Duration = Duration::from_millis(2500);
/// How long the primary waits for its replica. Traffic between the two is buffered too.
const REPLICATION_TIMEOUT: Duration = Duration::from_millis(2000);
/// How long a client waits after a refused connection.
const RETRY_INTERVAL: Duration = Duration::from_millis(50);

/// Clients that send requests until they are stopped.
#[derive(Debug)]
pub(super) struct ExternalClients {
    started: Instant,
    shared: Arc<ReplyLog>,
    threads: Vec<JoinHandle<Result<WriteJournal>>>,
    servers: RedisServers,
    outside: NetworkNamespace,
}

/// Addresses of the Redis servers.
#[derive(Clone, Copy, Debug)]
pub(super) struct RedisServers {
    pub(super) primary: SocketAddr,
    pub(super) replica: SocketAddr,
}

impl RedisServers {
    /// Connects the replica to the primary, and waits until it has what the primary wrote.
    fn connect_replica(&self, limit: Duration) -> Result<()> {
        let mut primary = RedisClient::connect(self.primary, limit)?;
        RedisClient::connect(self.replica, limit)?.replicate_from(self.primary)?;
        let since = Instant::now();
        while !primary.append_and_wait("introduced", b".", REPLICATION_TIMEOUT)? {
            ensure!(since.elapsed() < limit, "the replica has nothing after {} s", limit.as_secs());
        }
        Ok(())
    }
}

#[derive(Debug, Default)]
struct ReplyLog {
    is_over: AtomicBool,
    replies: Mutex<Vec<Duration>>,
}

impl ReplyLog {
    fn lock_replies(&self) -> MutexGuard<'_, Vec<Duration>> {
        self.replies.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// How many of all writes were acknowledged, and how many are lost.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct WriteOutcome {
    pub(super) acknowledged: usize,
    pub(super) lost: usize,
}

impl ExternalClients {
    /// Waits until primary and replica work together, then starts the clients.
    pub(super) fn start_all(
        servers: RedisServers,
        outside: NetworkNamespace,
        limit: Duration,
    ) -> Result<Self> {
        let inside = outside.clone();
        let knocks = thread::spawn(move || {
            inside.enter()?;
            servers.connect_replica(limit)
        });
        knocks.join().map_err(client_panic)??;
        let (started, shared) = (Instant::now(), Arc::<ReplyLog>::default());
        let begin = |id| {
            let (shared, outside) = (Arc::clone(&shared), outside.clone());
            thread::spawn(move || {
                outside.enter()?;
                WriterClient { id, servers, journal: WriteJournal::default(), started, shared }
                    .run_until_over()
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
    pub(super) fn timeline(&self) -> ReplyTimeline {
        ReplyTimeline::new(self.shared.lock_replies().clone())
    }

    /// Stops the clients, and checks at primary and replica for all writes that were acknowledged.
    ///
    /// # Errors
    /// If a server has something that the clients did not write.
    pub(super) fn stop_and_check(mut self) -> Result<WriteOutcome> {
        self.shared.is_over.store(true, Ordering::Release);
        let threads = std::mem::take(&mut self.threads);
        let ended = threads.into_iter().map(|it| it.join().map_err(client_panic)?);
        let journals = ended.collect::<Result<Vec<WriteJournal>>>()?;
        let (RedisServers { primary, replica }, outside) = (self.servers, self.outside.clone());
        let looked = thread::spawn(move || {
            outside.enter()?;
            let lost = [primary, replica].map(|server| count_lost_at(server, &journals));
            let acknowledged = journals.iter().map(WriteJournal::acknowledged).sum();
            Ok(WriteOutcome { acknowledged, lost: lost.into_iter().sum::<Result<usize>>()? })
        });
        looked.join().map_err(client_panic)?
    }
}

fn client_panic(_: Box<dyn std::any::Any + Send>) -> anyhow::Error {
    anyhow::anyhow!("a client panicked")
}

/// Counts the acknowledged writes that a server does not have.
fn count_lost_at(server: SocketAddr, journals: &[WriteJournal]) -> Result<usize> {
    let mut redis = RedisClient::connect(server, 20 * REPLY_TIMEOUT)?;
    journals.iter().enumerate().map(|(id, journal)| count_lost(journal, id, &mut redis)).sum()
}

/// Compares a journal with the stored value.
fn count_lost(journal: &WriteJournal, id: usize, redis: &mut RedisClient) -> Result<usize> {
    let there = redis.get(&key_name(id))?.unwrap_or_default();
    let text = std::str::from_utf8(&there).context("the stored value is no text")?;
    journal.count_lost(text).with_context(|| format!("{}: {text:?}", key_name(id)))
}

fn key_name(id: usize) -> String {
    format!("client:{id}")
}

impl Drop for ExternalClients {
    fn drop(&mut self) {
        self.shared.is_over.store(true, Ordering::Release);
    }
}

/// One client.
struct WriterClient {
    id: usize,
    servers: RedisServers,
    journal: WriteJournal,
    started: Instant,
    shared: Arc<ReplyLog>,
}

impl WriterClient {
    /// Sends requests, on a new connection after each one that breaks.
    fn run_until_over(mut self) -> Result<WriteJournal> {
        while !self.is_over() {
            let Ok((primary, replica)) = self.connect_both() else {
                thread::sleep(RETRY_INTERVAL);
                continue;
            };
            match self.write_and_read(primary, replica) {
                Err(error) if !is_broken(&error) => return Err(error),
                _ => {}
            }
        }
        Ok(self.journal)
    }

    fn connect_both(&self) -> std::io::Result<(RedisClient, RedisClient)> {
        let connect = |server| {
            let mut redis = RedisClient::try_connect(server, REPLY_TIMEOUT)?;
            redis.set_reply_timeout(REPLY_TIMEOUT).map(|()| redis)
        };
        Ok((connect(self.servers.primary)?, connect(self.servers.replica)?))
    }

    fn write_and_read(&mut self, mut primary: RedisClient, mut replica: RedisClient) -> Result<()> {
        while !self.is_over() {
            let (asked, number) = (Instant::now(), self.journal.next_number());
            let entry = WriteJournal::entry_text(number);
            if primary.append_and_wait(&key_name(self.id), entry.as_bytes(), REPLICATION_TIMEOUT)? {
                self.journal.record_acknowledged(number);
                self.record_reply();
            }
            if number % WRITES_PER_READ == 0 {
                let lost = count_lost(&self.journal, self.id, &mut replica)?;
                ensure!(lost == 0, "{lost} acknowledged writes of client {} are gone", self.id);
                self.record_reply();
            }
            thread::sleep(REQUEST_INTERVAL.saturating_sub(asked.elapsed()));
        }
        Ok(())
    }

    /// Records the time of a reply. All clients use one clock and take the time under the list's
    /// lock, so the list is in order.
    fn record_reply(&self) {
        let mut replies = self.shared.lock_replies();
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
