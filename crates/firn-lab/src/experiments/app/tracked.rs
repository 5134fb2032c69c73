//! One system under measurement: a tracker, and what becomes of what it finds.

use std::time::Instant;

use anyhow::Result;
use firn_app::{Area, Kind, Options, Precision, Session, Source};

/// A tracker as it is measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum System {
    /// A tracker alone: pages where it knows pages, words where it knows words.
    Plain(Kind),
    /// PT by the kernel as sessions use it by default: words, by comparing pages with the last committed copy.
    Assisted,
}

impl System {
    /// All of them; PT first.
    pub(super) const ALL: [Self; 6] = [
        Self::Plain(Kind::Pages),
        Self::Plain(Kind::Emulate),
        Self::Assisted,
        Self::Plain(Kind::Assisted),
        Self::Plain(Kind::Scan),
        Self::Plain(Kind::Compare),
    ];

    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Plain(Kind::Assisted) => "pt_assisted_pages",
            Self::Plain(kind) => kind.name(),
            Self::Assisted => "pt_assisted",
        }
    }

    fn options(self) -> Options {
        let options = Options::new("lab").source(Source::Allocated);
        match self {
            Self::Plain(Kind::Compare) => options.tracker(Kind::Compare),
            Self::Plain(Kind::Emulate) => options.tracker(Kind::Emulate).undo(false),
            Self::Plain(kind) => options.tracker(kind).precision(Precision::Pages).undo(false),
            Self::Assisted => options.tracker(Kind::Assisted),
        }
    }
}

/// What a run took.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Taken {
    /// For each transaction, in microseconds: operations, and knowing what they wrote.
    pub(super) us: f64,
    /// The same, and copying what was written to where a helper thread would take it.
    pub(super) us_with_copy: f64,
    /// Bytes that were copied, in all.
    pub(super) bytes: f64,
    /// Runs of bytes told, in all.
    pub(super) runs: f64,
}

/// An area under transactions.
pub(super) struct Tracked {
    session: Session,
    area: Area,
    buffer: Vec<u8>,
}

impl Tracked {
    /// An area of that many words, filled by `fill` in a first transaction.
    pub(super) fn new(system: System, words: usize, fill: impl FnOnce(&mut [u64])) -> Result<Self> {
        let mut session = Session::open(system.options())?;
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
        let mut transaction = tracked.session.begin()?;
        fill(transaction.words(&tracked.area));
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
        Ok(taken)
    }
}

/// Runs a workload on a new area twice: to time it, and, on another, to time it with copies and count bytes.
pub(super) fn measure(
    system: System,
    words: usize,
    transactions: usize,
    fill: impl Fn(&mut [u64]),
    work: impl Fn(&mut [u64], usize),
) -> Result<Taken> {
    let alone = Tracked::new(system, words, &fill)?.run(transactions, false, &work)?;
    let copied = Tracked::new(system, words, &fill)?.run(transactions, true, &work)?;
    Ok(Taken { us: alone.us, us_with_copy: copied.us, ..copied })
}
