//! Connections of the bank: one thread each, one request at a time.

use std::io;
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

use anyhow::{Context as _, Result};
use serde_json::json;

use super::Bank;
use super::books::{Books, Next};
use super::words::{Question, Reply, Said};
use crate::lines::Lines;

/// Interval between attempts to send a deposit.
const AGAIN: Duration = Duration::from_millis(50);

struct Shared {
    books: Mutex<Books>,
    changed: Condvar,
    vms: Vec<SocketAddr>,
}

/// Serves for ever.
pub(super) fn serve(args: &Bank) -> Result<()> {
    let listen = (Ipv4Addr::UNSPECIFIED, args.vms[args.number].port());
    let listener =
        TcpListener::bind(listen).with_context(|| format!("cannot bind TCP port {}", listen.1))?;
    serve_at(&listener, args);
    Ok(())
}

pub(super) fn serve_at(listener: &TcpListener, args: &Bank) {
    let count = args.vms.len();
    let own = (0..args.accounts).filter(|account| account % count == args.number);
    let books = Mutex::new(Books::new(own, args.held));
    let shared = Arc::new(Shared { books, changed: Condvar::new(), vms: args.vms.clone() });
    println!("{}", json!({"ready": true}));
    for stream in listener.incoming().flatten() {
        let shared = Arc::clone(&shared);
        // A client whose connection breaks repeats its request on another one.
        thread::spawn(move || shared.client(stream));
    }
}

/// Connections to the other VMs, made on first use.
struct Peers<'a> {
    shared: &'a Shared,
    links: Vec<Option<Lines>>,
}

impl Shared {
    fn books(&self) -> MutexGuard<'_, Books> {
        self.books.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Answers requests until the connection breaks.
    fn client(&self, stream: TcpStream) -> io::Result<()> {
        let mut lines = Lines::new(stream)?;
        let links = self.vms.iter().map(|_| None).collect();
        let mut peers = Peers { shared: self, links };
        loop {
            let question: Question = lines.hear()?;
            let said = self.answer(question, &mut peers);
            lines.say(&Reply { id: question.id(), said })?;
        }
    }

    fn answer(&self, question: Question, peers: &mut Peers<'_>) -> Said {
        match question {
            Question::Transfer { id, from, to, amount } => {
                match self.waited(|books| books.transfer(id, from, to, amount)) {
                    Some(said) => said,
                    None => {
                        peers.deposit(to, Question::Deposit { id, to, amount });
                        self.changing(|books| books.is_deposited(id, from, amount))
                    }
                }
            }
            Question::Deposit { id, to, amount } => {
                self.changing(|books| books.deposit(id, to, amount))
            }
            Question::Balance { account, .. } => {
                // A balance never needs another VM to complete.
                self.waited(|books| books.balance(account)).unwrap_or(Said::Elsewhere)
            }
            Question::Known { .. } => Said::Known(self.books().known.clone()),
        }
    }

    /// The answer, when the request need not wait any more; `None` if the other VM has to book the
    /// deposit first.
    fn waited(&self, mut ask: impl FnMut(&mut Books) -> Next) -> Option<Said> {
        let mut books = self.books();
        loop {
            match ask(&mut books) {
                Next::Say(said) => return Some(said),
                Next::Deposit => return None,
                Next::Wait => {
                    books = self.changed.wait(books).unwrap_or_else(PoisonError::into_inner);
                }
            }
        }
    }

    fn changing(&self, change: impl FnOnce(&mut Books) -> Said) -> Said {
        let said = change(&mut self.books());
        self.changed.notify_all();
        said
    }
}

impl Peers<'_> {
    /// Sends a deposit until it is acknowledged.
    fn deposit(&mut self, to: usize, deposit: Question) {
        let vm = to % self.shared.vms.len();
        while let Err(error) = self.try_deposit(vm, &deposit) {
            self.links[vm] = None;
            self.shared.books().known.broken += 1;
            println!("{}", json!({"vm": vm, "broken": error.to_string()}));
            thread::sleep(AGAIN);
        }
    }

    fn try_deposit(&mut self, vm: usize, deposit: &Question) -> io::Result<()> {
        let link = match self.links[vm].take() {
            Some(link) => link,
            None => Lines::connect(self.shared.vms[vm])?,
        };
        let link = self.links[vm].insert(link);
        link.say(deposit)?;
        let reply: Reply = link.hear()?;
        match (reply.id == deposit.id(), reply.said) {
            (true, Said::Done) => Ok(()),
            (_, said) => Err(io::Error::other(format!("{deposit:?}: {said:?}"))),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Runs two VMs on this machine, and several clients that transfer money concurrently and check
    /// the replies.
    #[test]
    fn the_sum_is_constant_whoever_moves_money() {
        let listeners = [0; 2].map(|_| TcpListener::bind("127.0.0.1:0").unwrap());
        let vms: Vec<_> = listeners.iter().map(|it| it.local_addr().unwrap()).collect();
        for (number, listener) in listeners.into_iter().enumerate() {
            let bank = Bank { number, vms: vms.clone(), accounts: 6, held: 100 };
            thread::spawn(move || serve_at(&listener, &bank));
        }
        let ask = |lines: &mut Lines, question: Question| {
            lines.say(&question).unwrap();
            let reply: Reply = lines.hear().unwrap();
            assert_eq!(reply.id, question.id());
            reply.said
        };
        thread::scope(|scope| {
            for client in 0..4_usize {
                let vms = &vms;
                scope.spawn(move || {
                    let mut to_vm = [0, 1].map(|vm: usize| Lines::connect(vms[vm]).unwrap());
                    for step in 0..50 {
                        let (from, to) = ((client + step) % 6, (client * step + 1) % 6);
                        let id = (client * 100 + step) as u64;
                        let question = Question::Transfer { id, from, to, amount: 30 };
                        // Twice, as a client does that has received no reply.
                        let said = ask(&mut to_vm[from % 2], question);
                        assert_eq!(ask(&mut to_vm[from % 2], question), said);
                        assert!(matches!(said, Said::Done | Said::Refused), "{said:?}");
                    }
                });
            }
        });
        let mut to_vm = [0, 1].map(|vm: usize| Lines::connect(vms[vm]).unwrap());
        let held = (0..6).map(|account| {
            match ask(&mut to_vm[account % 2], Question::Balance { id: 1, account }) {
                Said::Holds { held } => held,
                said => panic!("{said:?}"),
            }
        });
        assert_eq!(held.sum::<i64>(), 600);
        let known = to_vm.each_mut().map(|vm| match ask(vm, Question::Known { id: 2 }) {
            Said::Known(known) => known,
            said => panic!("{said:?}"),
        });
        let all = |of: fn(&super::super::Known) -> &Vec<u64>| {
            let mut all: Vec<u64> = known.iter().flat_map(of).copied().collect();
            all.sort_unstable();
            all
        };
        let (taken, paid) = (all(|known| &known.taken), all(|known| &known.paid));
        assert_eq!(taken, paid);
        assert!(taken.len() > 50 && taken.windows(2).all(|pair| pair[0] < pair[1]));
    }
}
