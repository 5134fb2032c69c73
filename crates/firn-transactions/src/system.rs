//! One system under measurement: a tracker, and what becomes of what it finds.

use std::str::FromStr;
use std::time::Instant;

use anyhow::{Result, anyhow};
use firn_app::{Area, Host, Kind, Options, Precision, Session, Source};
use serde::{Deserialize, Serialize};

/// A tracker as it is measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum System {
    /// A tracker alone: pages where it knows pages, words where it knows words.
    Plain(Kind),
    /// PT by the kernel as sessions use it by default: words, by comparing pages with the last committed copy.
    Assisted,
    /// PT by Firn on the host, in the same way.
    AssistedByHost,
    /// Pages, of stores that Firn's plugin in the hypervisor notes.
    PagesNoted,
}

/// As whom Firn on the host is called, where it is the tracker.
#[derive(Clone, Debug, Default)]
pub struct Calls {
    /// The application's name.
    pub name: String,
    /// Its key.
    pub key: String,
}

impl Calls {
    fn host(&self) -> Result<Host> {
        Ok(Host::open(&self.name, &self.key)?)
    }
}

impl System {
    /// What needs no host below; PT first.
    pub const NATIVE: [Self; 6] = [
        Self::Plain(Kind::Pages),
        Self::Plain(Kind::Emulate),
        Self::Assisted,
        Self::Plain(Kind::Assisted),
        Self::Plain(Kind::Scan),
        Self::Plain(Kind::Compare),
    ];

    /// What is of interest in a guest.
    pub const GUEST: [Self; 4] = [
        Self::Plain(Kind::Pages),
        Self::Plain(Kind::Emulate),
        Self::AssistedByHost,
        Self::Plain(Kind::Host),
    ];

    /// The same in a guest whose stores are noted.
    pub const NOTED: [Self; 6] = [
        Self::Plain(Kind::Pages),
        Self::Plain(Kind::Emulate),
        Self::AssistedByHost,
        Self::Plain(Kind::Host),
        Self::PagesNoted,
        Self::Plain(Kind::Stores),
    ];

    /// Its name in figures.
    pub fn name(self) -> &'static str {
        match self {
            Self::Plain(Kind::Assisted) => "pt_assisted_pages",
            Self::Plain(Kind::Host) => "pt_host_pages",
            Self::Plain(kind) => kind.name(),
            Self::Assisted => "pt_assisted",
            Self::AssistedByHost => "pt_host",
            Self::PagesNoted => "pt_host_noted",
        }
    }

    fn open(self, calls: &Calls) -> Result<Session> {
        let options = Options::new("lab").source(Source::Allocated);
        let session = match self {
            Self::Plain(Kind::Compare) => Session::open(options.tracker(Kind::Compare)),
            Self::Plain(Kind::Emulate) => Session::open(options.tracker(Kind::Emulate).undo(false)),
            Self::Plain(Kind::Host) => {
                let options = options.precision(Precision::Pages).undo(false);
                Session::open_with(options, Box::new(calls.host()?))
            }
            Self::Plain(Kind::Stores) => {
                let host = calls.host()?.noting_stores(Precision::Words)?;
                Session::open_with(options.undo(false), Box::new(host))
            }
            Self::PagesNoted => {
                let host = calls.host()?.noting_stores(Precision::Pages)?;
                let options = options.precision(Precision::Pages).undo(false);
                Session::open_with(options, Box::new(host))
            }
            Self::Plain(kind) => {
                Session::open(options.tracker(kind).precision(Precision::Pages).undo(false))
            }
            Self::Assisted => Session::open(options.tracker(Kind::Assisted)),
            Self::AssistedByHost => Session::open_with(options, Box::new(calls.host()?)),
        };
        Ok(session?)
    }
}

impl FromStr for System {
    type Err = anyhow::Error;

    fn from_str(name: &str) -> Result<Self> {
        let known = Self::NATIVE.into_iter().chain(Self::NOTED);
        let found = known.into_iter().find(|system| system.name() == name);
        found.ok_or_else(|| anyhow!("no system is called {name:?}"))
    }
}

/// What a run took.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
pub struct Taken {
    /// For each transaction, in microseconds: operations, and knowing what they wrote.
    pub us: f64,
    /// The same, and copying what was written to where a helper thread would take it.
    pub us_with_copy: f64,
    /// Bytes that were copied, in all.
    pub bytes: f64,
    /// Runs of bytes told, in all.
    pub runs: f64,
    /// Transactions of which the host could not tell what they wrote.
    pub blind: u64,
    /// Transactions for which the host was called though stores are noted.
    pub called: u64,
}

/// An area under transactions.
struct Tracked {
    session: Session,
    area: Area,
    buffer: Vec<u8>,
}

impl Tracked {
    /// An area of that many words, filled by `fill` in a first transaction.
    fn new(mut session: Session, words: usize, fill: impl FnOnce(&mut [u64])) -> Result<Self> {
        let area = session.allocate("area", words * 8)?;
        let mut tracked = Self { session, area, buffer: Vec::with_capacity(words * 8) };
        // Every page is touched, so that none is met for the first time later on.
        for round in 0..2 {
            let mut transaction = tracked.session.begin()?;
            let bytes = transaction.words(&tracked.area);
            if round == 0 {
                bytes.iter_mut().step_by(512).for_each(|word| *word = 1);
                bytes.fill(0);
            }
            transaction.commit()?;
        }
        // In one go: where each store is a signal, filling by hand would take longer than what is measured.
        let mut filled = vec![0; words];
        fill(&mut filled);
        let mut transaction = tracked.session.begin()?;
        transaction.words(&tracked.area)[..words].copy_from_slice(&filled);
        transaction.commit()?;
        Ok(tracked)
    }

    /// Runs transactions, timed as a whole, with or without copying.
    fn run(
        &mut self,
        transactions: usize,
        copies: bool,
        mut work: impl FnMut(&mut [u64], usize),
    ) -> Result<Taken> {
        let mut taken = Taken::default();
        let before = self.session.counts();
        let start = Instant::now();
        for number in 0..transactions {
            let mut transaction = self.session.begin()?;
            work(transaction.words(&self.area), number);
            transaction.commit()?;
            if copies {
                self.buffer.clear();
                self.session.copy_changes(&mut self.buffer);
                taken.bytes += self.buffer.len() as f64;
                taken.runs += self.session.changes().len() as f64;
            }
        }
        taken.us = start.elapsed().as_secs_f64() * 1e6 / transactions as f64;
        let after = self.session.counts();
        taken.blind = after.blind - before.blind;
        taken.called = after.called - before.called;
        Ok(taken)
    }
}

/// Runs a workload on a new area twice: to time it, and, on another, to time it with copies and count bytes.
///
/// # Errors
/// If the tracker does not work here.
pub fn measure(
    system: System,
    calls: &Calls,
    words: usize,
    transactions: usize,
    fill: impl Fn(&mut [u64]),
    work: impl Fn(&mut [u64], usize),
) -> Result<Taken> {
    let run =
        |copies| Tracked::new(system.open(calls)?, words, &fill)?.run(transactions, copies, &work);
    let (alone, copied) = (run(false)?, run(true)?);
    let (blind, called) = (alone.blind + copied.blind, alone.called + copied.called);
    Ok(Taken { us: alone.us, us_with_copy: copied.us, blind, called, ..copied })
}
