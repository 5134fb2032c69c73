//! What is read next, and what comes of it.

use std::collections::VecDeque;
use std::ops::Range;
use std::time::Duration;

use super::actions::{Install, Read, Source, Stir, Take, Why};
use super::pace::Leave;
use super::plan::Unit;
use super::sequence::sequence;
use super::units::State;
use super::{Server, Waiting};

/// Readers that read ahead at once: enough that storage never waits for us, and no more, since what the guest waits for
/// waits behind them.
const AHEAD_MAX: u32 = 2;

/// What is to be read ahead.
#[derive(Debug)]
pub(super) struct Ahead {
    units: Vec<Unit>,
    /// Whether each unit is one of them.
    listed: Vec<bool>,
    /// Requests that are still to be made.
    requests: VecDeque<Range<u32>>,
    /// Requests that readers are at.
    running: u32,
    done: usize,
    /// That all are in place has been told.
    pub(super) is_over: bool,
}

impl Ahead {
    pub(super) fn nothing() -> Self {
        Self::of(Vec::new(), 0, 1, 0)
    }

    /// These units of `0..end`, with requests of at most `longest`, while so many others are still `running`.
    fn of(units: Vec<Unit>, end: u32, longest: u32, running: u32) -> Self {
        let mut listed = vec![false; end as usize];
        units.iter().for_each(|unit| listed[unit.index()] = true);
        let numbers: Vec<u32> = units.iter().map(|unit| unit.0).collect();
        let requests = sequence(&numbers, end, longest).into();
        Self { is_over: units.is_empty(), units, listed, requests, running, done: 0 }
    }

    /// Nothing more, beside what is running.
    fn ended(&self) -> Self {
        Self { running: self.running, ..Self::nothing() }
    }

    fn has(&self, unit: Unit) -> bool {
        self.listed.get(unit.index()).copied().unwrap_or(false)
    }
}

impl<B: Clone> Server<B> {
    /// Has these units read as fast as storage allows, roughly in this order, before any background fill.
    /// [`Stir::ahead`] tells when all of them are in place.
    pub fn read_ahead(&mut self, units: Vec<Unit>) -> Stir {
        let longest = self.rules.run_max.max(1);
        self.ahead = Ahead {
            is_over: false,
            ..Ahead::of(units, self.plan.units(), longest, self.ahead.running)
        };
        self.stir(Stir { background: true, ..Stir::default() })
    }

    /// Reads nothing any more that the guest does not wait for.
    pub fn stop_background(&mut self) {
        self.ahead = self.ahead.ended();
        self.rules.fill = false;
    }

    /// Whether all that was to be read ahead is in place.
    pub fn is_ahead_done(&mut self) -> bool {
        while let Some(&unit) = self.ahead.units.get(self.ahead.done) {
            let in_place = match self.units.state(unit) {
                State::Done | State::Failed => true,
                State::Memory { .. } => self.rules.account_use,
                _ => false,
            };
            if !in_place {
                return false;
            }
            self.ahead.done += 1;
        }
        true
    }

    /// Turns the background fill on or off.
    pub fn set_fill(&mut self, fill: bool) -> Stir {
        self.rules.fill = fill;
        self.stir(Stir { background: fill, ..Stir::default() })
    }

    /// What a reader thread reads next. Only one thread at a time should ask with `may_fill`, so that a demand read
    /// never finds all of them busy in the background.
    pub fn take_read(&mut self, now: Duration, may_fill: bool) -> Take {
        if let Some(read) = self.take_asked() {
            return Take::Read(read);
        }
        if self.units.held() >= self.rules.held_max {
            self.wants_room = true;
            return Take::Idle;
        }
        if let Some(read) = self.take_ahead() {
            return Take::Read(read);
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
                let len = match self.rules.may_widen && self.units.held() < self.rules.held_max {
                    true => self.pace.run_on_demand(&self.rules),
                    false => 1,
                };
                let beside = self.start_run(Unit(unit.0 + 1), len - 1);
                return Some(Read { units: unit.0..beside.end, why: Why::Demand });
            }
            self.reads_on_demand -= 1;
        }
        None
    }

    fn take_ahead(&mut self) -> Option<Read> {
        if self.ahead.running >= AHEAD_MAX {
            return None;
        }
        while let Some(request) = self.ahead.requests.pop_front() {
            let mut units = request.clone();
            let stored = units.find(|&unit| self.units.is_stored(Unit(unit)));
            let Some(first) = stored else { continue };
            let run = self.start_run(Unit(first), request.end - first);
            if run.end < request.end {
                self.ahead.requests.push_front(run.end..request.end);
            }
            self.ahead.running += 1;
            return Some(Read { units: run, why: Why::Ahead });
        }
        None
    }

    /// A reader is done with a [`Read`] of so many units, whatever came of it.
    pub fn read_done(&mut self, why: Why, units: u32, took: Duration) {
        if why == Why::Ahead {
            self.ahead.running -= 1;
        }
        self.pace.took(units, took);
    }

    fn take_fill(&mut self, now: Duration) -> Take {
        if self.reads_on_demand > 0 {
            return Take::At(now + self.rules.quiet);
        }
        let Some(first) = self.next_to_fill() else {
            return self.release_spared();
        };
        match self.pace.ask(&self.rules, now) {
            Leave::At(then) => Take::At(then),
            Leave::Read(len) => {
                self.pace.read(now);
                Take::Read(Read { units: self.start_run(first, len), why: Why::Fill })
            }
        }
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

    /// Begins to read up to `len` neighbouring units, as far as nobody has begun with them.
    fn start_run(&mut self, first: Unit, len: u32) -> Range<u32> {
        let end = first.0.saturating_add(len).min(self.plan.units());
        let stored = |unit: &u32| self.units.is_stored(Unit(*unit));
        let run = first.0..first.0 + (first.0..end).take_while(stored).count() as u32;
        run.clone().for_each(|unit| self.units.set(Unit(unit), State::Reading));
        run
    }

    /// With use accounted for, units stay out of the guest's reach until there is nothing else to do.
    fn release_spared(&mut self) -> Take {
        self.rules.account_use = false;
        let spared = std::mem::take(&mut self.spared);
        self.ready.extend(spared);
        Take::Idle
    }

    /// The page cache had this unit of an [`super::Answer::Fetch`]. To be reported before [`Self::installed`].
    pub fn fetched(&mut self, now: Duration, unit: Unit, source: Source<B>) -> Stir {
        self.counts.demand_units += 1;
        self.pace.read(now);
        self.enter_memory(unit, source, Why::Demand, 1)
    }

    /// The page cache did not have the unit of this [`super::Answer::Fetch`]: a reader has to get it.
    pub fn missed(&mut self, install: &Install<()>) -> Stir {
        self.ask_for(install)
    }

    /// The page cache no longer has the unit of an install from [`Source::PageCache`]: a reader has to get it again.
    pub fn lost(&mut self, install: &Install<B>) -> Stir {
        self.ask_for(install)
    }

    fn ask_for<S>(&mut self, install: &Install<S>) -> Stir {
        let (unit, block) = (install.unit, install.block);
        self.let_go(block);
        let page = install.wanted.unwrap_or(self.block_size.first_page(block));
        let waiting = Waiting { unit, block, page };
        match self.units.state(unit) {
            // All its pages were given back in the meantime.
            State::Done => self.urgent.push_back(waiting),
            State::Reading | State::Asked => self.waiting.push(waiting),
            _ => {
                self.watch_divergence(unit);
                self.units.set(unit, State::Asked);
                self.asked.push_back(unit);
                self.reads_on_demand += 1;
                self.waiting.push(waiting);
            }
        }
        let workers = !self.urgent.is_empty();
        self.stir(Stir { demand: true, workers, ..Stir::default() })
    }

    /// The guest waits for storage.
    fn watch_divergence(&mut self, unit: Unit) {
        let is_expected = self.ahead.has(unit);
        if self.rules.may_diverge && !self.ahead.is_over && self.divergence.read(is_expected) {
            self.ahead = self.ahead.ended();
            self.counts.diverged = true;
        }
    }

    /// A unit was read.
    pub fn arrived(&mut self, now: Duration, unit: Unit, source: Source<B>, why: Why) -> Stir {
        self.pace.read(now);
        self.count_read(why);
        self.enter_memory(unit, source, why, 0)
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
        self.units.set(unit, State::Memory { source, why, next: 0 });
        let waited = self.urge(unit);
        if self.rules.account_use && why != Why::Fill {
            self.spare(unit, asked + waited);
        } else if self.plan.members(unit).len() > 1 || asked + waited == 0 {
            self.ready.push_back(unit);
        }
        self.stir(Stir { workers: !self.ready.is_empty(), ..Stir::default() })
    }

    /// Whether the bytes of a unit may stay in memory. While it is read it counts as held already.
    fn has_room_for(&self, unit: Unit) -> bool {
        let counted = u32::from(matches!(self.units.state(unit), State::Reading));
        self.units.held() - counted < self.rules.held_max
    }

    /// Puts the blocks of a unit that the guest waits for first. How many pages these are.
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

    /// A unit can't be read: its pages are never installed.
    pub fn failed(&mut self, unit: Unit, why: Why) {
        if why == Why::Demand {
            self.reads_on_demand = self.reads_on_demand.saturating_sub(1);
        }
        self.units.set(unit, State::Failed);
    }
}
