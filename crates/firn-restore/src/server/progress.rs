//! Installs and their completion: what is installed next, and what is complete.

use std::ops::Range;
use std::time::Duration;

use firn_types::{Block, Page};

use super::actions::{Install, Stir, Why, Work};
use super::plan::Unit;
use super::units::State;
use super::{PageMask, Server, Waiting};

impl<B: Clone> Server<B> {
    /// The next install that a vCPU waits for and whose unit is in memory by now.
    pub fn take_urgent(&mut self) -> Option<Work<B>> {
        while let Some(waiting) = self.urgent.pop_front() {
            if self.settled.contains(waiting.page) {
                // Perhaps the guest gave it back; its neighbours it did not, and they may depend on
                // this install.
                let _ = self.go_back_to(waiting.unit);
                return Some(Work::Late(waiting.page));
            }
            if self.retries.request(waiting.block, waiting.page) {
                continue;
            }
            match self.units.state(waiting.unit) {
                State::Memory { source, .. } => {
                    let (source, Waiting { unit, block, page }) = (source.clone(), waiting);
                    return Some(Work::Install(self.install(unit, block, page, source)));
                }
                // The unit is not in the page cache any more, and is read again.
                State::Trying | State::Asked | State::Reading | State::Failed => {
                    self.waiting.push(waiting);
                }
                State::Stored | State::Done => {}
            }
        }
        None
    }

    /// What a worker installs next: pages that vCPUs wait for, then the other blocks of the units
    /// in memory. `None` if there is nothing, or if workers would disturb the guest (see
    /// [`Self::may_install`]).
    pub fn take_install(&mut self, now: Duration) -> Option<Work<B>> {
        if let Some(work) = self.take_urgent() {
            return Some(work);
        }
        while self.may_install(now) {
            let unit = *self.ready.front()?;
            if let Some(install) = self.next_of(unit) {
                self.rest.install(now);
                return Some(Work::Install(install));
            }
            self.ready.pop_front();
        }
        None
    }

    /// The next block of a unit in memory that is neither installed nor taken by a thread.
    fn next_of(&mut self, unit: Unit) -> Option<Install<B>> {
        let State::Memory { source, next, .. } = self.units.state(unit) else { return None };
        let (source, from) = (source.clone(), *next as usize);
        let members = &self.plan.members(unit)[from..];
        let is_open =
            |block: Block| !self.is_taken(block) && !self.settled.missing(block).is_empty();
        let at = members.iter().position(|&block| is_open(block))?;
        let block = members[at];
        *self.units.cursor(unit)? = (from + at + 1) as u32;
        self.take(block);
        let pages = self.settled.missing(block);
        Some(Install { block, unit, pages, source, wanted: None, version: self.version })
    }

    /// A fault was answered: the vCPU continues.
    pub fn answered(&mut self, now: Duration) {
        self.rest.fault(now);
    }

    /// Whether workers have something to install, now or later.
    pub fn has_installs(&self) -> bool {
        !self.urgent.is_empty() || !self.ready.is_empty()
    }

    /// Whether workers may install it now.
    pub fn may_install(&self, now: Duration) -> bool {
        !self.urgent.is_empty() || (!self.ready.is_empty() && self.rest.is_open(now))
    }

    /// The pages of this install are installed.
    pub fn installed<S>(&mut self, install: &Install<S>) -> Stir {
        let block = install.block;
        self.let_go(block);
        let new = self.settled.missing(block).and(install.pages);
        self.count_installed(install.unit, new, install.wanted.is_some());
        let stir = self.settle(block, new);
        match self.settled.missing(block).is_empty() {
            true => stir,
            false => stir.or(self.go_back_to(install.unit)),
        }
    }

    /// Some pages of a block were installed and others not: workers that have passed it must return
    /// to it.
    pub(super) fn go_back_to(&mut self, unit: Unit) -> Stir {
        if self.rules.account_use && !self.is_fill(unit) {
            return Stir::default();
        }
        let Some(next) = self.units.cursor(unit) else { return Stir::default() };
        *next = 0;
        self.ready.push_back(unit);
        Stir { workers: true, ..Stir::default() }
    }

    fn count_installed(&mut self, unit: Unit, pages: PageMask, demand: bool) {
        let asked = u64::from(demand && !pages.is_empty());
        let beside = u64::from(pages.count()) - asked;
        self.counts.on_demand_pages += asked;
        match self.units.state(unit) {
            State::Memory { why: Why::Ahead, .. } => self.counts.ahead_pages += beside,
            State::Memory { why: Why::Fill, .. } => self.counts.fill_pages += beside,
            _ => self.counts.beside_pages += beside,
        }
    }

    fn settle(&mut self, block: Block, pages: PageMask) -> Stir {
        if pages.is_empty() {
            return Stir::default();
        }
        self.settled.insert_in(block, pages);
        self.retries.remove_settled(block, &self.settled);
        let complete = self.settled.missing(block).is_empty();
        let unit = self.plan.unit_of(block);
        let is_ahead =
            |unit| matches!(self.units.state(unit), State::Memory { why: Why::Ahead, .. });
        if unit.is_some_and(is_ahead) {
            self.prefetched.push(block);
        }
        self.missing_pages -= unit.map_or(0, |_| pages.count());
        let was_stored = unit.filter(|&unit| self.units.is_stored(unit));
        match unit {
            Some(unit) if complete && self.units.block_complete(unit) => {
                was_stored.into_iter().for_each(|unit| self.ahead.begun(unit));
                self.retries.remove_unit(unit);
                let background = std::mem::take(&mut self.wants_room);
                self.stir(Stir { background, ..Stir::default() })
            }
            _ => Stir::default(),
        }
    }

    /// The guest gave these pages back: from now on they are zeros.
    pub fn removed(&mut self, pages: Range<Page>) -> Stir {
        self.version = self.version.wrapping_add(1);
        let first = self.block_size.block_of(pages.start).0;
        let end = self.block_size.blocks_in(pages.end.0).min(self.plan.blocks());
        let mut stir = Stir::default();
        self.answer_waiting_for(&pages);
        let requested = self.retries.take_requested(&pages).into_iter();
        self.urgent.extend(requested.map(|(unit, block, page)| Waiting { unit, block, page }));
        for block in (first..end).map(Block) {
            let new = self.settled.missing(block).and(self.mask_of(block, &pages));
            self.counts.removed_pages += u64::from(new.count());
            stir = stir.or(self.settle(block, new));
        }
        stir.or(Stir { workers: !self.urgent.is_empty(), ..Stir::default() })
    }

    /// The pages of a range that are in a block.
    fn mask_of(&self, block: Block, pages: &Range<Page>) -> PageMask {
        let of_block = self.block_size.pages_of(block);
        let start = of_block.start.max(pages.start).0;
        let end = of_block.end.min(pages.end).0;
        let bits = (1u32 << end.saturating_sub(start)) - 1;
        PageMask((bits << (start - of_block.start.0).min(16)) as u16)
    }

    /// A vCPU that waits for a page that was given back waits for zeros now.
    fn answer_waiting_for(&mut self, pages: &Range<Page>) {
        self.waiting.retain(|waiting| {
            let is_removed = pages.contains(&waiting.page);
            if is_removed {
                self.urgent.push_back(*waiting);
            }
            !is_removed
        });
    }

    /// Adds the wakeups that any event may cause.
    pub(super) fn stir(&mut self, stir: Stir) -> Stir {
        let ahead = !self.ahead.is_over && self.is_ahead_done();
        self.ahead.is_over |= ahead;
        Stir { ahead, finished: self.is_finished(), ..stir }
    }
}

impl Stir {
    /// The wakeups of both.
    pub fn or(self, other: Self) -> Self {
        Self {
            demand: self.demand || other.demand,
            background: self.background || other.background,
            workers: self.workers || other.workers,
            ahead: self.ahead || other.ahead,
            finished: self.finished || other.finished,
        }
    }
}
