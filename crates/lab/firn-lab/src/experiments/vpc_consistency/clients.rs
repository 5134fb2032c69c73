//! Clients outside: their requests, and their observations.
//!
//! A client sends one request at a time, until it is answered. It has a connection to each VM. Half
//! of the clients retain theirs whatever happens; the others close one after a second without an
//! answer, and repeat the request on a new one. So the VM may receive a request's number several
//! times, and the operation lasts from the first request to the answer.

use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, anyhow};
use firn_guest::bank::{AnswerBody, BankReply, BankRequest};
use firn_guest::lines::JsonLines;
use firn_guest::stamp::mix;
use firn_linear::{BankAnswer, BankModel, BankOperation, ClientCall, ModelCall};

use crate::site::NetworkNamespace;

/// The number of clients.
pub(super) const COUNT: u64 = 6;
/// How long impatient clients wait until they close a connection.
const SHORT_REPLY_WAIT: Duration = Duration::from_secs(1);
/// How long until they retry.
const RETRY_INTERVAL: Duration = Duration::from_millis(50);
/// The maximum amount of a transfer: some transfers are refused.
const AMOUNT_MAX: u64 = 700;

/// The state that the clients share.
pub(super) struct ClientsState {
    pub(super) vms: Vec<SocketAddr>,
    pub(super) accounts: usize,
    /// The origin of times.
    pub(super) since: Instant,
    /// How long until a request counts as never answered.
    pub(super) give_up: Duration,
    answered: AtomicU64,
    ends: AtomicBool,
    /// No result is needed any more.
    is_given_up: AtomicBool,
    /// When answers arrived, in nanoseconds.
    answers: Mutex<Vec<u64>>,
}

impl ClientsState {
    pub(super) fn new(vms: Vec<SocketAddr>, accounts: usize, give_up: Duration) -> Arc<Self> {
        Arc::new(Self {
            vms,
            accounts,
            since: Instant::now(),
            give_up,
            answered: AtomicU64::new(0),
            ends: AtomicBool::new(false),
            is_given_up: AtomicBool::new(false),
            answers: Mutex::default(),
        })
    }

    pub(super) fn elapsed_ns(&self) -> u64 {
        self.since.elapsed().as_nanos() as u64
    }

    /// The number of answers to all clients.
    pub(super) fn answer_count(&self) -> u64 {
        self.answered.load(Ordering::Relaxed)
    }

    fn record_answer(&self, at: u64) {
        self.answered.fetch_add(1, Ordering::Relaxed);
        self.answers.lock().unwrap_or_else(PoisonError::into_inner).push(at);
    }

    /// The longest time without an answer that ends later than `at`.
    pub(super) fn longest_gap(&self, at: u64) -> Option<Duration> {
        let mut answers = self.answers.lock().unwrap_or_else(PoisonError::into_inner).clone();
        answers.sort_unstable();
        let pairs = answers.windows(2).filter(|pair| pair[1] > at);
        pairs.map(|pair| Duration::from_nanos(pair[1] - pair[0])).max()
    }
}

/// The observations of a client.
#[derive(Default)]
pub(super) struct ClientObservations {
    pub(super) history: Vec<ModelCall<BankModel>>,
    /// Transfers that were acknowledged.
    pub(super) acknowledged: Vec<u64>,
    /// Connections that broke, though the client would have waited.
    pub(super) broken: u64,
}

/// All clients at work.
pub(super) struct ClientThreads {
    pub(super) shared: Arc<ClientsState>,
    threads: Vec<JoinHandle<Result<ClientObservations>>>,
}

impl ClientThreads {
    pub(super) fn start_clients(
        shared: &Arc<ClientsState>,
        outside: &NetworkNamespace,
        seed: u64,
    ) -> Self {
        let start = |number| {
            let (shared, outside) = (Arc::clone(shared), outside.clone());
            thread::spawn(move || {
                outside.enter()?;
                Ok(BankClient::new(shared, number, seed).run_operations())
            })
        };
        Self { shared: Arc::clone(shared), threads: (0..COUNT).map(start).collect() }
    }

    /// Ends the clients: each ends when its request is answered.
    pub(super) fn end_clients(mut self) -> Result<ClientObservations> {
        self.shared.ends.store(true, Ordering::Relaxed);
        let mut all = ClientObservations::default();
        for thread in self.threads.drain(..) {
            let seen = thread.join().map_err(|_| anyhow!("a client panicked"))??;
            all.history.extend(seen.history);
            all.acknowledged.extend(seen.acknowledged);
            all.broken += seen.broken;
        }
        Ok(all)
    }
}

impl Drop for ClientThreads {
    /// Clients of a trial that failed must not send requests to the VMs of the next trial.
    fn drop(&mut self) {
        self.shared.ends.store(true, Ordering::Relaxed);
        self.shared.is_given_up.store(!self.threads.is_empty(), Ordering::Relaxed);
    }
}

/// One client.
pub(super) struct BankClient {
    pub(super) shared: Arc<ClientsState>,
    number: u64,
    state: u64,
    asked: u64,
    patience: Duration,
    links: Vec<Option<JsonLines>>,
    seen: ClientObservations,
}

impl BankClient {
    pub(super) fn new(shared: Arc<ClientsState>, number: u64, seed: u64) -> Self {
        let is_patient = number % 2 == 0;
        let patience = if is_patient { shared.give_up } else { SHORT_REPLY_WAIT };
        let links = shared.vms.iter().map(|_| None).collect();
        let (state, asked, seen) = (mix(seed ^ mix(number)), 0, ClientObservations::default());
        Self { shared, number, state, asked, patience, links, seen }
    }

    fn run_operations(mut self) -> ClientObservations {
        while !self.shared.ends.load(Ordering::Relaxed) {
            let operation = self.draw_operation();
            self.perform_operation(operation);
        }
        self.seen
    }

    fn draw_below(&mut self, below: u64) -> u64 {
        self.state = mix(self.state);
        self.state % below
    }

    fn draw_operation(&mut self) -> BankOperation {
        let accounts = self.shared.accounts as u64;
        let from = self.draw_below(accounts) as usize;
        if self.draw_below(2) == 0 {
            return BankOperation::Balance(from);
        }
        let to = (from + 1 + self.draw_below(accounts - 1) as usize) % self.shared.accounts;
        BankOperation::transfer(from, to, 1 + self.draw_below(AMOUNT_MAX) as i64)
    }

    /// Repeats a request until it is answered, and notes the observation.
    pub(super) fn perform_operation(&mut self, operation: BankOperation) -> Option<BankAnswer> {
        self.asked += 1;
        let id = self.number << 32 | self.asked;
        let (account, question) = to_question(id, operation)?;
        let called = self.shared.elapsed_ns();
        let said = self.ask_vm(account % self.shared.vms.len(), &question);
        let answer = said.as_ref().and_then(to_answer);
        let at = self.shared.elapsed_ns();
        if answer.is_some() {
            self.shared.record_answer(at);
        }
        if said == Some(AnswerBody::Done) {
            self.seen.acknowledged.push(id);
        }
        let answered = answer.map(|answer| (at, answer));
        let client = self.number as u32;
        self.seen.history.push(ClientCall { client, called, operation, answer: answered });
        answer
    }

    /// Sends a request; `None` if there is no answer in time.
    pub(super) fn ask_vm(&mut self, vm: usize, question: &BankRequest) -> Option<AnswerBody> {
        let since = Instant::now();
        let shared = Arc::clone(&self.shared);
        let is_given_up = || shared.is_given_up.load(Ordering::Relaxed);
        while since.elapsed() < shared.give_up && !is_given_up() {
            match self.try_ask_once(vm, question) {
                Ok(said) => return Some(said),
                Err(_) => {
                    if self.links[vm].take().is_some() && self.patience > SHORT_REPLY_WAIT {
                        self.seen.broken += 1;
                    }
                    thread::sleep(RETRY_INTERVAL);
                }
            }
        }
        None
    }

    fn try_ask_once(&mut self, vm: usize, question: &BankRequest) -> Result<AnswerBody> {
        let link = match self.links[vm].take() {
            Some(link) => link,
            None => JsonLines::connect_within(self.shared.vms[vm], self.patience)?,
        };
        let link = self.links[vm].insert(link);
        link.send_line(question)?;
        let reply: BankReply = link.receive_line()?;
        (reply.id == question.id()).then_some(reply.body).context("the answer to another request")
    }

    pub(super) fn into_observations(self) -> ClientObservations {
        self.seen
    }
}

/// The request that an operation is, and the account whose VM it is for.
fn to_question(id: u64, operation: BankOperation) -> Option<(usize, BankRequest)> {
    match operation {
        BankOperation::Transfer { from, to, amount } => {
            Some((from?, BankRequest::Transfer { id, from: from?, to: to?, amount }))
        }
        BankOperation::Balance(account) => Some((account, BankRequest::Balance { id, account })),
        // No VM can answer that.
        BankOperation::Total => None,
    }
}

fn to_answer(said: &AnswerBody) -> Option<BankAnswer> {
    match said {
        AnswerBody::Done => Some(BankAnswer::Done),
        AnswerBody::Refused => Some(BankAnswer::Refused),
        AnswerBody::Amount { held } => Some(BankAnswer::Amount(*held)),
        AnswerBody::Elsewhere | AnswerBody::Known(_) => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_gap_ends_after_the_fault() {
        let shared = ClientsState::new(Vec::new(), 1, Duration::ZERO);
        let second = 1_000_000_000;
        for at in [1, 9, 2, 10, 15, 16] {
            shared.record_answer(at * second);
        }
        assert_eq!(shared.longest_gap(10 * second), Some(Duration::from_secs(5)));
        assert_eq!(shared.longest_gap(8 * second), Some(Duration::from_secs(7)));
        assert_eq!((shared.longest_gap(20 * second), shared.answer_count()), (None, 6));
    }

    #[test]
    fn random_requests_name_accounts_of_the_bank() {
        let shared = ClientsState::new(Vec::new(), 5, Duration::ZERO);
        let mut client = BankClient::new(shared, 3, 7);
        for _ in 0..100 {
            match client.draw_operation() {
                BankOperation::Transfer { from: Some(from), to: Some(to), amount } => {
                    assert!(from < 5 && to < 5 && from != to && (1..=700).contains(&amount));
                }
                BankOperation::Balance(account) => assert!(account < 5),
                other => panic!("{other:?}"),
            }
        }
    }
}
