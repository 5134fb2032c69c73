//! Reads: what is read next, and what happens with the result.

use std::ops::Range;
use std::time::Duration;

use super::actions::{Install, Read, Source, Stir, Take, Why};
use super::pace::Leave;
use super::plan::Unit;
use super::units::State;
use super::{Server, Waiting};

/// If all that is left can be read within this time, by the estimated cost of the reads (see
/// [`super::cost`]: they usually take half of it), it is read without waiting for a moment without
/// faults.
const SOON: Duration = Duration::from_secs(20);

/// How all that is left is read, if that takes only a short time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Soon {
    /// From front to back, whatever the guest waits for in the meantime.
    AtOnce,
    /// While the guest does not wait for storage.
    Beside,
}

impl<B: Clone> Server<B> {
    /// Turns the background fill on or off.
    pub fn set_fill(&mut self, fill: bool) -> Stir {
        self.rules.fill = fill;
        self.stir(Stir { background: fill, ..Stir::default() })
    }

    /// What a reader thread reads next. Only one thread at a time may pass `may_fill`, so that a
    /// demand read never finds all of them busy in the background.
    pub fn take_read(&mut self, now: Duration, may_fill: bool) -> Take {
        if let Some(read) = self.take_asked().or_else(|| self.take_failed(now, may_fill)) {
            return Take::Read(read);
        }
        let has_background = self.ahead.has_more() || (may_fill && self.rules.fill);
        let take = match self.background_waits(now).filter(|_| has_background) {
            Some(then) => Take::At(then),
            None => self.take_background(now, may_fill),
        };
        self.until_retry(take, may_fill)
    }

    fn take_background(&mut self, now: Duration, may_fill: bool) -> Take {
        if self.units.held() >= self.rules.held_max {
            self.wants_room = true;
            return Take::Idle;
        }
        if self.ahead.has_more() {
            return self.take_ahead(now);
        }
        match may_fill && self.rules.fill {
            true => self.take_fill(now),
            false => Take::Idle,
        }
    }

    fn take_asked(&mut self) -> Option<Read> {
        while let Some(unit) = self.asked.pop_front() {
            if matches!(self.units.state(unit), State::Asked) {
                self.units.set(unit, State::Reading);
                let beside = self.start_run(Unit(unit.0 + 1), self.run_on_demand() - 1);
                let units = unit.0..beside.end;
                return Some(Read { units, why: Why::Demand, in_order: false });
            }
            self.reads_on_demand -= 1;
        }
        None
    }

    /// How many units a demand read covers. On a disk, reading for as long as the access took costs
    /// twice the time at most, and often saves the next access. Only one unit if all others are
    /// read soon anyway.
    fn run_on_demand(&self) -> u32 {
        let fills = self.rules.fill && !self.ahead.has_more();
        let all_comes =
            self.ahead.goes_through_all() || (fills && self.soon() == Some(Soon::AtOnce));
        let is_worth_it = self.rules.adapts && self.cost.is_far() && !all_comes;
        match is_worth_it && self.units.held() < self.rules.held_max {
            true => self.cost.worth().clamp(1, self.rules.run_max.max(1)),
            false => 1,
        }
    }

    /// A reader thread has finished a [`UnitRead`], whatever the result.
    pub fn read_done(&mut self, why: Why) {
        if why == Why::Ahead {
            self.ahead.done();
        }
    }

    /// A unit was certainly read from storage: the image is not all in the page cache.
    pub fn went_to_storage(&mut self) {
        self.cost.went_to_storage();
    }

    /// This read, from storage, took from `began` to `ended`.
    pub fn read_took(&mut self, read: &Read, began: Duration, ended: Duration) {
        match read.in_order {
            true => self.cost.read_in_order(),
            false => self.cost.read(read.units.len() as u32, began, ended),
        }
        if read.why == Why::Demand {
            self.read_on_demand_for += ended.saturating_sub(began);
        }
        if read.why == Why::Ahead {
            self.has_read_all |= read.in_order;
            self.ahead.rest(began, ended, self.rules.patience);
        }
        self.go_by_place_if_far();
    }

    fn take_fill(&mut self, now: Duration) -> Take {
        let soon = self.soon();
        if self.reads_on_demand > 0 && soon != Some(Soon::AtOnce) {
            return Take::At(now + self.rules.quiet);
        }
        let Some(first) = self.next_to_fill() else {
            return self.release_spared();
        };
        let (in_order, leave) = match soon {
            Some(Soon::AtOnce) => (true, Leave::Read(self.rules.run_max)),
            Some(Soon::Beside) => (false, self.ahead.leave(now, &self.rules)),
            None => (false, self.pace.ask(&self.rules, self.cost.round(), now)),
        };
        match leave {
            Leave::At(then) => Take::At(then),
            Leave::Read(len) => {
                self.pace.read(now);
                let units = self.start_run(first, len);
                Take::Read(Read { units, why: Why::Fill, in_order })
            }
        }
    }

    /// Whether all that is left can be read soon, from storage where one long read costs no more
    /// than a short one.
    ///
    /// A guest that has its working set requests little else, and a fill would only delay it. A
    /// guest that does not have its working set gains from everything. Which of the two it is is
    /// not known. So once the guest has waited for as long as reading everything would have taken,
    /// everything is read: at most twice the time of the best choice.
    fn soon(&self) -> Option<Soon> {
        let left = self.units.left();
        let is_soon = self.rules.adapts
            && self.cost.is_far()
            && self.cost.of(left, self.rules.run_max) <= SOON;
        is_soon.then_some(match self.read_on_demand_for >= self.cost.least(left) {
            true => Soon::AtOnce,
            false => Soon::Beside,
        })
    }

    fn next_to_fill(&mut self) -> Option<Unit> {
        while self.fill_from < self.plan.units() {
            let unit = Unit(self.fill_from);
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
    pub(super) fn start_run(&mut self, first: Unit, len: u32) -> Range<u32> {
        let end = first.0.saturating_add(len).min(self.plan.units());
        let is_wanted =
            |unit: &u32| matches!(self.units.state(Unit(*unit)), State::Stored | State::Asked);
        let run = match self.rules.adapts && self.cost.is_far() {
            true => first.0..(first.0..end).rfind(is_wanted).map_or(first.0, |last| last + 1),
            false => {
                let is_stored = |unit: &u32| self.units.is_stored(Unit(*unit));
                first.0..first.0 + (first.0..end).take_while(is_stored).count() as u32
            }
        };
        let wanted: Vec<u32> = run.clone().filter(is_wanted).collect();
        wanted.into_iter().for_each(|unit| self.begin(Unit(unit), State::Reading));
        run
    }

    /// A thread begins with a unit that no read has begun for.
    pub(super) fn begin(&mut self, unit: Unit, state: State<B>) {
        self.ahead.begun(unit);
        self.units.set(unit, state);
    }

    /// If the use of prefetched pages is counted, pages of these units are installed only on demand
    /// until there is nothing else to do. This ends that.
    fn release_spared(&mut self) -> Take {
        self.rules.account_use = false;
        // Workers start at the first block again: they may have passed one of which a single page
        // was being installed.
        for unit in std::mem::take(&mut self.spared) {
            let _ = self.go_back_to(unit);
        }
        Take::Idle
    }

    /// The page cache had the unit of this [`super::FaultAnswer::TryPageCache`]. To be reported
    /// before [`Self::record_install`].
    pub fn fetched(&mut self, now: Duration, unit: Unit, source: Source<B>) -> Stir {
        self.counts.demand_units += 1;
        self.pace.read(now);
        self.enter_memory(unit, source, Why::Demand, 1)
    }

    /// The page cache did not have the unit of this [`super::FaultAnswer::TryPageCache`]: a reader
    /// thread must read it.
    pub fn missed(&mut self, install: &Install<()>) -> Stir {
        self.ask_for(install)
    }

    /// The page cache no longer has the unit of an install from [`UnitSource::PageCache`]: a reader
    /// thread must read it again.
    pub fn lost(&mut self, install: &Install<B>) -> Stir {
        self.ask_for(install)
    }

    fn ask_for<S>(&mut self, install: &Install<S>) -> Stir {
        let (unit, block) = (install.unit, install.block);
        self.let_go(block);
        let page = install.wanted.unwrap_or(self.block_size.first_page(block));
        let waiting = Waiting { unit, block, page };
        match self.units.state(unit) {
            // A failed unit is read again when its pause is over, and the pause is shorter now.
            State::Done | State::Reading | State::Asked | State::Failed => {}
            State::Stored | State::Trying | State::Memory { .. } => {
                self.watch_divergence(unit);
                self.ahead.waited(self.pace.last_fault());
                self.units.set(unit, State::Asked);
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
        self.stir(Stir { demand: true, workers, ..Stir::default() })
    }

    /// A unit was read. It may be one that only lay between others.
    pub fn arrived(&mut self, now: Duration, unit: Unit, source: Source<B>, why: Why) -> Stir {
        self.pace.read(now);
        self.retries.read_succeeded();
        // A read that only passed over a failed unit has read it all the same.
        let is_wanted = matches!(self.units.state(unit), State::Reading | State::Failed);
        if is_wanted || why == Why::Demand {
            self.count_read(why);
        }
        if why == Why::Demand {
            self.ahead.waited(now);
        }
        match is_wanted {
            true => self.enter_memory(unit, source, why, 0),
            false => self.stir(Stir::default()),
        }
    }

    fn count_read(&mut self, why: Why) {
        match why {
            Why::Demand => {
                self.reads_on_demand = self.reads_on_demand.saturating_sub(1);
                self.counts.demand_units += 1;
                self.counts.demand_reads += 1;
            }
            Why::Ahead => self.counts.ahead_units += 1,
            Why::Fill => self.counts.fill_units += 1,
        }
    }

    pub(super) fn enter_memory(
        &mut self,
        unit: Unit,
        source: Source<B>,
        why: Why,
        asked: u32,
    ) -> Stir {
        let source = match self.has_room_for(unit) {
            true => source,
            false => Source::PageCache,
        };
        self.retries.remove_unit(unit);
        self.units.set(unit, State::Memory { source, why, next: 0 });
        let waited = self.urge(unit);
        if self.rules.account_use && why != Why::Fill {
            self.spare(unit, asked + waited);
        } else if self.plan.members(unit).len() > 1 || asked + waited == 0 {
            self.ready.push_back(unit);
        }
        self.stir(Stir { workers: !self.ready.is_empty(), ..Stir::default() })
    }

    /// Whether the bytes of a unit may stay in memory. While it is read it is already counted as
    /// held.
    fn has_room_for(&self, unit: Unit) -> bool {
        let counted = u32::from(matches!(self.units.state(unit), State::Reading));
        self.units.held() - counted < self.rules.held_max
    }

    /// Moves the blocks of a unit that the guest waits for to the front. Returns how many pages
    /// these are.
    fn urge(&mut self, unit: Unit) -> u32 {
        let before = self.urgent.len();
        self.waiting.retain(|waiting| {
            if waiting.unit == unit {
                self.urgent.push_back(*waiting);
            }
            waiting.unit != unit
        });
        (self.urgent.len() - before) as u32
    }

    fn spare(&mut self, unit: Unit, asked: u32) {
        let members = self.plan.members(unit).iter();
        let missing: u32 = members.map(|&block| self.settled.missing(block).count()).sum();
        self.counts.prefetched_pages += u64::from(missing.saturating_sub(asked));
        self.spared.push(unit);
    }

    /// Whether a unit is read for its own sake, and does not only lie between others.
    pub fn is_wanted(&self, unit: Unit) -> bool {
        matches!(self.units.state(unit), State::Reading)
    }

    /// Whether so few of these units are wanted that the bytes of this read should not keep those
    /// of the others in memory.
    pub fn is_sparse(&self, units: &Range<u32>) -> bool {
        let wanted = units.clone().filter(|&unit| self.is_wanted(Unit(unit))).count();
        wanted * 2 < units.len()
    }
}
