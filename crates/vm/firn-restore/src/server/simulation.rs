//! Simulation: runs the page server under the interleavings that seeds make, and compares with a
//! map of what each page must contain.
//!
//! Guest threads touch pages and give pages back; a fault handler, readers and workers each act one
//! step at a time, in an order drawn from the seed; the page cache evicts units at random. Checked
//! in every step: a guest thread sees the right contents, nothing is read twice while it is in
//! memory or being read, memory use stays bounded. In some runs storage fails for a while, and
//! memory blocks are damaged for a while; then it is checked that all that failed is scheduled to
//! be tried again, and that each unit that is being read has a reader. At the end no thread waits,
//! and no page is missing.

use std::collections::VecDeque;
use std::ops::Range;
use std::rc::{Rc, Weak};
use std::time::Duration;

use firn_types::{Block, BlockSize, Page, RegionMap};
use proptest::prelude::*;

use super::fill_throttle::REST_MAX;
use super::*;

/// Stands for the bytes of a unit in memory.
type SimulatedBytes = Rc<ReadUnit>;

const READERS: usize = 3;
const WORKERS: usize = 2;
/// After this number of steps storage is repaired, and stays so.
const REPAIRED: u32 = 20_000;

/// A small generator: the same seed gives the same run.
struct SeededRandom(u64);

impl SeededRandom {
    fn roll(&mut self, sides: u32) -> u32 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        ((self.0 >> 33) % u64::from(sides.max(1))) as u32
    }

    fn chance(&mut self, percent: u32) -> bool {
        self.roll(100) < percent
    }
}

#[derive(Clone, Copy, PartialEq, Debug)]
enum PageContent {
    Image,
    Zero,
}

/// The state of a guest thread.
enum GuestThread {
    Runs,
    Waits(Page),
    /// Has given pages back, and waits for the handler to read the event.
    GivesBack(Range<Page>),
    /// The handler has read it.
    Punches(Range<Page>),
}

enum GuestEvent {
    Fault(Page),
    Removed(Range<Page>),
}

#[derive(Clone)]
enum HandlerStep {
    Idle,
    Has(FaultAnswer<SimulatedBytes>),
}

#[derive(Clone)]
enum ReaderStep {
    Idle,
    Reads(UnitRead, Duration),
    /// Installs a block again that could not be installed.
    Retries(InstallWork<SimulatedBytes>),
    Serves,
}

struct SimulatedRestore {
    dice: SeededRandom,
    now: Duration,
    server: PageServer<SimulatedBytes>,
    rules: PageServerRules,
    must_hold: Vec<PageContent>,
    in_between: Vec<bool>,
    present: Vec<Option<PageContent>>,
    guests: Vec<GuestThread>,
    touches_left: u32,
    events: VecDeque<GuestEvent>,
    handler: HandlerStep,
    readers: Vec<ReaderStep>,
    workers: Vec<Option<InstallWork<SimulatedBytes>>>,
    cached: Vec<bool>,
    may_read: Vec<bool>,
    bytes: Vec<Weak<ReadUnit>>,
    pages: u32,
    finished: bool,
    /// Whether storage fails now and then.
    is_flaky: bool,
    /// Whether it ever did.
    has_been_flaky: bool,
    /// Every read fails.
    is_down: bool,
    /// The memory blocks whose stored bytes are damaged.
    damaged: Vec<Block>,
}

fn plan_of(dice: &mut SeededRandom, blocks: u32, lazy: bool) -> ReadPlan {
    let mut stored: Vec<Block> = (0..blocks).filter(|_| dice.chance(70)).map(Block).collect();
    let mut plan = ReadPlan::new(blocks);
    if lazy {
        stored.into_iter().for_each(|block| {
            plan.push_unit([block]);
        });
        return plan;
    }
    for at in (1..stored.len()).rev() {
        stored.swap(at, dice.roll(at as u32 + 1) as usize);
    }
    while !stored.is_empty() {
        let len = (1 + dice.roll(12) as usize).min(stored.len());
        plan.push_unit(stored.drain(..len));
    }
    plan
}

impl SimulatedRestore {
    fn new(seed: u64) -> Self {
        let mut dice = SeededRandom(seed | 1);
        let pages = 40 + dice.roll(300);
        let block_size = BlockSize::new(1 << dice.roll(5)).unwrap();
        let ram = RegionMap::lay_out([("ram", u64::from(pages) * 4096)]).unwrap();
        let lazy = dice.chance(20);
        let plan = plan_of(&mut dice, block_size.blocks_in(pages), lazy);
        let rules = PageServerRules {
            run_max: 1 + dice.roll(8),
            known_latency: (dice.roll(4) == 0).then_some(Duration::from_millis(10)),
            is_adaptive: dice.roll(2) == 0,
            guest_runs: dice.roll(2) == 0,
            may_read_all: dice.roll(2) == 0,
            held_max: 1 + dice.roll(6),
            account_use: dice.chance(25),
            retry_min: Duration::from_millis(1),
            retry_requested_max: Duration::from_millis(4),
            retry_max: Duration::from_millis(8),
            ..PageServerRules::default()
        };
        let units = plan.unit_count() as usize;
        let content = |page| match plan.unit_of(block_size.block_of(Page(page))) {
            Some(_) => PageContent::Image,
            None => PageContent::Zero,
        };
        let must_hold = (0..pages).map(content).collect();
        let settled = SettledPages::new(&ram, block_size);
        let warm = dice.roll(101);
        Self {
            must_hold,
            in_between: vec![false; pages as usize],
            present: vec![None; pages as usize],
            guests: (0..1 + dice.roll(4)).map(|_| GuestThread::Runs).collect(),
            touches_left: dice.roll(600),
            events: VecDeque::new(),
            handler: HandlerStep::Idle,
            readers: vec![ReaderStep::Idle; READERS],
            workers: vec![None; WORKERS],
            cached: (0..units).map(|_| dice.chance(warm)).collect(),
            may_read: vec![true; units],
            bytes: Vec::new(),
            server: PageServer::new(block_size, plan, settled, rules, Duration::ZERO),
            rules,
            dice,
            now: Duration::ZERO,
            pages,
            finished: false,
            is_flaky: false,
            has_been_flaky: false,
            is_down: false,
            damaged: Vec::new(),
        }
    }

    fn note(&mut self, stir: ThreadWakeups) {
        self.finished |= stir.finished;
    }

    /// One step of one thread.
    fn step(&mut self) {
        self.now += Duration::from_micros(u64::from(self.dice.roll(400)));
        match self.dice.roll(8) {
            0 | 1 => self.step_guest(),
            2 | 3 => self.step_handler(),
            4 | 5 => self.step_reader(),
            6 => self.step_worker(),
            _ => self.forget(),
        }
        self.check_memory();
        if self.is_flaky {
            self.break_or_repair();
        }
        if self.has_been_flaky {
            self.check_schedule();
        }
    }

    /// Nothing that failed is lost, and no unit waits for a thread that does not exist.
    fn check_schedule(&self) {
        let readers = self.readers.iter();
        self.server
            .check_schedule(readers.filter(|it| matches!(it, ReaderStep::Retries(_))).count());
        let is_read = |unit| {
            self.readers
                .iter()
                .any(|it| matches!(it, ReaderStep::Reads(read, _) if read.units.contains(&unit)))
        };
        for unit in 0..self.server.plan.unit_count() {
            let state = self.server.units.state_of(ReadUnit(unit));
            assert!(
                !matches!(state, UnitState::Reading) || is_read(unit),
                "no reader reads {unit}"
            );
        }
    }

    fn break_or_repair(&mut self) {
        match self.dice.roll(600) {
            0 => self.is_down = !self.is_down,
            1 => self.damaged.push(Block(self.dice.roll(self.server.plan.block_count()))),
            2 => self.damaged.clear(),
            _ => {}
        }
    }

    fn repair(&mut self) {
        (self.is_flaky, self.is_down) = (false, false);
        self.damaged.clear();
    }

    fn forget(&mut self) {
        if self.dice.chance(3) {
            let unit = self.dice.roll(self.cached.len() as u32) as usize;
            if let Some(cached) = self.cached.get_mut(unit) {
                self.may_read[unit] |= std::mem::take(cached);
            }
        }
    }

    fn check_memory(&mut self) {
        self.bytes.retain(|bytes| bytes.strong_count() > 0);
        let in_flight = READERS as u32 * self.rules.run_max + WORKERS as u32 + 1;
        assert!(self.bytes.len() as u32 <= self.rules.held_max + in_flight);
    }

    fn step_guest(&mut self) {
        let which = self.dice.roll(self.guests.len() as u32) as usize;
        match std::mem::replace(&mut self.guests[which], GuestThread::Runs) {
            GuestThread::Runs if self.touches_left > 0 => {
                self.touches_left -= 1;
                self.guests[which] = match self.dice.chance(4) {
                    true => self.give_back(),
                    false => self.touch(),
                };
            }
            GuestThread::Punches(range) => self.punch(range),
            other => self.guests[which] = other,
        }
    }

    fn touch(&mut self) -> GuestThread {
        let page = Page(self.dice.roll(self.pages));
        match self.present[page.index()] {
            Some(content) => {
                let right = content == self.must_hold[page.index()];
                assert!(right || self.in_between[page.index()], "{page} holds {content:?}");
                GuestThread::Runs
            }
            None => {
                self.events.push_back(GuestEvent::Fault(page));
                GuestThread::Waits(page)
            }
        }
    }

    fn give_back(&mut self) -> GuestThread {
        let start = self.dice.roll(self.pages);
        let end = (start + 1 + self.dice.roll(20)).min(self.pages);
        let range = Page(start)..Page(end);
        self.events.push_back(GuestEvent::Removed(range.clone()));
        GuestThread::GivesBack(range)
    }

    /// The kernel removes the pages at last; until then a guest that touched them might have seen
    /// either content.
    fn punch(&mut self, range: Range<Page>) {
        for page in Page::iter_range(range) {
            self.present[page.index()] = None;
            self.must_hold[page.index()] = PageContent::Zero;
            self.in_between[page.index()] = false;
        }
    }

    fn step_handler(&mut self) {
        match std::mem::replace(&mut self.handler, HandlerStep::Idle) {
            HandlerStep::Has(answer) => self.answer(answer),
            HandlerStep::Idle => match self.events.pop_front() {
                Some(GuestEvent::Fault(page)) => {
                    let answer = self.server.answer_fault(self.now, page);
                    self.handler = HandlerStep::Has(answer);
                }
                Some(GuestEvent::Removed(range)) => self.read_removal(range),
                None => {}
            },
        }
    }

    fn read_removal(&mut self, range: Range<Page>) {
        let stir = self.server.record_removal(range.clone());
        self.note(stir);
        Page::iter_range(range.clone()).for_each(|page| self.in_between[page.index()] = true);
        let is_it =
            |guest: &&mut GuestThread| matches!(guest, GuestThread::GivesBack(it) if *it == range);
        let guest = self.guests.iter_mut().find(is_it).unwrap();
        *guest = GuestThread::Punches(range);
    }

    fn answer(&mut self, answer: FaultAnswer<SimulatedBytes>) {
        match answer {
            FaultAnswer::Zero(range) => self.zero(range),
            FaultAnswer::AlreadySettled(page) => self.zero(page..Page(page.0 + 1)),
            FaultAnswer::Install(install) if install.source == UnitSource::PageCache => {
                match self.cached[install.unit.index()] {
                    true => self.put(&install),
                    false => {
                        let stir = self.server.record_cache_loss(&install);
                        self.note(stir);
                    }
                }
            }
            FaultAnswer::Install(install) => self.put(&install),
            FaultAnswer::TryPageCache(install) => self.fetch(&install),
            FaultAnswer::RequestRead(install) => {
                let stir = self.server.record_cache_miss(&install);
                self.note(stir);
            }
            FaultAnswer::Wait => {}
        }
    }

    fn fetch(&mut self, install: &BlockInstall<()>) {
        if !self.cached[install.unit.index()] {
            let stir = self.server.record_cache_miss(install);
            return self.note(stir);
        }
        if self.damaged.contains(&install.block) {
            let stir = self.server.set_aside(self.now, install);
            return self.note(stir);
        }
        let source = match self.dice.chance(50) && !self.rules.account_use {
            true => UnitSource::Held(self.bytes_of(install.unit)),
            false => UnitSource::PageCache,
        };
        let stir = self.server.record_cache_hit(install.unit, source);
        self.note(stir);
        self.put(install);
    }

    fn bytes_of(&mut self, unit: ReadUnit) -> SimulatedBytes {
        let bytes = Rc::new(unit);
        self.bytes.push(Rc::downgrade(&bytes));
        bytes
    }

    fn put<S>(&mut self, install: &BlockInstall<S>) {
        if self.damaged.contains(&install.block) {
            let stir = self.server.set_aside(self.now, install);
            return self.note(stir);
        }
        let mut pages = install.pages;
        if install.version != self.server.version() {
            pages = pages.and(self.server.missing_in(install.block));
        }
        let first = self.server.block_size.first_page(install.block).0;
        for bit in (0..16).filter(|bit| install.pages.0 >> bit & 1 == 1) {
            let page = Page(first + bit);
            match pages.0 >> bit & 1 {
                1 => self.copy(page, PageContent::Image),
                _ => self.copy(page, PageContent::Zero),
            }
        }
        let stir = self.server.record_install(install);
        self.note(stir);
    }

    fn zero(&mut self, range: Range<Page>) {
        Page::iter_range(range).for_each(|page| self.copy(page, PageContent::Zero));
    }

    /// Like the kernel: does not change a page that is present, and wakes its waiters in either
    /// case.
    fn copy(&mut self, page: Page, content: PageContent) {
        self.present[page.index()].get_or_insert(content);
        for guest in &mut self.guests {
            if matches!(guest, GuestThread::Waits(it) if *it == page) {
                *guest = GuestThread::Runs;
            }
        }
    }

    fn step_reader(&mut self) {
        let which = self.dice.roll(READERS as u32) as usize;
        let next = match self.readers[which].clone() {
            ReaderStep::Idle => self.take_read(which == 0),
            ReaderStep::Reads(read, until) if until <= self.now => self.arrive(read),
            ReaderStep::Retries(work) => {
                self.work(work);
                ReaderStep::Serves
            }
            ReaderStep::Serves => self.serve(),
            reading => reading,
        };
        self.readers[which] = next;
    }

    fn take_read(&mut self, may_fill: bool) -> ReaderStep {
        if let Some(work) = self.server.take_retry(self.now) {
            return ReaderStep::Retries(work);
        }
        let is_open = |unit| {
            matches!(
                self.server.units.state_of(ReadUnit(unit)),
                UnitState::Stored | UnitState::Asked
            )
        };
        let open: Vec<bool> = (0..self.server.plan.unit_count()).map(is_open).collect();
        match self.server.take_read(self.now, may_fill) {
            ReadDecision::Read(read) => {
                for unit in read.units.clone() {
                    if !open[unit as usize] && self.server.cost.is_high_latency() {
                        continue;
                    }
                    let first = std::mem::replace(&mut self.may_read[unit as usize], false);
                    assert!(first, "unit {unit} was read twice");
                }
                let takes = Duration::from_micros(u64::from(self.dice.roll(8000)));
                ReaderStep::Reads(read, self.now + takes)
            }
            ReadDecision::At(then) => {
                assert!(then <= self.now + REST_MAX.max(self.rules.retry_max));
                ReaderStep::Idle
            }
            ReadDecision::Idle => ReaderStep::Idle,
        }
    }

    /// The units are read one by one, and some reads succeed.
    fn fail(&mut self, read: &UnitRead) -> ReaderStep {
        for (unit, why) in read.units_with_reasons() {
            if why != ReadReason::Demand && !self.server.is_wanted(unit) {
                continue;
            }
            if self.dice.chance(20) {
                self.arrive_one(unit, why);
            } else if self.server.record_failed_read(self.now, unit, why) {
                self.may_read[unit.index()] = true;
            }
        }
        self.server.finish_read(read.why, self.now);
        ReaderStep::Serves
    }

    fn arrive(&mut self, read: UnitRead) -> ReaderStep {
        if self.is_down {
            return self.fail(&read);
        }
        let began = self.now.saturating_sub(Duration::from_micros(u64::from(self.dice.roll(8000))));
        if self.dice.chance(50) {
            self.server.record_storage_access();
        }
        self.server.record_read_time(&read, 0, began, self.now);
        self.server.finish_read(read.why, self.now);
        read.units_with_reasons().for_each(|(unit, why)| self.arrive_one(unit, why));
        ReaderStep::Serves
    }

    fn arrive_one(&mut self, unit: ReadUnit, why: ReadReason) {
        self.cached[unit.index()] = true;
        let source = match self.rules.account_use {
            true => UnitSource::PageCache,
            false => UnitSource::Held(self.bytes_of(unit)),
        };
        let stir = self.server.record_arrival(self.now, unit, source, why);
        self.note(stir);
    }

    fn serve(&mut self) -> ReaderStep {
        let Some(work) = self.server.take_urgent() else { return ReaderStep::Idle };
        self.work(work);
        ReaderStep::Serves
    }

    fn work(&mut self, work: InstallWork<SimulatedBytes>) {
        match work {
            InstallWork::AlreadySettled(page) => self.zero(page..Page(page.0 + 1)),
            InstallWork::Install(install) => self.put(&install),
        }
    }

    fn step_worker(&mut self) {
        let which = self.dice.roll(WORKERS as u32) as usize;
        match self.workers[which].take() {
            Some(work) => self.work(work),
            None => self.workers[which] = self.server.take_install(self.now),
        }
    }

    fn is_over(&self) -> bool {
        let idle = self.guests.iter().all(|guest| matches!(guest, GuestThread::Runs));
        idle && self.touches_left == 0 && self.finished
    }

    fn check_end(&mut self) {
        assert!(self.server.is_finished());
        assert_eq!(self.server.failed_request(), None);
        assert!(!self.server.has_failed());
        for (page, (present, must)) in self.present.iter().zip(&self.must_hold).enumerate() {
            // What is a hole now reads as zeros once the range is unregistered.
            assert_eq!(present.unwrap_or(PageContent::Zero), *must, "page {page} at the end");
        }
        let counts = *self.server.counts();
        let used = counts.prefetched_used_pages;
        assert!(used <= counts.prefetched_pages + counts.faults, "{counts:?}");
    }
}

/// Reports reads that took long.
fn seem_far(server: &mut PageServer<SimulatedBytes>) {
    let at = |read| Duration::from_millis(20) * read;
    let read = UnitRead { units: 0..1, why: ReadReason::Fill, in_order: false };
    (0..12).for_each(|n| server.record_read_time(&read, 0, at(n), at(n + 1)));
    assert!(server.cost.is_high_latency());
}

fn run(seed: u64) {
    let mut world = SimulatedRestore::new(seed);
    if world.dice.chance(30) {
        let share = world.dice.roll(101);
        let all: Vec<ReadUnit> = (0..world.server.plan.unit_count()).map(ReadUnit).collect();
        let units = all.into_iter().filter(|_| world.dice.chance(share)).collect();
        let stir = world.server.prefetch_units(units);
        world.note(stir);
    }
    if world.dice.chance(30) {
        seem_far(&mut world.server);
    }
    world.is_flaky = world.dice.chance(50);
    world.has_been_flaky = world.is_flaky;
    world.finished |= world.server.is_finished();
    let mut steps = 0u32;
    while !world.is_over() {
        world.step();
        steps += 1;
        if steps == REPAIRED {
            world.repair();
        }
        assert!(steps < 1_000_000, "no end: {:?}", world.server);
    }
    world.check_end();
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(3000))]

    #[test]
    fn every_page_is_right_in_any_order(seed in any::<u64>()) {
        run(seed);
    }
}

#[test]
fn a_guest_that_only_touches_zeros_does_not_stop_the_fill() {
    let ram = RegionMap::lay_out([("ram", 4096 * 64)]).unwrap();
    let block_size = BlockSize::default();
    let mut plan = ReadPlan::new(32);
    (0..16).for_each(|unit| {
        plan.push_unit([Block(unit)]);
    });
    let settled = SettledPages::new(&ram, block_size);
    let rules = PageServerRules::default();
    let mut server: PageServer<()> =
        PageServer::new(block_size, plan, settled, rules, Duration::ZERO);
    let (mut now, mut units) = (Duration::ZERO, 0);
    while units < 16 {
        now += Duration::from_micros(500);
        assert!(now < Duration::from_millis(16));
        assert!(matches!(server.answer_fault(now, Page(40)), FaultAnswer::Zero(_)));
        if let ReadDecision::Read(read) = server.take_read(now, true) {
            units += read.units.len();
            server.finish_read(read.why, now);
            let _ = server.record_arrival(
                now,
                ReadUnit(read.units.start),
                UnitSource::PageCache,
                read.why,
            );
        }
    }
}

#[test]
fn faults_on_a_unit_being_read_cause_no_second_read() {
    let ram = RegionMap::lay_out([("ram", 4096 * 8)]).unwrap();
    let block_size = BlockSize::default();
    let mut plan = ReadPlan::new(4);
    plan.push_unit([Block(2), Block(0), Block(1)]);
    let settled = SettledPages::new(&ram, block_size);
    let mut server =
        PageServer::new(block_size, plan, settled, PageServerRules::default(), Duration::ZERO);
    let at = Duration::ZERO;
    let FaultAnswer::TryPageCache(fetch) = server.answer_fault(at, Page(1)) else { panic!() };
    assert!(server.record_cache_miss(&fetch).demand);
    assert_eq!(server.answer_fault(at, Page(2)), FaultAnswer::Wait);
    let read = UnitRead { units: 0..1, why: ReadReason::Demand, in_order: false };
    assert_eq!(server.take_read(at, true), ReadDecision::Read(read));
    assert_eq!(server.answer_fault(at, Page(4)), FaultAnswer::Wait);
    assert_eq!(server.take_read(at, false), ReadDecision::Idle);
    assert!(
        server
            .record_arrival(at, ReadUnit(0), UnitSource::Held("bytes"), ReadReason::Demand)
            .workers
    );
    let mut order = Vec::new();
    let later = Duration::from_secs(1);
    while let Some(InstallWork::Install(install)) = server.take_install(later) {
        order.push((install.block.0, install.wanted.is_some()));
        let _ = server.record_install(&install);
    }
    assert_eq!(order, [(0, true), (1, true), (2, true)]);
    assert!(server.is_finished());
    assert_eq!(server.counts().demand_reads, 1);
    assert_eq!(server.counts().joined_faults, 2);
}

#[test]
fn a_block_installed_in_part_while_accounting_ended_is_completed() {
    let ram = RegionMap::lay_out([("ram", 4096 * 2)]).unwrap();
    let (block_size, at) = (BlockSize::default(), Duration::from_secs(1));
    let mut plan = ReadPlan::new(1);
    plan.push_unit([Block(0)]);
    let settled = SettledPages::new(&ram, block_size);
    let rules = PageServerRules { account_use: true, ..PageServerRules::default() };
    let mut server: PageServer<()> =
        PageServer::new(block_size, plan, settled, rules, Duration::ZERO);
    let FaultAnswer::TryPageCache(fetch) = server.answer_fault(Duration::ZERO, Page(1)) else {
        panic!()
    };
    assert_eq!(fetch.pages, PageMask(0b10));
    let _ = server.record_cache_hit(fetch.unit, UnitSource::PageCache);
    assert_eq!(server.take_read(at, true), ReadDecision::Idle);
    assert_eq!(server.take_install(at), None, "the handler has taken the block");
    assert!(server.record_install(&fetch).workers);
    let Some(InstallWork::Install(rest)) = server.take_install(at) else { panic!() };
    assert_eq!(rest.pages, PageMask(0b01));
    assert!(server.record_install(&rest).finished);
}

/// The unit was read by the fill, so workers know it; the page cache evicted it, and it was read
/// again on demand.
#[test]
fn a_block_that_workers_passed_before_accounting_ended_is_completed() {
    let ram = RegionMap::lay_out([("ram", 4096 * 4)]).unwrap();
    let (block_size, at) = (BlockSize::default(), Duration::from_secs(1));
    let mut plan = ReadPlan::new(2);
    plan.push_unit([Block(0), Block(1)]);
    let settled = SettledPages::new(&ram, block_size);
    let rules = PageServerRules { account_use: true, ..PageServerRules::default() };
    let mut server: PageServer<()> =
        PageServer::new(block_size, plan, settled, rules, Duration::ZERO);
    let read = |server: &mut PageServer<()>, why| {
        let ReadDecision::Read(read) = server.take_read(at, true) else { panic!() };
        assert_eq!(read.why, why);
        server.finish_read(why, at);
        let _ = server.record_arrival(at, ReadUnit(0), UnitSource::PageCache, why);
    };
    read(&mut server, ReadReason::Fill);
    let FaultAnswer::Install(lost) = server.answer_fault(Duration::ZERO, Page(1)) else { panic!() };
    let _ = server.record_cache_loss(&lost);
    read(&mut server, ReadReason::Demand);
    let Some(InstallWork::Install(page)) = server.take_urgent() else { panic!() };
    assert_eq!((page.block, page.pages), (Block(0), PageMask(0b10)));
    let Some(InstallWork::Install(other)) = server.take_install(at) else { panic!() };
    assert_eq!(other.block, Block(1));
    let _ = server.record_install(&other);
    assert_eq!(server.take_install(at), None, "the other block is taken");
    assert!(!server.record_install(&page).finished);
    assert_eq!(server.take_read(at, true), ReadDecision::Idle);
    let Some(InstallWork::Install(rest)) = server.take_install(at) else { panic!() };
    assert_eq!((rest.block, rest.pages), (Block(0), PageMask(0b01)));
    assert!(server.record_install(&rest).finished);
}

#[test]
fn high_latency_storage_is_read_in_file_order() {
    let ram = RegionMap::lay_out([("ram", 4096 * 1000)]).unwrap();
    let block_size = BlockSize::new(1).unwrap();
    let mut plan = ReadPlan::new(1000);
    (0..1000).for_each(|block| {
        plan.push_unit([Block(block)]);
    });
    let settled = SettledPages::new(&ram, block_size);
    let rules = PageServerRules {
        is_adaptive: true,
        may_read_all: true,
        held_max: 1000,
        ..PageServerRules::default()
    };
    let mut server: PageServer<SimulatedBytes> =
        PageServer::new(block_size, plan, settled, rules, Duration::ZERO);
    let _ = server.prefetch_units([700, 3, 5].map(ReadUnit).into());
    seem_far(&mut server);
    let mut next = 0;
    while let ReadDecision::Read(read) = server.take_read(Duration::from_secs(1), false) {
        assert!(read.in_order && read.units.start == next, "{read:?}");
        next = read.units.end;
        server.finish_read(read.why, Duration::from_secs(1));
    }
    assert_eq!(next, 1000);
}

/// The guest requests a unit, waits for it, and gets it.
fn ask(server: &mut PageServer<SimulatedBytes>, unit: u32, from: Duration, to: Duration) {
    let FaultAnswer::RequestRead(install) = server.answer_fault(from, Page(unit)) else { panic!() };
    assert!(server.record_cache_miss(&install).demand);
    let ReadDecision::Read(read) = server.take_read(from, false) else { panic!() };
    server.record_read_time(&read, 0, from, to);
    for (unit, why) in read.units_with_reasons() {
        let _ = server.record_arrival(to, unit, UnitSource::PageCache, why);
    }
    server.finish_read(read.why, to);
}

#[test]
fn background_reads_of_high_latency_storage_wait_for_the_guest_for_a_limited_time() {
    let ram = RegionMap::lay_out([("ram", 4096 * 2000)]).unwrap();
    let block_size = BlockSize::new(1).unwrap();
    let mut plan = ReadPlan::new(2000);
    (0..2000).for_each(|block| {
        plan.push_unit([Block(block)]);
    });
    let settled = SettledPages::new(&ram, block_size);
    let rules = PageServerRules { is_adaptive: true, held_max: 4000, ..PageServerRules::default() };
    let mut server: PageServer<SimulatedBytes> =
        PageServer::new(block_size, plan, settled, rules, Duration::ZERO);
    seem_far(&mut server);
    let ms = Duration::from_millis;
    let ReadDecision::Read(fill) = server.take_read(ms(1000), true) else { panic!() };
    assert!(!fill.in_order && fill.why == ReadReason::Fill);
    server.finish_read(fill.why, ms(1000));
    let mut now = ms(1000);
    let mut asked = 0;
    let all = loop {
        ask(&mut server, 1999 - 30 * asked, now, now + ms(20));
        asked += 1;
        now += ms(30);
        match server.take_read(now, true) {
            ReadDecision::At(then) => assert!(then > now),
            ReadDecision::Read(read) => break read,
            ReadDecision::Idle => panic!(),
        }
    };
    assert!(all.in_order && (10..60).contains(&asked), "{asked}");
}

#[test]
fn a_unit_that_fails_is_read_again_sooner_if_a_vcpu_waits_for_it() {
    let ram = RegionMap::lay_out([("ram", 4096 * 8)]).unwrap();
    let block_size = BlockSize::default();
    let mut plan = ReadPlan::new(4);
    plan.push_unit([Block(1)]);
    let settled = SettledPages::new(&ram, block_size);
    let mut server: PageServer<()> =
        PageServer::new(block_size, plan, settled, PageServerRules::default(), Duration::ZERO);
    let mut now = Duration::from_secs(1);
    for _ in 0..10 {
        now += Duration::from_secs(20);
        let ReadDecision::Read(read) = server.take_read(now, true) else { panic!("{server:?}") };
        server.finish_read(read.why, now);
        for (unit, why) in read.units_with_reasons() {
            assert!(server.record_failed_read(now, unit, why));
        }
    }
    assert!(server.has_failed() && server.failed_request().is_none());
    // The background waits: other readers have nothing to do.
    assert_eq!(server.take_read(now, false), ReadDecision::Idle);
    assert_eq!(server.answer_fault(now, Page(2)), FaultAnswer::Wait);
    let (_, block, page) = server.failed_request().unwrap();
    assert_eq!((block, page), (Block(1), Page(2)));
    let soon = now + Duration::from_secs(1);
    let ReadDecision::At(then) = server.take_read(now, false) else { panic!() };
    assert_eq!(then, soon);
    let again = UnitRead { units: 0..1, why: ReadReason::Demand, in_order: false };
    assert_eq!(server.take_read(soon, false), ReadDecision::Read(again));
    assert!(server.failed_request().is_some(), "until it is there");
    let _ = server.record_arrival(soon, ReadUnit(0), UnitSource::PageCache, ReadReason::Demand);
    assert!(server.failed_request().is_none());
}

#[test]
fn a_damaged_block_is_installed_once_it_is_repaired_and_keeps_nothing_else() {
    let ram = RegionMap::lay_out([("ram", 4096 * 8)]).unwrap();
    let block_size = BlockSize::default();
    let mut plan = ReadPlan::new(4);
    plan.push_unit([Block(0), Block(1)]);
    let settled = SettledPages::new(&ram, block_size);
    let mut server: PageServer<()> =
        PageServer::new(block_size, plan, settled, PageServerRules::default(), Duration::ZERO);
    let now = Duration::from_secs(1);
    let FaultAnswer::TryPageCache(fetch) = server.answer_fault(now, Page(1)) else { panic!() };
    assert!(server.set_aside(now, &fetch).workers);
    assert_eq!(server.answer_fault(now, Page(0)), FaultAnswer::Wait);
    let Some(InstallWork::Install(other)) = server.take_install(now) else { panic!() };
    assert_eq!(other.block, Block(1));
    let _ = server.record_install(&other);
    assert_eq!((server.take_install(now), server.take_retry(now)), (None, None));
    let soon = now + Duration::from_millis(100);
    let Some(InstallWork::Install(again)) = server.take_retry(soon) else { panic!() };
    assert_eq!((again.block, again.pages, again.wanted), (Block(0), PageMask(0b11), Some(Page(1))));
    assert_eq!(server.take_retry(soon), None, "one thread at a time");
    assert!(server.record_install(&again).finished);
    assert!(!server.has_failed());
}
