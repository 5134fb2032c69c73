//! Reads: what is read next, and what happens with the result.

use std::ops::Range;
use std::time::Duration;

use super::actions::{BlockInstall, ReadDecision, ReadReason, ThreadWakeups, UnitRead, UnitSource};
use super::fill_start::{FillShare, FillStartDecision};
use super::fill_throttle::{DEMAND_POLL, FillPermission, StorageUse};
use super::plan::ReadUnit;
use super::units::UnitState;
use super::{PageServer, WaitingFault};

/// If all that is left can be read within this time, by the estimated cost of the reads (see
/// [`super::cost`]: they usually take half of it), it is read without waiting for a moment without
/// faults.
const FILL_TIME_MAX: Duration = Duration::from_secs(20);

/// How all that is left is read, if that takes only a short time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum FillUrgency {
    /// From front to back, whatever the guest waits for in the meantime.
    AtOnce,
    /// While the guest does not wait for storage.
    Beside,
}

impl<B: Clone> PageServer<B> {
    /// Turns the background fill on or off.
    pub fn set_fill(&mut self, fill: bool) -> ThreadWakeups {
        self.rules.fill = fill;
        self.complete_wakeups(ThreadWakeups { background: fill, ..ThreadWakeups::default() })
    }

    /// What a reader thread reads next. Only one thread at a time may pass `may_fill`, so that a
    /// demand read never finds all of them busy in the background.
    pub fn take_read(&mut self, now: Duration, may_fill: bool) -> ReadDecision {
        if let Some(read) = self.take_demand_read().or_else(|| self.take_failed(now, may_fill)) {
            return ReadDecision::Read(read);
        }
        let has_background = self.prefetch.has_more() || (may_fill && self.rules.fill);
        let take = match self.background_pause(now).filter(|_| has_background) {
            Some(then) => ReadDecision::At(then),
            None => self.take_background(now, may_fill),
        };
        self.limit_to_retry(take, may_fill)
    }

    fn take_background(&mut self, now: Duration, may_fill: bool) -> ReadDecision {
        if self.units.held_count() >= self.rules.held_max {
            self.wants_room = true;
            return ReadDecision::Idle;
        }
        if self.prefetch.has_more() {
            return self.take_prefetch(now);
        }
        match may_fill && self.rules.fill {
            true => self.take_fill(now),
            false => ReadDecision::Idle,
        }
    }

    fn take_demand_read(&mut self) -> Option<UnitRead> {
        while let Some(unit) = self.asked.pop_front() {
            if matches!(self.units.state_of(unit), UnitState::Asked) {
                self.units.set_state(unit, UnitState::Reading);
                let beside = self.start_run(ReadUnit(unit.0 + 1), self.demand_run_length() - 1);
                let units = unit.0..beside.end;
                return Some(UnitRead { units, why: ReadReason::Demand, in_order: false });
            }
            self.reads_on_demand -= 1;
        }
        None
    }

    /// How many units a demand read covers. On a disk, reading for as long as the access took costs
    /// twice the time at most, and often saves the next access. Only one unit if all others are
    /// read soon anyway.
    fn demand_run_length(&self) -> u32 {
        let fills = self.rules.fill && !self.prefetch.has_more();
        let all_comes = self.prefetch.covers_all_units()
            || (fills && self.fill_urgency() == Some(FillUrgency::AtOnce));
        let may_read_beside = self.rules.is_adaptive && !self.rules.is_fill_late;
        let is_worth_it = may_read_beside && self.cost.is_high_latency() && !all_comes;
        match is_worth_it && self.units.held_count() < self.rules.held_max {
            true => self.cost.units_per_access().clamp(1, self.rules.run_max.max(1)),
            false => 1,
        }
    }

    /// A reader thread has finished a [`UnitRead`], whatever the result.
    pub fn finish_read(&mut self, why: ReadReason, now: Duration) {
        match why {
            ReadReason::Ahead => self.prefetch.record_done(),
            ReadReason::Fill => self.fill_throttle.record_fill_end(now),
            ReadReason::Demand => {}
        }
    }

    /// A unit was certainly read from storage: the image is not all in the page cache.
    pub fn record_storage_access(&mut self) {
        self.cost.record_storage_access();
    }

    /// The hypervisor has read these bytes meanwhile, perhaps from the same storage.
    pub fn record_other_reads(&mut self, bytes: u64) {
        self.cost.record_other_reads(bytes);
    }

    /// This read, from storage, took from `began` to `ended`. The kernel has fetched these bytes for
    /// it, or an unknown number if zero.
    pub fn record_read_time(
        &mut self,
        read: &UnitRead,
        fetched: u64,
        began: Duration,
        ended: Duration,
    ) {
        match read.in_order {
            true => self.cost.stop_learning(),
            false => self.cost.record_read(read.units.len() as u32, fetched, began, ended),
        }
        if read.why == ReadReason::Demand {
            self.read_on_demand_for += ended.saturating_sub(began);
            self.fill_throttle.record_demand_read(began, ended);
            self.fill_start.record_demand_read(began, ended);
        }
        if read.why == ReadReason::Ahead {
            self.has_read_all |= read.in_order;
            self.prefetch.yield_storage(began, ended, self.rules.patience);
        }
        self.reorder_if_high_latency();
    }

    fn take_fill(&mut self, now: Duration) -> ReadDecision {
        let soon = match self.rules.is_fill_late {
            true => match self.check_late_fill(now) {
                FillStartDecision::At(then) => return ReadDecision::At(then),
                FillStartDecision::Begun(FillShare::Whole) => Some(FillUrgency::AtOnce),
                FillStartDecision::Begun(FillShare::Half) => None,
            },
            false => self.fill_urgency(),
        };
        if self.reads_on_demand > 0 && soon == Some(FillUrgency::Beside) {
            return ReadDecision::At(now + DEMAND_POLL);
        }
        let Some(first) = self.next_to_fill() else {
            return self.release_withheld();
        };
        let (in_order, leave) = match soon {
            Some(FillUrgency::AtOnce) => (true, FillPermission::Read(self.rules.run_max)),
            Some(FillUrgency::Beside) => (false, self.prefetch.permit_fill(now, &self.rules)),
            None => (false, self.fill_throttle.permit_read(&self.rules, self.storage_use(), now)),
        };
        match leave {
            FillPermission::At(then) => ReadDecision::At(then),
            FillPermission::Read(len) => {
                let units = self.start_run(first, len);
                ReadDecision::Read(UnitRead { units, why: ReadReason::Fill, in_order })
            }
        }
    }

    /// Whether a fill that waits for the guest may begin, and with how much of the link.
    fn check_late_fill(&mut self, now: Duration) -> FillStartDecision {
        let fill_time = self.cost.transfer_time(self.units.unfinished_count());
        self.fill_start.check_start(self.reads_on_demand > 0, fill_time, now)
    }

    fn storage_use(&self) -> StorageUse {
        StorageUse {
            is_guest_waiting: self.reads_on_demand > 0,
            round: self.cost.double_latency(),
            run_min: self.cost.units_per_access(),
        }
    }

    /// Whether all that is left can be read soon, from storage where one long read costs no more
    /// than a short one.
    ///
    /// A guest that has its working set requests little else, and a fill would only delay it. A
    /// guest that does not have its working set gains from everything. Which of the two it is is
    /// not known. So once the guest has waited for as long as reading everything would have taken,
    /// everything is read: at most twice the time of the best choice.
    fn fill_urgency(&self) -> Option<FillUrgency> {
        let left = self.units.unfinished_count();
        let is_soon = self.rules.is_adaptive
            && self.cost.is_high_latency()
            && self.cost.estimate_reads(left, self.rules.run_max) <= FILL_TIME_MAX;
        is_soon.then_some(match self.read_on_demand_for >= self.cost.request_time_min(left) {
            true => FillUrgency::AtOnce,
            false => FillUrgency::Beside,
        })
    }

    fn next_to_fill(&mut self) -> Option<ReadUnit> {
        while self.fill_from < self.plan.unit_count() {
            let unit = ReadUnit(self.fill_from);
            if self.units.is_stored(unit) {
                return Some(unit);
            }
            self.fill_from += 1;
        }
        None
    }

    /// Begins to read up to `len` neighbouring units: up to the first one that a read has begun
    /// for. Or, where a second access costs more than reading a few units again, also past units in
    /// any other state.
    pub(super) fn start_run(&mut self, first: ReadUnit, len: u32) -> Range<u32> {
        let end = first.0.saturating_add(len).min(self.plan.unit_count());
        let is_wanted = |unit: &u32| {
            matches!(self.units.state_of(ReadUnit(*unit)), UnitState::Stored | UnitState::Asked)
        };
        let run = match self.rules.is_adaptive && self.cost.is_high_latency() {
            true => first.0..(first.0..end).rfind(is_wanted).map_or(first.0, |last| last + 1),
            false => {
                let is_stored = |unit: &u32| self.units.is_stored(ReadUnit(*unit));
                first.0..first.0 + (first.0..end).take_while(is_stored).count() as u32
            }
        };
        let wanted: Vec<u32> = run.clone().filter(is_wanted).collect();
        wanted.into_iter().for_each(|unit| self.start_unit(ReadUnit(unit), UnitState::Reading));
        run
    }

    /// A thread begins with a unit that no read has begun for.
    pub(super) fn start_unit(&mut self, unit: ReadUnit, state: UnitState<B>) {
        self.prefetch.record_start(unit);
        self.units.set_state(unit, state);
    }

    /// If the use of prefetched pages is counted, pages of these units are installed only on demand
    /// until there is nothing else to do. This ends that.
    fn release_withheld(&mut self) -> ReadDecision {
        self.rules.account_use = false;
        // Workers start at the first block again: they may have passed one of which a single page
        // was being installed.
        for unit in std::mem::take(&mut self.withheld) {
            let _ = self.rescan_unit(unit);
        }
        ReadDecision::Idle
    }

    /// The page cache had the unit of this [`super::FaultAnswer::TryPageCache`]. To be reported
    /// before [`Self::record_install`].
    pub fn record_cache_hit(&mut self, unit: ReadUnit, source: UnitSource<B>) -> ThreadWakeups {
        self.counts.demand_units += 1;
        self.enter_memory(unit, source, ReadReason::Demand, 1)
    }

    /// The page cache did not have the unit of this [`super::FaultAnswer::TryPageCache`]: a reader
    /// thread must read it.
    pub fn record_cache_miss(&mut self, install: &BlockInstall<()>) -> ThreadWakeups {
        self.queue_demand_read(install)
    }

    /// The page cache no longer has the unit of an install from [`UnitSource::PageCache`]: a reader
    /// thread must read it again.
    pub fn record_cache_loss(&mut self, install: &BlockInstall<B>) -> ThreadWakeups {
        self.queue_demand_read(install)
    }

    fn queue_demand_read<S>(&mut self, install: &BlockInstall<S>) -> ThreadWakeups {
        let (unit, block) = (install.unit, install.block);
        self.release_block(block);
        let page = install.wanted.unwrap_or(self.block_size.first_page(block));
        let waiting = WaitingFault { unit, block, page };
        match self.units.state_of(unit) {
            // A failed unit is read again when its pause is over, and the pause is shorter now.
            UnitState::Done | UnitState::Reading | UnitState::Asked | UnitState::Failed => {}
            UnitState::Stored | UnitState::Trying | UnitState::Memory { .. } => {
                self.watch_divergence(unit);
                self.prefetch.record_wait(self.fill_throttle.last_fault());
                self.units.set_state(unit, UnitState::Asked);
                self.asked.push_back(unit);
                self.reads_on_demand += 1;
            }
        }
        match self.settled.contains(page) {
            // The guest gave it back in the meantime: it is zeros, which need no read.
            true => self.urgent.push_back(waiting),
            false => self.waiting.push(waiting),
        }
        let workers = !self.urgent.is_empty();
        self.complete_wakeups(ThreadWakeups { demand: true, workers, ..ThreadWakeups::default() })
    }

    /// A unit was read. It may be one that only lay between others.
    pub fn record_arrival(
        &mut self,
        now: Duration,
        unit: ReadUnit,
        source: UnitSource<B>,
        why: ReadReason,
    ) -> ThreadWakeups {
        self.retries.record_success();
        // A read that only passed over a failed unit has read it all the same.
        let is_wanted = matches!(self.units.state_of(unit), UnitState::Reading | UnitState::Failed);
        if is_wanted || why == ReadReason::Demand {
            self.count_read(why);
        }
        if why == ReadReason::Demand {
            self.prefetch.record_wait(now);
        }
        match is_wanted {
            true => self.enter_memory(unit, source, why, 0),
            false => self.complete_wakeups(ThreadWakeups::default()),
        }
    }

    fn count_read(&mut self, why: ReadReason) {
        match why {
            ReadReason::Demand => {
                self.reads_on_demand = self.reads_on_demand.saturating_sub(1);
                self.counts.demand_units += 1;
                self.counts.demand_reads += 1;
            }
            ReadReason::Ahead => self.counts.ahead_units += 1,
            ReadReason::Fill => self.counts.fill_units += 1,
        }
    }

    pub(super) fn enter_memory(
        &mut self,
        unit: ReadUnit,
        source: UnitSource<B>,
        why: ReadReason,
        asked: u32,
    ) -> ThreadWakeups {
        let source = match self.has_room_for(unit) {
            true => source,
            false => UnitSource::PageCache,
        };
        self.retries.remove_unit(unit);
        self.units.set_state(unit, UnitState::Memory { source, why, next: 0 });
        let waited = self.move_to_urgent(unit);
        if self.rules.account_use && why != ReadReason::Fill {
            self.withhold_unit(unit, asked + waited);
        } else if self.plan.members(unit).len() > 1 || asked + waited == 0 {
            self.ready.push_back(unit);
        }
        self.complete_wakeups(ThreadWakeups {
            workers: !self.ready.is_empty(),
            ..ThreadWakeups::default()
        })
    }

    /// Whether the bytes of a unit may stay in memory. While it is read it is already counted as
    /// held.
    fn has_room_for(&self, unit: ReadUnit) -> bool {
        let counted = u32::from(matches!(self.units.state_of(unit), UnitState::Reading));
        self.units.held_count() - counted < self.rules.held_max
    }

    /// Moves the blocks of a unit that the guest waits for to the front. Returns how many pages
    /// these are.
    fn move_to_urgent(&mut self, unit: ReadUnit) -> u32 {
        let before = self.urgent.len();
        self.waiting.retain(|waiting| {
            if waiting.unit == unit {
                self.urgent.push_back(*waiting);
            }
            waiting.unit != unit
        });
        (self.urgent.len() - before) as u32
    }

    fn withhold_unit(&mut self, unit: ReadUnit, asked: u32) {
        let members = self.plan.members(unit).iter();
        let missing: u32 = members.map(|&block| self.settled.missing_in(block).count()).sum();
        self.counts.prefetched_pages += u64::from(missing.saturating_sub(asked));
        self.withheld.push(unit);
    }

    /// Whether a unit is read for its own sake, and does not only lie between others.
    pub fn is_wanted(&self, unit: ReadUnit) -> bool {
        matches!(self.units.state_of(unit), UnitState::Reading)
    }

    /// Whether so few of these units are wanted that the bytes of this read should not keep those
    /// of the others in memory.
    pub fn is_sparse(&self, units: &Range<u32>) -> bool {
        let wanted = units.clone().filter(|&unit| self.is_wanted(ReadUnit(unit))).count();
        wanted * 2 < units.len()
    }
}
