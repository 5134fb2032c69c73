//! A client outside, which sends a question each 10 ms, and keeps account of all replies.
//!
//! ```text
//!   UDP    question (8), little endian  --->  port COUNT_PORT of the guest
//!                                       <---  question (8) | number (8)
//! ```
//!
//! Frames that reach the old host in a move are lost, so a question may have no reply. But each
//! number that the guest has given must be received, once.

use std::collections::{BTreeMap, VecDeque};
use std::net::{Ipv4Addr, UdpSocket};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use firn_guest::net::COUNT_PORT;

use crate::lab::wait_for;
use crate::site::HostSite;

/// How long the guest may take for its first reply.
const FIRST_REPLY_TIMEOUT: Duration = Duration::from_secs(120);
const QUESTION_INTERVAL: Duration = Duration::from_millis(10);
/// Numbers below the newest that may still be on their way.
const NUMBERS_ON_THE_WAY: u64 = 200;

/// The client. It asks until it is dropped.
#[derive(Debug)]
pub struct OutsideAsker(Arc<Mutex<AskerState>>);

#[derive(Debug, Default)]
struct AskerState {
    question: u64,
    /// Questions without a reply to them or to a later one, and when they were sent.
    waiting: VecDeque<(u64, Instant)>,
    longest_wait: Duration,
    /// The question that each number answered.
    numbers: BTreeMap<u64, u64>,
    repeated: u64,
    undone: u64,
    /// When a question was sent that this waits for, and when the first reply to it or a later one
    /// arrived.
    watch: Option<ReplyWatch>,
}

#[derive(Clone, Copy, Debug)]
struct ReplyWatch {
    after_question: u64,
    since: Instant,
    answered: Option<Duration>,
}

/// The replies that a client received.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ReplyCounts {
    /// Numbers that were received.
    pub received: u64,
    /// Numbers that were never received, between the first and the newest one.
    pub lost: u64,
    /// Numbers that were received twice.
    pub repeated: u64,
    /// Numbers that were received as the replies to two questions.
    pub undone: u64,
}

impl AskerState {
    fn next_question(&mut self, now: Instant) -> u64 {
        self.question += 1;
        self.waiting.push_back((self.question, now));
        self.question
    }

    fn record_reply(&mut self, question: u64, number: u64, now: Instant) {
        while let Some(&(waiting, sent)) = self.waiting.front() {
            if waiting > question {
                break;
            }
            self.longest_wait = self.longest_wait.max(now - sent);
            self.waiting.pop_front();
        }
        if let Some(watch) = self.watch.as_mut().filter(|it| question > it.after_question) {
            watch.answered.get_or_insert(now - watch.since);
        }
        match self.numbers.insert(number, question) {
            None => {}
            Some(before) if before == question => self.repeated += 1,
            Some(_) => self.undone += 1,
        }
    }

    fn count_replies(&self) -> ReplyCounts {
        let (repeated, undone) = (self.repeated, self.undone);
        let first = self.numbers.keys().next().copied().unwrap_or_default();
        let newest = self.numbers.keys().next_back().copied().unwrap_or_default();
        let until = newest.saturating_sub(NUMBERS_ON_THE_WAY).max(first);
        let received = self.numbers.range(first..until).count() as u64;
        ReplyCounts { received, lost: until - first - received, repeated, undone }
    }
}

impl OutsideAsker {
    /// Starts to ask the guest with this number ([`HostSite::vm_address`]). Returns when it has
    /// replied.
    ///
    /// # Errors
    /// If the site has no outside, or the guest does not reply.
    pub fn start_asker(site: &HostSite, guest: u8) -> Result<Self> {
        let state = Arc::new(Mutex::new(AskerState::default()));
        let (asker, outside) = (Arc::downgrade(&state), site.outside_namespace()?);
        let (ready_sender, ready) = mpsc::channel();
        thread::spawn(move || {
            let opened = outside.enter().and_then(|()| open_sockets(guest));
            match opened {
                Ok((asking, hearing)) => {
                    let hearer = asker.clone();
                    thread::spawn(move || receive_replies(&hearer, &hearing));
                    // The caller may have given up.
                    let _ = ready_sender.send(Ok(()));
                    send_questions(&asker, &asking);
                }
                Err(error) => drop(ready_sender.send(Err(error))),
            }
        });
        ready.recv().context("the client ended")??;
        wait_for("a reply of the guest", FIRST_REPLY_TIMEOUT, || {
            Ok((!lock_state(&state).numbers.is_empty()).then_some(()))
        })?;
        Ok(Self(state))
    }

    /// The longest wait for a reply since this was called before, including questions that still
    /// wait.
    pub fn take_longest_wait(&self) -> Duration {
        let mut state = lock_state(&self.0);
        let open = state.waiting.front().map_or(Duration::ZERO, |(_, sent)| sent.elapsed());
        std::mem::take(&mut state.longest_wait).max(open)
    }

    /// Begins to measure the time from now until the first reply to a question that is asked from
    /// now on.
    pub fn watch_reply(&self) {
        let mut state = lock_state(&self.0);
        let after_question = state.question;
        state.watch = Some(ReplyWatch { after_question, since: Instant::now(), answered: None });
    }

    /// The time that [`Self::watch_reply`] measures; `None` as long as there is no reply.
    pub fn time_to_reply(&self) -> Option<Duration> {
        lock_state(&self.0).watch.and_then(|watch| watch.answered)
    }

    /// The replies so far.
    pub fn count_replies(&self) -> ReplyCounts {
        lock_state(&self.0).count_replies()
    }
}

fn lock_state(state: &Mutex<AskerState>) -> MutexGuard<'_, AskerState> {
    state.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A socket in this thread's network namespace, twice.
fn open_sockets(guest: u8) -> Result<(UdpSocket, UdpSocket)> {
    let socket = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0)).context("the client's socket")?;
    socket.connect((HostSite::vm_address(guest), COUNT_PORT))?;
    socket.set_read_timeout(Some(10 * QUESTION_INTERVAL))?;
    Ok((socket.try_clone()?, socket))
}

fn send_questions(asker: &Weak<Mutex<AskerState>>, socket: &UdpSocket) {
    while let Some(state) = asker.upgrade() {
        let question = lock_state(&state).next_question(Instant::now());
        drop(state);
        // The guest may not run now.
        let _ = socket.send(&question.to_le_bytes());
        thread::sleep(QUESTION_INTERVAL);
    }
}

fn receive_replies(asker: &Weak<Mutex<AskerState>>, socket: &UdpSocket) {
    let mut reply = [0; 64];
    loop {
        let received = socket.recv(&mut reply);
        let Some(state) = asker.upgrade() else { return };
        let Ok(16) = received else { continue };
        let word = |at: usize| reply[at..].first_chunk().copied().map(u64::from_le_bytes);
        if let (Some(question), Some(number)) = (word(0), word(8)) {
            lock_state(&state).record_reply(question, number, Instant::now());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn replies_are_counted_and_waits_measured() {
        let (mut state, start) = (AskerState::default(), Instant::now());
        let at = |ms: u64| start + Duration::from_millis(ms);
        for number in 0..3 {
            assert_eq!(state.next_question(at(number * 10)), number + 1);
        }
        state.record_reply(2, 1, at(100));
        assert_eq!((state.longest_wait, state.waiting.len()), (Duration::from_millis(100), 1));
        state.record_reply(2, 1, at(101));
        state.record_reply(3, 1, at(102));
        assert_eq!((state.repeated, state.undone), (1, 1));
        state.record_reply(9, 4, at(103));
        state.record_reply(10, 5 + NUMBERS_ON_THE_WAY, at(104));
        let counts = state.count_replies();
        assert_eq!((counts.received, counts.lost), (2, 2), "1 and 4 of 1 to 4");
    }

    #[test]
    fn the_first_reply_to_a_later_question_ends_a_watch() {
        let (mut state, since) = (AskerState::default(), Instant::now());
        let at = |ms: u64| since + Duration::from_millis(ms);
        state.watch = Some(ReplyWatch { after_question: 7, since, answered: None });
        state.record_reply(7, 1, at(5));
        assert!(state.watch.unwrap().answered.is_none(), "it was asked before");
        state.record_reply(9, 2, at(30));
        state.record_reply(10, 3, at(50));
        assert_eq!(state.watch.unwrap().answered, Some(Duration::from_millis(30)));
    }
}
