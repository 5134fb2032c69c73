//! Installs and their completion: what is installed next, and what is complete.

use std::ops::Range;
use std::time::Duration;

use firn_types::{Block, Page};

use super::actions::{BlockInstall, InstallWork, ReadReason, ThreadWakeups};
use super::plan::ReadUnit;
use super::units::UnitState;
use super::{PageMask, PageServer, WaitingFault};

impl<B: Clone> PageServer<B> {
    /// The next install that a vCPU waits for and whose unit is in memory by now.
    pub fn take_urgent(&mut self) -> Option<InstallWork<B>> {
        while let Some(waiting) = self.urgent.pop_front() {
            if self.settled.contains(waiting.page) {
                // Perhaps the guest gave it back; its neighbours it did not, and they may depend on
                // this install.
                let _ = self.rescan_unit(waiting.unit);
                return Some(InstallWork::AlreadySettled(waiting.page));
            }
            if self.retries.request_page(waiting.block, waiting.page) {
                continue;
            }
            match self.units.state_of(waiting.unit) {
                UnitState::Memory { source, .. } => {
                    let (source, WaitingFault { unit, block, page }) = (source.clone(), waiting);
                    return Some(InstallWork::Install(
                        self.start_install(unit, block, page, source),
                    ));
                }
                // The unit is not in the page cache any more, and is read again.
                UnitState::Trying | UnitState::Asked | UnitState::Reading | UnitState::Failed => {
                    self.waiting.push(waiting);
                }
                UnitState::Stored | UnitState::Done => {}
            }
        }
        None
    }

    /// What a worker installs next: pages that vCPUs wait for, then the other blocks of the units
    /// in memory. `None` if there is nothing, or if workers would disturb the guest (see
    /// [`Self::may_install`]).
    pub fn take_install(&mut self, now: Duration) -> Option<InstallWork<B>> {
        if let Some(work) = self.take_urgent() {
            return Some(work);
        }
        while self.may_install(now) {
            let unit = *self.ready.front()?;
            if let Some(install) = self.next_install_in(unit) {
                self.install_throttle.record_install(now);
                return Some(InstallWork::Install(install));
            }
            self.ready.pop_front();
        }
        None
    }

    /// The next block of a unit in memory that is neither installed nor taken by a thread.
    fn next_install_in(&mut self, unit: ReadUnit) -> Option<BlockInstall<B>> {
        let UnitState::Memory { source, next, .. } = self.units.state_of(unit) else { return None };
        let (source, from) = (source.clone(), *next as usize);
        let members = &self.plan.members(unit)[from..];
        let is_open =
            |block: Block| !self.is_claimed(block) && !self.settled.missing_in(block).is_empty();
        let at = members.iter().position(|&block| is_open(block))?;
        let block = members[at];
        *self.units.install_cursor(unit)? = (from + at + 1) as u32;
        self.claim_block(block);
        let pages = self.settled.missing_in(block);
        Some(BlockInstall { block, unit, pages, source, wanted: None, version: self.version })
    }

    /// A fault was answered: the vCPU continues.
    pub fn record_answer(&mut self, now: Duration) {
        self.install_throttle.record_fault(now);
    }

    /// Whether workers have something to install, now or later.
    pub fn has_installs(&self) -> bool {
        !self.urgent.is_empty() || !self.ready.is_empty()
    }

    /// Whether workers may install it now.
    pub fn may_install(&self, now: Duration) -> bool {
        !self.urgent.is_empty() || (!self.ready.is_empty() && self.install_throttle.is_open(now))
    }

    /// The pages of this install are installed.
    pub fn record_install<S>(&mut self, install: &BlockInstall<S>) -> ThreadWakeups {
        let block = install.block;
        self.release_block(block);
        let new = self.settled.missing_in(block).and(install.pages);
        self.count_installed(install.unit, new, install.wanted.is_some());
        let stir = self.settle_pages(block, new);
        match self.settled.missing_in(block).is_empty() {
            true => stir,
            false => stir.merge_with(self.rescan_unit(install.unit)),
        }
    }

    /// Some pages of a block were installed and others not: workers that have passed it must return
    /// to it.
    pub(super) fn rescan_unit(&mut self, unit: ReadUnit) -> ThreadWakeups {
        if self.rules.account_use && !self.is_fill(unit) {
            return ThreadWakeups::default();
        }
        let Some(next) = self.units.install_cursor(unit) else { return ThreadWakeups::default() };
        *next = 0;
        self.ready.push_back(unit);
        ThreadWakeups { workers: true, ..ThreadWakeups::default() }
    }

    fn count_installed(&mut self, unit: ReadUnit, pages: PageMask, demand: bool) {
        let asked = u64::from(demand && !pages.is_empty());
        let beside = u64::from(pages.count()) - asked;
        self.counts.on_demand_pages += asked;
        match self.units.state_of(unit) {
            UnitState::Memory { why: ReadReason::Ahead, .. } => self.counts.ahead_pages += beside,
            UnitState::Memory { why: ReadReason::Fill, .. } => self.counts.fill_pages += beside,
            _ => self.counts.beside_pages += beside,
        }
    }

    fn settle_pages(&mut self, block: Block, pages: PageMask) -> ThreadWakeups {
        if pages.is_empty() {
            return ThreadWakeups::default();
        }
        self.settled.insert_in(block, pages);
        self.retries.remove_settled(block, &self.settled);
        let complete = self.settled.missing_in(block).is_empty();
        let unit = self.plan.unit_of(block);
        let is_ahead = |unit| {
            matches!(self.units.state_of(unit), UnitState::Memory { why: ReadReason::Ahead, .. })
        };
        if unit.is_some_and(is_ahead) {
            self.prefetched.push(block);
        }
        self.missing_pages -= unit.map_or(0, |_| pages.count());
        let was_stored = unit.filter(|&unit| self.units.is_stored(unit));
        match unit {
            Some(unit) if complete && self.units.complete_block(unit) => {
                was_stored.into_iter().for_each(|unit| self.prefetch.record_start(unit));
                self.retries.remove_unit(unit);
                let background = std::mem::take(&mut self.wants_room);
                self.complete_wakeups(ThreadWakeups { background, ..ThreadWakeups::default() })
            }
            _ => ThreadWakeups::default(),
        }
    }

    /// The guest gave these pages back: from now on they are zeros.
    pub fn record_removal(&mut self, pages: Range<Page>) -> ThreadWakeups {
        self.version = self.version.wrapping_add(1);
        let before = self.missing_pages_in(&pages);
        self.counts.removed_pages += before;
        self.settle_range(pages)
    }

    /// Another process has put these pages into the guest's memory.
    pub fn record_present(&mut self, pages: Range<Page>) -> ThreadWakeups {
        self.settle_range(pages)
    }

    /// The blocks of a range of pages.
    fn blocks_of(&self, pages: &Range<Page>) -> impl Iterator<Item = Block> + use<B> {
        let first = self.block_size.block_of(pages.start).0;
        let end = self.block_size.blocks_in(pages.end.0).min(self.plan.block_count());
        (first..end).map(Block)
    }

    fn missing_pages_in(&self, pages: &Range<Page>) -> u64 {
        let missing = |block| self.settled.missing_in(block).and(self.mask_in_block(block, pages));
        self.blocks_of(pages).map(|block| u64::from(missing(block).count())).sum()
    }

    /// These pages do not come from the image any more.
    fn settle_range(&mut self, pages: Range<Page>) -> ThreadWakeups {
        let mut stir = ThreadWakeups::default();
        self.answer_waiting_for(&pages);
        let requested = self.retries.take_requested(&pages).into_iter();
        self.urgent.extend(requested.map(|(unit, block, page)| WaitingFault { unit, block, page }));
        for block in self.blocks_of(&pages) {
            let new = self.settled.missing_in(block).and(self.mask_in_block(block, &pages));
            stir = stir.merge_with(self.settle_pages(block, new));
        }
        stir.merge_with(ThreadWakeups {
            workers: !self.urgent.is_empty(),
            ..ThreadWakeups::default()
        })
    }

    /// The pages of a range that are in a block.
    fn mask_in_block(&self, block: Block, pages: &Range<Page>) -> PageMask {
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
    pub(super) fn complete_wakeups(&mut self, stir: ThreadWakeups) -> ThreadWakeups {
        let ahead = !self.prefetch.is_over && self.is_prefetch_done();
        self.prefetch.is_over |= ahead;
        ThreadWakeups { ahead, finished: self.is_finished(), ..stir }
    }
}

impl ThreadWakeups {
    /// The wakeups of both.
    pub fn merge_with(self, other: Self) -> Self {
        Self {
            demand: self.demand || other.demand,
            background: self.background || other.background,
            workers: self.workers || other.workers,
            ahead: self.ahead || other.ahead,
            finished: self.finished || other.finished,
        }
    }
}
