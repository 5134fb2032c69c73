//! Reads and installs that have failed, and when each is tried again.
//!
//! ```text
//!   read failed ----> unit waits ------ at its time ---> read again ---> arrived: forgotten
//!   install failed -> block waits ----- at its time ---> read from the file, decoded, installed again ---> forgotten
//! ```
//!
//! The pause doubles with each failure of a unit or block, up to [`Rules::retry_max`]; up to [`Rules::retry_requested_max`] while
//! a vCPU waits for one of its pages. So storage that is gone for an hour costs a few reads a second, and a guest that waits
//! continues within a second of its return. While background reads fail one after another, the next one begins after a pause
//! as well: otherwise every unit of the image would be tried once and fail.

use std::ops::Range;
use std::time::Duration;

use firn_types::{Block, Page};

use super::actions::{Install, Read, Source, Stir, Take, Why, Work};
use super::pace::Rules;
use super::plan::Unit;
use super::units::State;
use super::{Server, Waiting};

/// How often something has failed, and when last.
#[derive(Clone, Copy, Debug)]
struct Attempts {
    count: u32,
    failed_at: Duration,
    /// A thread tries it again at this moment.
    is_running: bool,
}

impl Attempts {
    fn first(now: Duration) -> Self {
        Self { count: 1, failed_at: now, is_running: false }
    }

    fn failed(&mut self, now: Duration) {
        *self = Self { count: self.count.saturating_add(1), failed_at: now, is_running: false };
    }

    fn due_at(&self, is_requested: bool, rules: &Rules) -> Duration {
        let pause_max = if is_requested { rules.retry_requested_max } else { rules.retry_max };
        self.failed_at + pause(self.count, rules.retry_min, pause_max)
    }
}

fn pause(count: u32, pause_min: Duration, pause_max: Duration) -> Duration {
    (pause_min * (1 << count.saturating_sub(1).min(16))).min(pause_max)
}

/// A memory block that could not be installed.
#[derive(Clone, Debug)]
struct FailedBlock {
    block: Block,
    unit: Unit,
    /// Its pages that vCPUs wait for.
    requested: Vec<Page>,
    attempts: Attempts,
}

/// All that has failed and was not done since.
#[derive(Debug, Default)]
pub(super) struct Retries {
    units: Vec<(Unit, Attempts)>,
    blocks: Vec<FailedBlock>,
    /// Background reads that failed since the last read that did not.
    background_failures: u32,
    /// No background read begins before.
    background_from: Duration,
}

impl Retries {
    /// A vCPU waits for a page of a block that could not be installed. False if it is not such a block.
    pub(super) fn request(&mut self, block: Block, page: Page) -> bool {
        let found = self.blocks.iter_mut().find(|it| it.block == block);
        found.map(|it| it.requested.push(page)).is_some()
    }

    /// A read has succeeded.
    pub(super) fn unit_arrived(&mut self, unit: Unit) {
        self.background_failures = 0;
        self.units.retain(|(it, _)| *it != unit);
    }

    pub(super) fn block_installed(&mut self, block: Block) {
        self.blocks.retain(|it| it.block != block);
    }

    /// The requested pages among these, with their blocks: no longer to be waited for here.
    pub(super) fn take_requested(&mut self, pages: &Range<Page>) -> Vec<(Unit, Block, Page)> {
        let mut taken = Vec::new();
        for FailedBlock { block, unit, requested, .. } in &mut self.blocks {
            let answered = requested.iter().filter(|page| pages.contains(page));
            taken.extend(answered.map(|&page| (*unit, *block, page)));
            requested.retain(|page| !pages.contains(page));
        }
        taken
    }

    fn background_failed(&mut self, now: Duration, rules: &Rules) {
        self.background_failures = self.background_failures.saturating_add(1);
        let pause_max = rules.retry_requested_max;
        self.background_from = now + pause(self.background_failures, rules.retry_min, pause_max);
    }
}

impl<B: Clone> Server<B> {
    /// A unit can't be read now: it is read again later. Whether anything is missing by that.
    #[must_use]
    pub fn failed(&mut self, now: Duration, unit: Unit, why: Why) -> bool {
        match why {
            Why::Demand => self.reads_on_demand = self.reads_on_demand.saturating_sub(1),
            Why::Ahead | Why::Fill => self.retries.background_failed(now, &self.rules),
        }
        let is_wanted = self.is_wanted(unit);
        if is_wanted {
            self.units.set(unit, State::Failed);
            match self.retries.units.iter_mut().find(|(it, _)| *it == unit) {
                Some((_, attempts)) => attempts.failed(now),
                None => self.retries.units.push((unit, Attempts::first(now))),
            }
        }
        is_wanted
    }

    /// A block can't be installed now, because its stored bytes can't be read or are damaged: that is tried again later. Workers
    /// pass it meanwhile.
    pub fn set_aside<S>(&mut self, now: Duration, install: &Install<S>) -> Stir {
        let Install { block, unit, wanted, .. } = *install;
        // Another thread has installed it meanwhile.
        if self.settled.missing(block).is_empty() {
            return Stir::default();
        }
        self.take(block);
        match self.retries.blocks.iter_mut().find(|it| it.block == block) {
            Some(failed) => {
                failed.attempts.failed(now);
                failed.requested.extend(wanted.filter(|page| !failed.requested.contains(page)));
            }
            None => self.retries.blocks.push(FailedBlock {
                block,
                unit,
                requested: wanted.into_iter().collect(),
                attempts: Attempts::first(now),
            }),
        }
        match self.units.state(unit) {
            State::Trying => self.enter_memory(unit, Source::PageCache, Why::Demand, 1),
            _ => Stir::default(),
        }
    }

    /// A block whose time has come to be installed again, from the file. For a thread that may wait for storage.
    pub fn take_retry(&mut self, now: Duration) -> Option<Work<B>> {
        let rules = self.rules;
        let settled = &mut self.settled;
        self.retries.blocks.retain(|it| !settled.missing(it.block).is_empty());
        let is_due = |it: &&mut FailedBlock| {
            let due = it.attempts.due_at(!it.requested.is_empty(), &rules);
            !it.attempts.is_running && due <= now
        };
        let failed = self.retries.blocks.iter_mut().find(is_due)?;
        failed.attempts.is_running = true;
        let (block, unit, wanted) = (failed.block, failed.unit, failed.requested.first().copied());
        let pages = self.settled.missing(block);
        let (source, version) = (Source::PageCache, self.version);
        Some(Work::Install(Install { block, unit, pages, source, wanted, version }))
    }

    /// A unit whose time has come to be read again.
    pub(super) fn take_failed(&mut self, now: Duration, may_fill: bool) -> Option<Read> {
        let units = &self.units;
        self.retries.units.retain(|(unit, _)| !units.is_done(*unit));
        let due = |(unit, attempts): &(Unit, Attempts)| self.retry_at(*unit, attempts, may_fill);
        let at = self.retries.units.iter().position(|it| due(it).is_some_and(|at| at <= now))?;
        let (unit, attempts) = &mut self.retries.units[at];
        attempts.is_running = true;
        let unit = *unit;
        let is_requested = self.is_requested(unit);
        self.reads_on_demand += u32::from(is_requested);
        self.units.set(unit, State::Reading);
        let why = if is_requested { Why::Demand } else { Why::Fill };
        Some(Read { units: unit.0..unit.0 + 1, why, in_order: false })
    }

    /// When this thread may read a unit again. `None` while another does, and if only the background fill wants it and this thread
    /// does not fill.
    fn retry_at(&self, unit: Unit, attempts: &Attempts, may_fill: bool) -> Option<Duration> {
        let is_requested = self.is_requested(unit);
        let is_ours = !attempts.is_running && (is_requested || (may_fill && self.rules.fill));
        is_ours.then(|| attempts.due_at(is_requested, &self.rules))
    }

    fn is_requested(&self, unit: Unit) -> bool {
        self.waiting.iter().any(|waiting| waiting.unit == unit)
    }

    /// No later than when something is to be tried again.
    pub(super) fn until_retry(&self, take: Take, may_fill: bool) -> Take {
        let units = self.retries.units.iter();
        let units = units.filter_map(|(unit, attempts)| self.retry_at(*unit, attempts, may_fill));
        let blocks = self.retries.blocks.iter().filter(|it| !it.attempts.is_running);
        let blocks = blocks.map(|it| it.attempts.due_at(!it.requested.is_empty(), &self.rules));
        match (take, units.chain(blocks).min()) {
            (Take::Idle, Some(at)) => Take::At(at),
            (Take::At(then), Some(at)) => Take::At(then.min(at)),
            (take, _) => take,
        }
    }

    /// Until when background reads wait because the last ones failed.
    pub(super) fn background_waits(&self, now: Duration) -> Option<Duration> {
        let failing = self.retries.background_failures > 0 && now < self.retries.background_from;
        failing.then_some(self.retries.background_from)
    }

    /// Whether something has failed and was not done since.
    pub fn has_failed(&self) -> bool {
        !self.retries.units.is_empty() || !self.retries.blocks.is_empty()
    }

    /// A page that a vCPU waits for and that could not be read or installed, with its unit and block.
    pub fn requested_in_vain(&self) -> Option<(Unit, Block, Page)> {
        let is_failed = |unit| self.retries.units.iter().any(|(it, _)| *it == unit);
        let waiting = self.waiting.iter().find(|it| is_failed(it.unit));
        let waiting = waiting.map(|&Waiting { unit, block, page }| (unit, block, page));
        let blocks = &self.retries.blocks;
        waiting.or_else(|| {
            blocks.iter().find_map(|it| Some((it.unit, it.block, *it.requested.first()?)))
        })
    }
}
