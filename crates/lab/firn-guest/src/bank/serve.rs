//! Connections of the bank: one thread each, one request at a time.

use std::io;
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

use anyhow::{Context as _, Result};
use serde_json::json;

use super::BankArgs;
use super::books::{AccountBooks, RequestStep};
use super::messages::{AnswerBody, BankReply, BankRequest};
use crate::lines::JsonLines;

/// Interval between attempts to send a deposit.
const RETRY_INTERVAL: Duration = Duration::from_millis(50);

struct BankServer {
    books: Mutex<AccountBooks>,
    changed: Condvar,
    vms: Vec<SocketAddr>,
}

/// Serves for ever.
pub(super) fn serve_bank(args: &BankArgs) -> Result<()> {
    let listen = (Ipv4Addr::UNSPECIFIED, args.vms[args.number].port());
    let listener =
        TcpListener::bind(listen).with_context(|| format!("cannot bind TCP port {}", listen.1))?;
    serve_at(&listener, args);
    Ok(())
}

pub(super) fn serve_at(listener: &TcpListener, args: &BankArgs) {
    let count = args.vms.len();
    let own = (0..args.accounts).filter(|account| account % count == args.number);
    let books = Mutex::new(AccountBooks::new(own, args.held));
    let shared = Arc::new(BankServer { books, changed: Condvar::new(), vms: args.vms.clone() });
    println!("{}", json!({"ready": true}));
    for stream in listener.incoming().flatten() {
        let shared = Arc::clone(&shared);
        // A client whose connection breaks repeats its request on another one.
        thread::spawn(move || shared.serve_client(stream));
    }
}

/// Connections to the other VMs, made on first use.
struct PeerLinks<'a> {
    shared: &'a BankServer,
    links: Vec<Option<JsonLines>>,
}

impl BankServer {
    fn lock_books(&self) -> MutexGuard<'_, AccountBooks> {
        self.books.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Answers requests until the connection breaks.
    fn serve_client(&self, stream: TcpStream) -> io::Result<()> {
        let mut lines = JsonLines::new(stream)?;
        let links = self.vms.iter().map(|_| None).collect();
        let mut peers = PeerLinks { shared: self, links };
        loop {
            let question: BankRequest = lines.receive_line()?;
            let body = self.answer_request(question, &mut peers);
            lines.send_line(&BankReply { id: question.id(), body })?;
        }
    }

    fn answer_request(&self, question: BankRequest, peers: &mut PeerLinks<'_>) -> AnswerBody {
        match question {
            BankRequest::Transfer { id, from, to, amount } => {
                match self.wait_answer(|books| books.begin_transfer(id, from, to, amount)) {
                    Some(answer) => answer,
                    None => {
                        peers.send_deposit(to, BankRequest::Deposit { id, to, amount });
                        self.change_books(|books| books.complete_transfer(id, from, amount))
                    }
                }
            }
            BankRequest::Deposit { id, to, amount } => {
                self.change_books(|books| books.book_deposit(id, to, amount))
            }
            BankRequest::Balance { account, .. } => {
                // A balance never needs another VM to complete.
                self.wait_answer(|books| books.check_balance(account))
                    .unwrap_or(AnswerBody::Elsewhere)
            }
            BankRequest::Known { .. } => AnswerBody::Known(self.lock_books().transfer_log.clone()),
        }
    }

    /// The answer, when the request need not wait any more; `None` if the other VM has to book the
    /// deposit first.
    fn wait_answer(
        &self,
        mut ask: impl FnMut(&mut AccountBooks) -> RequestStep,
    ) -> Option<AnswerBody> {
        let mut books = self.lock_books();
        loop {
            match ask(&mut books) {
                RequestStep::Answer(answer) => return Some(answer),
                RequestStep::Deposit => return None,
                RequestStep::Wait => {
                    books = self.changed.wait(books).unwrap_or_else(PoisonError::into_inner);
                }
            }
        }
    }

    fn change_books(&self, change: impl FnOnce(&mut AccountBooks) -> AnswerBody) -> AnswerBody {
        let answer = change(&mut self.lock_books());
        self.changed.notify_all();
        answer
    }
}

impl PeerLinks<'_> {
    /// Sends a deposit until it is acknowledged.
    fn send_deposit(&mut self, to: usize, deposit: BankRequest) {
        let vm = to % self.shared.vms.len();
        while let Err(error) = self.try_deposit(vm, &deposit) {
            self.links[vm] = None;
            self.shared.lock_books().transfer_log.broken += 1;
            println!("{}", json!({"vm": vm, "broken": error.to_string()}));
            thread::sleep(RETRY_INTERVAL);
        }
    }

    fn try_deposit(&mut self, vm: usize, deposit: &BankRequest) -> io::Result<()> {
        let link = match self.links[vm].take() {
            Some(link) => link,
            None => JsonLines::connect(self.shared.vms[vm])?,
        };
        let link = self.links[vm].insert(link);
        link.send_line(deposit)?;
        let reply: BankReply = link.receive_line()?;
        match (reply.id == deposit.id(), reply.body) {
            (true, AnswerBody::Done) => Ok(()),
            (_, answer) => Err(io::Error::other(format!("{deposit:?}: {answer:?}"))),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Runs two VMs on this machine, and several clients that transfer money concurrently and check
    /// the replies.
    #[test]
    fn transfers_keep_the_sum_constant() {
        let listeners = [0; 2].map(|_| TcpListener::bind("127.0.0.1:0").unwrap());
        let vms: Vec<_> = listeners.iter().map(|it| it.local_addr().unwrap()).collect();
        for (number, listener) in listeners.into_iter().enumerate() {
            let bank = BankArgs { number, vms: vms.clone(), accounts: 6, held: 100 };
            thread::spawn(move || serve_at(&listener, &bank));
        }
        let ask = |lines: &mut JsonLines, question: BankRequest| {
            lines.send_line(&question).unwrap();
            let reply: BankReply = lines.receive_line().unwrap();
            assert_eq!(reply.id, question.id());
            reply.body
        };
        thread::scope(|scope| {
            for client in 0..4_usize {
                let vms = &vms;
                scope.spawn(move || {
                    let mut to_vm = [0, 1].map(|vm: usize| JsonLines::connect(vms[vm]).unwrap());
                    for step in 0..50 {
                        let (from, to) = ((client + step) % 6, (client * step + 1) % 6);
                        let id = (client * 100 + step) as u64;
                        let question = BankRequest::Transfer { id, from, to, amount: 30 };
                        // Twice, as a client does that has received no reply.
                        let answer = ask(&mut to_vm[from % 2], question);
                        assert_eq!(ask(&mut to_vm[from % 2], question), answer);
                        assert!(
                            matches!(answer, AnswerBody::Done | AnswerBody::Refused),
                            "{answer:?}"
                        );
                    }
                });
            }
        });
        let mut to_vm = [0, 1].map(|vm: usize| JsonLines::connect(vms[vm]).unwrap());
        let held = (0..6).map(|account| {
            match ask(&mut to_vm[account % 2], BankRequest::Balance { id: 1, account }) {
                AnswerBody::Amount { held } => held,
                answer => panic!("{answer:?}"),
            }
        });
        assert_eq!(held.sum::<i64>(), 600);
        let known = to_vm.each_mut().map(|vm| match ask(vm, BankRequest::Known { id: 2 }) {
            AnswerBody::Known(known) => known,
            answer => panic!("{answer:?}"),
        });
        let all = |of: fn(&super::super::TransferLog) -> &Vec<u64>| {
            let mut all: Vec<u64> = known.iter().flat_map(of).copied().collect();
            all.sort_unstable();
            all
        };
        let (taken, paid) = (all(|known| &known.taken), all(|known| &known.paid));
        assert_eq!(taken, paid);
        assert!(taken.len() > 50 && taken.windows(2).all(|pair| pair[0] < pair[1]));
    }
}
