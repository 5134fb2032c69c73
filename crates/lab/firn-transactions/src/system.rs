//! A system under measurement: a tracker, and the use of its results.

use std::str::FromStr;
use std::time::Instant;

use anyhow::{Result, anyhow};
use firn_app::{Area, HostTracker, MemorySource, Precision, Session, SessionOptions, TrackerKind};
use serde::{Deserialize, Serialize};

/// A tracker in a configuration that is measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TrackerSystem {
    /// A tracker alone: it reports pages or words, as it can.
    Plain(TrackerKind),
    /// PT by the kernel as sessions use it by default: words, by comparing pages with the last
    /// committed copy.
    Assisted,
    /// PT by Firn on the host, in the same way.
    AssistedByHost,
    /// Pages, of stores that Firn's plugin in the hypervisor records.
    PagesRecorded,
}

/// The name and key of an application, with which it makes guest calls. Used if the tracker is Firn
/// on the host.
#[derive(Clone, Debug, Default)]
pub struct GuestCallIdentity {
    /// The application's name.
    pub name: String,
    /// The application's key.
    pub key: String,
}

impl GuestCallIdentity {
    fn open_host(&self) -> Result<HostTracker> {
        Ok(HostTracker::open(&self.name, &self.key)?)
    }
}

impl TrackerSystem {
    /// The systems that need no Firn on the host; PT first.
    pub const NATIVE: [Self; 6] = [
        Self::Plain(TrackerKind::Pages),
        Self::Plain(TrackerKind::Emulate),
        Self::Assisted,
        Self::Plain(TrackerKind::Assisted),
        Self::Plain(TrackerKind::Scan),
        Self::Plain(TrackerKind::Compare),
    ];

    /// The systems of interest in a guest.
    pub const GUEST: [Self; 4] = [
        Self::Plain(TrackerKind::Pages),
        Self::Plain(TrackerKind::Emulate),
        Self::AssistedByHost,
        Self::Plain(TrackerKind::Host),
    ];

    /// The systems of interest in a guest whose stores are recorded.
    pub const RECORDED: [Self; 6] = [
        Self::Plain(TrackerKind::Pages),
        Self::Plain(TrackerKind::Emulate),
        Self::AssistedByHost,
        Self::Plain(TrackerKind::Host),
        Self::PagesRecorded,
        Self::Plain(TrackerKind::Stores),
    ];

    /// The name in figures.
    pub fn name(self) -> &'static str {
        match self {
            Self::Plain(TrackerKind::Assisted) => "pt_assisted_pages",
            Self::Plain(TrackerKind::Host) => "pt_host_pages",
            Self::Plain(kind) => kind.name(),
            Self::Assisted => "pt_assisted",
            Self::AssistedByHost => "pt_host",
            Self::PagesRecorded => "pt_host_noted",
        }
    }

    fn open_session(self, identity: &GuestCallIdentity) -> Result<Session> {
        let options = SessionOptions::new("lab").source(MemorySource::Allocated);
        let session = match self {
            Self::Plain(TrackerKind::Compare) => {
                Session::open(options.tracker(TrackerKind::Compare))
            }
            Self::Plain(TrackerKind::Emulate) => {
                Session::open(options.tracker(TrackerKind::Emulate).undo(false))
            }
            Self::Plain(TrackerKind::Host) => {
                let options = options.precision(Precision::Pages).undo(false);
                Session::open_with(options, Box::new(identity.open_host()?))
            }
            Self::Plain(TrackerKind::Stores) => {
                let host = identity.open_host()?.recording_stores(Precision::Words)?;
                Session::open_with(options.undo(false), Box::new(host))
            }
            Self::PagesRecorded => {
                let host = identity.open_host()?.recording_stores(Precision::Pages)?;
                let options = options.precision(Precision::Pages).undo(false);
                Session::open_with(options, Box::new(host))
            }
            Self::Plain(kind) => {
                Session::open(options.tracker(kind).precision(Precision::Pages).undo(false))
            }
            Self::Assisted => Session::open(options.tracker(TrackerKind::Assisted)),
            Self::AssistedByHost => Session::open_with(options, Box::new(identity.open_host()?)),
        };
        Ok(session?)
    }
}

impl FromStr for TrackerSystem {
    type Err = anyhow::Error;

    fn from_str(name: &str) -> Result<Self> {
        let known = Self::NATIVE.into_iter().chain(Self::RECORDED);
        let found = known.into_iter().find(|system| system.name() == name);
        found.ok_or_else(|| anyhow!("no system has the name {name:?}"))
    }
}

/// The results of a run.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
pub struct RunResult {
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
    /// Transactions for which the host was called though stores are recorded.
    pub called: u64,
}

/// The areas of a session.
#[derive(Clone, Copy, Debug)]
pub struct AreaLayout {
    /// Their count.
    pub areas: usize,
    /// The words of each.
    pub words: usize,
}

/// A session with areas, on which transactions run.
struct TrackedAreas {
    session: Session,
    areas: Vec<Area>,
    buffer: Vec<u8>,
}

impl TrackedAreas {
    /// Areas that `fill` fills, all in the same way, in a transaction before the first.
    fn new(
        mut session: Session,
        layout: AreaLayout,
        fill: impl FnOnce(&mut [u64]),
    ) -> Result<Self> {
        let AreaLayout { areas, words } = layout;
        let allocated =
            (0..areas).map(|number| session.allocate(&format!("area{number}"), words * 8));
        let allocated = allocated.collect::<Result<_, _>>()?;
        let buffer = Vec::with_capacity(areas * words * 8);
        let mut tracked = Self { session, areas: allocated, buffer };
        // Every page is touched here, so that no page is touched for the first time during the
        // measurement.
        tracked.write_areas(|bytes| {
            bytes.iter_mut().step_by(512).for_each(|word| *word = 1);
            bytes.fill(0);
        })?;
        tracked.write_areas(|_| {})?;
        // In one copy: if each store is a signal, filling word by word would take longer than the
        // measurement.
        let mut filled = vec![0; words];
        fill(&mut filled);
        tracked.write_areas(|bytes| bytes[..words].copy_from_slice(&filled))?;
        Ok(tracked)
    }

    /// A transaction that writes each area in the same way.
    fn write_areas(&mut self, mut write: impl FnMut(&mut [u64])) -> Result<()> {
        let mut transaction = self.session.begin()?;
        self.areas.iter().for_each(|area| write(transaction.words(area)));
        transaction.commit()?;
        Ok(())
    }

    /// Runs transactions, timed as a whole, with or without copying.
    fn run_transactions(
        &mut self,
        transactions: usize,
        copies: bool,
        mut work: impl FnMut(&mut [u64], usize),
    ) -> Result<RunResult> {
        let mut taken = RunResult::default();
        let before = self.session.tracker_counts();
        let start = Instant::now();
        for number in 0..transactions {
            let mut transaction = self.session.begin()?;
            work(transaction.words(&self.areas[number % self.areas.len()]), number);
            transaction.commit()?;
            if copies {
                self.buffer.clear();
                self.session.copy_changes(&mut self.buffer);
                taken.bytes += self.buffer.len() as f64;
                taken.runs += self.session.changes().len() as f64;
            }
        }
        taken.us = start.elapsed().as_secs_f64() * 1e6 / transactions as f64;
        let after = self.session.tracker_counts();
        taken.blind = after.blind - before.blind;
        taken.called = after.called - before.called;
        Ok(taken)
    }
}

/// Runs a workload on new areas twice: to time it, and, on others, to time it with copies and count
/// bytes.
///
/// # Errors
/// If the tracker does not work here.
pub fn measure_areas(
    system: TrackerSystem,
    identity: &GuestCallIdentity,
    layout: AreaLayout,
    transactions: usize,
    fill: impl Fn(&mut [u64]),
    work: impl Fn(&mut [u64], usize),
) -> Result<RunResult> {
    let run = |copies| {
        TrackedAreas::new(system.open_session(identity)?, layout, &fill)?.run_transactions(
            transactions,
            copies,
            &work,
        )
    };
    let (alone, copied) = (run(false)?, run(true)?);
    let (blind, called) = (alone.blind + copied.blind, alone.called + copied.called);
    Ok(RunResult { us: alone.us, us_with_copy: copied.us, blind, called, ..copied })
}
