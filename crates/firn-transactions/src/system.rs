//! A system under measurement: a tracker, and the use of its results.

use std::str::FromStr;
use std::time::Instant;

use anyhow::{Result, anyhow};
use firn_app::{Area, Host, Kind, Options, Precision, Session, Source};
use serde::{Deserialize, Serialize};

/// A tracker in a configuration that is measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum System {
    /// A tracker alone: it reports pages or words, as it can.
    Plain(Kind),
    /// PT by the kernel as sessions use it by default: words, by comparing pages with the last
    /// committed copy.
    Assisted,
    /// PT by Firn on the host, in the same way.
    AssistedByHost,
    /// Pages, of stores that Firn's plugin in the hypervisor notes.
    PagesNoted,
}

/// The name and key with which Firn on the host is called, if it is the tracker.
#[derive(Clone, Debug, Default)]
pub struct Calls {
    /// The application's name.
    pub name: String,
    /// The application's key.
    pub key: String,
}

impl Calls {
    fn host(&self) -> Result<Host> {
        Ok(Host::open(&self.name, &self.key)?)
    }
}

impl System {
    /// The systems that need no Firn on the host; PT first.
    pub const NATIVE: [Self; 6] = [
        Self::Plain(Kind::Pages),
        Self::Plain(Kind::Emulate),
        Self::Assisted,
        Self::Plain(Kind::Assisted),
        Self::Plain(Kind::Scan),
        Self::Plain(Kind::Compare),
    ];

    /// The systems of interest in a guest.
    pub const GUEST: [Self; 4] = [
        Self::Plain(Kind::Pages),
        Self::Plain(Kind::Emulate),
        Self::AssistedByHost,
        Self::Plain(Kind::Host),
    ];

    /// The systems of interest in a guest whose stores are noted.
    pub const NOTED: [Self; 6] = [
        Self::Plain(Kind::Pages),
        Self::Plain(Kind::Emulate),
        Self::AssistedByHost,
        Self::Plain(Kind::Host),
        Self::PagesNoted,
        Self::Plain(Kind::Stores),
    ];

    /// The name in figures.
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
        found.ok_or_else(|| anyhow!("no system has the name {name:?}"))
    }
}

/// The results of a run.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
pub struct Taken {
    /// Microseconds per transaction, for its operations and for finding what they wrote.
    pub us: f64,
    /// The same, and for copying the changes to a buffer as for a helper thread.
    pub us_with_copy: f64,
    /// Bytes copied, in total.
    pub bytes: f64,
    /// Reported runs of bytes, in total.
    pub runs: f64,
    /// Transactions for which the host could not report what they wrote.
    pub blind: u64,
    /// Transactions for which the host was called though stores are noted.
    pub called: u64,
}

/// A session with one area, on which transactions run.
struct Tracked {
    session: Session,
    area: Area,
    buffer: Vec<u8>,
}

impl Tracked {
    /// An area of this count of words, filled by `fill` in a first transaction.
    fn new(mut session: Session, words: usize, fill: impl FnOnce(&mut [u64])) -> Result<Self> {
        let area = session.allocate("area", words * 8)?;
        let mut tracked = Self { session, area, buffer: Vec::with_capacity(words * 8) };
        // Every page is touched here, so that no page is touched for the first time during the
        // measurement.
        for round in 0..2 {
            let mut transaction = tracked.session.begin()?;
            let bytes = transaction.words(&tracked.area);
            if round == 0 {
                bytes.iter_mut().step_by(512).for_each(|word| *word = 1);
                bytes.fill(0);
            }
            transaction.commit()?;
        }
        // In one copy: if each store is a signal, filling word by word would take longer than the
        // measurement.
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

/// Runs a workload on a new area twice: to time it, and, on another, to time it with copies and
/// count bytes.
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
