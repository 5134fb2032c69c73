//! Retry schedule: reads and installs that have failed, and when each is tried again.
//!
//! ```text
//!   read failed ----> unit waits ------ at its time ---> read again ---> arrived: removed
//!   install failed -> block waits ----- at its time ---> read from the file, decoded, installed again ---> removed
//! ```
//!
//! The pause doubles with each failure of a unit or block, up to [`PageServerRules::retry_max`]; up
//! to [`PageServerRules::retry_requested_max`] while a vCPU waits for one of its pages. So storage
//! that is unavailable for an hour costs a few reads a second, and a guest that waits continues
//! within a second of its return. While background reads fail one after another, the next one
//! begins after a pause as well: otherwise every unit of the image would be tried once and fail.
//!
//! The schedule never loses a unit or block that a vCPU may wait for:
//!
//! - A unit is *Failed* exactly if it is scheduled. It stays scheduled, with its count of failures,
//!   while it is read again (*Reading*), and leaves the schedule when its bytes arrive, by
//!   whichever read, or when all its pages are settled.
//! - A block leaves the schedule when all its pages are settled, and not before: the install of
//!   some of its pages does not answer a vCPU that waits for another one.
//! - Every requested page of a block in the schedule is one that the next attempt installs.
//!
//! The simulation checks this after each step.

use std::ops::Range;
use std::time::Duration;

use firn_types::{Block, Page};

use super::actions::{
    BlockInstall, InstallWork, ReadDecision, ReadReason, ThreadWakeups, UnitRead, UnitSource,
};
use super::fill_throttle::PageServerRules;
use super::plan::ReadUnit;
use super::units::UnitState;
use super::{PageServer, SettledPages, WaitingFault};

/// How often something has failed, and when it last did.
#[derive(Clone, Copy, Debug)]
struct FailedAttempts {
    count: u32,
    failed_at: Duration,
}

impl FailedAttempts {
    fn first_failure(now: Duration) -> Self {
        Self { count: 1, failed_at: now }
    }

    fn record_failure(&mut self, now: Duration) {
        *self = Self { count: self.count.saturating_add(1), failed_at: now };
    }

    fn next_attempt_at(&self, is_requested: bool, rules: &PageServerRules) -> Duration {
        let pause_max = if is_requested { rules.retry_requested_max } else { rules.retry_max };
        self.failed_at + retry_pause(self.count, rules.retry_min, pause_max)
    }
}

fn retry_pause(count: u32, pause_min: Duration, pause_max: Duration) -> Duration {
    (pause_min * (1 << count.saturating_sub(1).min(16))).min(pause_max)
}

/// A memory block that could not be installed.
#[derive(Clone, Debug)]
struct FailedBlock {
    block: Block,
    unit: ReadUnit,
    /// Its pages that vCPUs wait for.
    requested: Vec<Page>,
    attempts: FailedAttempts,
    /// A thread is trying it again.
    is_running: bool,
}

/// All that has failed and has not succeeded since.
#[derive(Debug, Default)]
pub(super) struct RetrySchedule {
    units: Vec<(ReadUnit, FailedAttempts)>,
    blocks: Vec<FailedBlock>,
    /// Background reads that failed since the last successful read.
    background_failures: u32,
    /// No background read begins before this time.
    background_from: Duration,
}

impl RetrySchedule {
    /// A vCPU waits for a page of a block that could not be installed. Returns false if it is not
    /// such a block.
    pub(super) fn request_page(&mut self, block: Block, page: Page) -> bool {
        let found = self.blocks.iter_mut().find(|it| it.block == block);
        found.map(|it| it.requested.push(page)).is_some()
    }

    /// A read has succeeded.
    pub(super) fn record_success(&mut self) {
        self.background_failures = 0;
    }

    /// A unit is in memory, or all its pages are settled.
    pub(super) fn remove_unit(&mut self, unit: ReadUnit) {
        self.units.retain(|(it, _)| *it != unit);
    }

    /// Pages of a block were settled: no vCPU waits for them any more. The block stays if other
    /// pages are missing.
    pub(super) fn remove_settled(&mut self, block: Block, settled: &SettledPages) {
        self.blocks.retain_mut(|it| {
            if it.block == block {
                it.requested.retain(|page| !settled.contains(*page));
            }
            it.block != block || !settled.missing_in(block).is_empty()
        });
    }

    /// Removes and returns the requested pages among these, with their blocks: their vCPUs no
    /// longer wait here.
    pub(super) fn take_requested(&mut self, pages: &Range<Page>) -> Vec<(ReadUnit, Block, Page)> {
        let mut taken = Vec::new();
        for FailedBlock { block, unit, requested, .. } in &mut self.blocks {
            let answered = requested.iter().filter(|page| pages.contains(page));
            taken.extend(answered.map(|&page| (*unit, *block, page)));
            requested.retain(|page| !pages.contains(page));
        }
        taken
    }

    fn record_background_failure(&mut self, now: Duration, rules: &PageServerRules) {
        self.background_failures = self.background_failures.saturating_add(1);
        let pause_max = rules.retry_requested_max;
        self.background_from =
            now + retry_pause(self.background_failures, rules.retry_min, pause_max);
    }
}

impl<B: Clone> PageServer<B> {
    /// A unit can't be read now: it is read again later. Returns whether the unit was wanted, so
    /// that it is missing now.
    #[must_use]
    pub fn record_failed_read(&mut self, now: Duration, unit: ReadUnit, why: ReadReason) -> bool {
        match why {
            ReadReason::Demand => self.reads_on_demand = self.reads_on_demand.saturating_sub(1),
            ReadReason::Ahead | ReadReason::Fill => {
                self.retries.record_background_failure(now, &self.rules)
            }
        }
        let is_wanted = self.is_wanted(unit);
        if is_wanted {
            self.units.set_state(unit, UnitState::Failed);
            match self.retries.units.iter_mut().find(|(it, _)| *it == unit) {
                Some((_, attempts)) => attempts.record_failure(now),
                None => self.retries.units.push((unit, FailedAttempts::first_failure(now))),
            }
        }
        is_wanted
    }

    /// A block can't be installed now, because its stored bytes can't be read or are damaged: the
    /// install is tried again later. Workers skip the block until then.
    pub fn set_aside<S>(&mut self, now: Duration, install: &BlockInstall<S>) -> ThreadWakeups {
        let BlockInstall { block, unit, wanted, .. } = *install;
        // The guest gave the page back, or another thread installed it: the next attempt would not
        // include it.
        let settled = wanted.filter(|&page| self.settled.contains(page));
        self.urgent.extend(settled.map(|page| WaitingFault { unit, block, page }));
        if !self.settled.missing_in(block).is_empty() {
            self.schedule_install(now, block, unit, wanted.filter(|page| settled != Some(*page)));
        }
        let stir = match self.units.state_of(unit) {
            UnitState::Trying => {
                self.enter_memory(unit, UnitSource::PageCache, ReadReason::Demand, 1)
            }
            _ => ThreadWakeups::default(),
        };
        stir.merge_with(ThreadWakeups {
            workers: !self.urgent.is_empty(),
            ..ThreadWakeups::default()
        })
    }

    /// Has a block installed again after a pause.
    fn schedule_install(
        &mut self,
        now: Duration,
        block: Block,
        unit: ReadUnit,
        requested: Option<Page>,
    ) {
        self.claim_block(block);
        match self.retries.blocks.iter_mut().find(|it| it.block == block) {
            Some(failed) => {
                failed.attempts.record_failure(now);
                failed.is_running = false;
                failed.requested.extend(requested.filter(|page| !failed.requested.contains(page)));
            }
            None => self.retries.blocks.push(FailedBlock {
                block,
                unit,
                requested: requested.into_iter().collect(),
                attempts: FailedAttempts::first_failure(now),
                is_running: false,
            }),
        }
    }

    /// A block whose pause is over, to be installed again from the file. For a thread that may wait
    /// for storage.
    pub fn take_retry(&mut self, now: Duration) -> Option<InstallWork<B>> {
        let rules = self.rules;
        let is_due = |it: &&mut FailedBlock| {
            let due = it.attempts.next_attempt_at(!it.requested.is_empty(), &rules);
            !it.is_running && due <= now
        };
        let failed = self.retries.blocks.iter_mut().find(is_due)?;
        failed.is_running = true;
        let (block, unit, wanted) = (failed.block, failed.unit, failed.requested.first().copied());
        let pages = self.settled.missing_in(block);
        let (source, version) = (UnitSource::PageCache, self.version);
        Some(InstallWork::Install(BlockInstall { block, unit, pages, source, wanted, version }))
    }

    /// A unit whose pause is over, to be read again.
    pub(super) fn take_failed(&mut self, now: Duration, may_fill: bool) -> Option<UnitRead> {
        let due = |(unit, attempts): &&(ReadUnit, FailedAttempts)| {
            self.retry_at(*unit, attempts, may_fill).is_some_and(|at| at <= now)
        };
        let (unit, _) = *self.retries.units.iter().find(due)?;
        let is_requested = self.is_requested(unit);
        self.reads_on_demand += u32::from(is_requested);
        self.units.set_state(unit, UnitState::Reading);
        let why = if is_requested { ReadReason::Demand } else { ReadReason::Fill };
        Some(UnitRead { units: unit.0..unit.0 + 1, why, in_order: false })
    }

    /// When this thread may read a unit again. `None` while another thread reads it, and if only
    /// the background fill wants it and this thread does not fill.
    fn retry_at(
        &self,
        unit: ReadUnit,
        attempts: &FailedAttempts,
        may_fill: bool,
    ) -> Option<Duration> {
        let is_requested = self.is_requested(unit);
        let is_failed = matches!(self.units.state_of(unit), UnitState::Failed);
        let is_ours = is_failed && (is_requested || (may_fill && self.rules.fill));
        is_ours.then(|| attempts.next_attempt_at(is_requested, &self.rules))
    }

    fn is_requested(&self, unit: ReadUnit) -> bool {
        self.waiting.iter().any(|waiting| waiting.unit == unit)
    }

    /// The decision `take`, but no later than the next retry.
    pub(super) fn limit_to_retry(&self, take: ReadDecision, may_fill: bool) -> ReadDecision {
        let units = self.retries.units.iter();
        let units = units.filter_map(|(unit, attempts)| self.retry_at(*unit, attempts, may_fill));
        let blocks = self.retries.blocks.iter().filter(|it| !it.is_running);
        let blocks =
            blocks.map(|it| it.attempts.next_attempt_at(!it.requested.is_empty(), &self.rules));
        match (take, units.chain(blocks).min()) {
            (ReadDecision::Idle, Some(at)) => ReadDecision::At(at),
            (ReadDecision::At(then), Some(at)) => ReadDecision::At(then.min(at)),
            (take, _) => take,
        }
    }

    /// Until when background reads wait because the last ones failed.
    pub(super) fn background_pause(&self, now: Duration) -> Option<Duration> {
        let failing = self.retries.background_failures > 0 && now < self.retries.background_from;
        failing.then_some(self.retries.background_from)
    }

    /// Whether something has failed and has not succeeded since.
    pub fn has_failed(&self) -> bool {
        !self.retries.units.is_empty() || !self.retries.blocks.is_empty()
    }

    /// A page that a vCPU waits for and that could not be read or installed, with its unit and
    /// block.
    pub fn failed_request(&self) -> Option<(ReadUnit, Block, Page)> {
        let is_failed = |unit| self.retries.units.iter().any(|(it, _)| *it == unit);
        let waiting = self.waiting.iter().find(|it| is_failed(it.unit));
        let waiting = waiting.map(|&WaitingFault { unit, block, page }| (unit, block, page));
        let blocks = &self.retries.blocks;
        waiting.or_else(|| {
            blocks.iter().find_map(|it| Some((it.unit, it.block, *it.requested.first()?)))
        })
    }
}

#[cfg(test)]
impl<B: Clone + std::fmt::Debug> PageServer<B> {
    /// Checks what the documentation of this module promises, while `running` attempts to install a
    /// block are in progress.
    pub(super) fn check_schedule(&self, running: usize) {
        let state = |unit: &ReadUnit| self.units.state_of(*unit);
        let scheduled: Vec<ReadUnit> = self.retries.units.iter().map(|(unit, _)| *unit).collect();
        for unit in (0..self.plan.unit_count()).map(ReadUnit) {
            let times = scheduled.iter().filter(|it| **it == unit).count();
            let is_right = match state(&unit) {
                UnitState::Failed => times == 1,
                UnitState::Reading => times <= 1,
                _ => times == 0,
            };
            assert!(is_right, "{unit:?} is {:?} and {times} times scheduled", state(&unit));
        }
        for waiting in &self.waiting {
            let state = state(&waiting.unit);
            let comes = matches!(
                state,
                UnitState::Trying
                    | UnitState::Asked
                    | UnitState::Reading
                    | UnitState::Failed
                    | UnitState::Done
            );
            assert!(comes, "{waiting:?} of a unit that is {state:?}");
        }
        for failed in &self.retries.blocks {
            let is_open = |page: &Page| !self.settled.contains(*page);
            let is_missing = !self.settled.missing_in(failed.block).is_empty();
            assert!(is_missing && failed.requested.iter().all(is_open), "{failed:?}");
        }
        let is_running = self.retries.blocks.iter().filter(|it| it.is_running).count();
        assert!(is_running <= running, "{is_running} blocks seem to be installed by {running}");
    }
}
