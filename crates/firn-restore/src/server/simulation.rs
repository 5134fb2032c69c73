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

use super::*;

/// Stands for the bytes of a unit in memory.
type Bytes = Rc<Unit>;

const READERS: usize = 3;
const WORKERS: usize = 2;
/// After this number of steps storage is repaired, and stays so.
const REPAIRED: u32 = 20_000;

/// A small generator: the same seed gives the same run.
struct Dice(u64);

impl Dice {
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
enum Content {
    Image,
    Zero,
}

/// The state of a guest thread.
enum Guest {
    Runs,
    Waits(Page),
    /// Has given pages back, and waits for the handler to read the event.
    GivesBack(Range<Page>),
    /// The handler has read it.
    Punches(Range<Page>),
}

enum Event {
    Fault(Page),
    Removed(Range<Page>),
}

#[derive(Clone)]
enum Handler {
    Idle,
    Has(Answer<Bytes>),
}

#[derive(Clone)]
enum Reader {
    Idle,
    Reads(Read, Duration),
    /// Installs a block again that could not be installed.
    Retries(Work<Bytes>),
    Serves,
}

struct World {
    dice: Dice,
    now: Duration,
    server: Server<Bytes>,
    rules: Rules,
    must_hold: Vec<Content>,
    in_between: Vec<bool>,
    present: Vec<Option<Content>>,
    guests: Vec<Guest>,
    touches_left: u32,
    events: VecDeque<Event>,
    handler: Handler,
    readers: Vec<Reader>,
    workers: Vec<Option<Work<Bytes>>>,
    cached: Vec<bool>,
    may_read: Vec<bool>,
    bytes: Vec<Weak<Unit>>,
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

fn plan_of(dice: &mut Dice, blocks: u32, lazy: bool) -> Plan {
    let mut stored: Vec<Block> = (0..blocks).filter(|_| dice.chance(70)).map(Block).collect();
    let mut plan = Plan::new(blocks);
    if lazy {
        stored.into_iter().for_each(|block| {
            plan.push([block]);
        });
        return plan;
    }
    for at in (1..stored.len()).rev() {
        stored.swap(at, dice.roll(at as u32 + 1) as usize);
    }
    while !stored.is_empty() {
        let len = (1 + dice.roll(12) as usize).min(stored.len());
        plan.push(stored.drain(..len));
    }
    plan
}

impl World {
    fn new(seed: u64) -> Self {
        let mut dice = Dice(seed | 1);
        let pages = 40 + dice.roll(300);
        let block_size = BlockSize::new(1 << dice.roll(5)).unwrap();
        let ram = RegionMap::lay_out([("ram", u64::from(pages) * 4096)]).unwrap();
        let lazy = dice.chance(20);
        let plan = plan_of(&mut dice, block_size.blocks_in(pages), lazy);
        let rules = Rules {
            run_max: 1 + dice.roll(8),
            way: (dice.roll(4) == 0).then_some(Duration::from_millis(10)),
            adapts: dice.roll(2) == 0,
            guest_runs: dice.roll(2) == 0,
            may_read_all: dice.roll(2) == 0,
            held_max: 1 + dice.roll(6),
            account_use: dice.chance(25),
            retry_min: Duration::from_millis(1),
            retry_requested_max: Duration::from_millis(4),
            retry_max: Duration::from_millis(8),
            ..Rules::default()
        };
        let units = plan.units() as usize;
        let content = |page| match plan.unit_of(block_size.block_of(Page(page))) {
            Some(_) => Content::Image,
            None => Content::Zero,
        };
        let must_hold = (0..pages).map(content).collect();
        let settled = Settled::new(&ram, block_size);
        let warm = dice.roll(101);
        Self {
            must_hold,
            in_between: vec![false; pages as usize],
            present: vec![None; pages as usize],
            guests: (0..1 + dice.roll(4)).map(|_| Guest::Runs).collect(),
            touches_left: dice.roll(600),
            events: VecDeque::new(),
            handler: Handler::Idle,
            readers: vec![Reader::Idle; READERS],
            workers: vec![None; WORKERS],
            cached: (0..units).map(|_| dice.chance(warm)).collect(),
            may_read: vec![true; units],
            bytes: Vec::new(),
            server: Server::new(block_size, plan, settled, rules, Duration::ZERO),
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

    fn note(&mut self, stir: Stir) {
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
        self.server.check_schedule(readers.filter(|it| matches!(it, Reader::Retries(_))).count());
        let is_read = |unit| {
            self.readers
                .iter()
                .any(|it| matches!(it, Reader::Reads(read, _) if read.units.contains(&unit)))
        };
        for unit in 0..self.server.plan.units() {
            let state = self.server.units.state(Unit(unit));
            assert!(!matches!(state, State::Reading) || is_read(unit), "no reader reads {unit}");
        }
    }

    fn break_or_repair(&mut self) {
        match self.dice.roll(600) {
            0 => self.is_down = !self.is_down,
            1 => self.damaged.push(Block(self.dice.roll(self.server.plan.blocks()))),
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
        match std::mem::replace(&mut self.guests[which], Guest::Runs) {
            Guest::Runs if self.touches_left > 0 => {
                self.touches_left -= 1;
                self.guests[which] = match self.dice.chance(4) {
                    true => self.give_back(),
                    false => self.touch(),
                };
            }
            Guest::Punches(range) => self.punch(range),
            other => self.guests[which] = other,
        }
    }

    fn touch(&mut self) -> Guest {
        let page = Page(self.dice.roll(self.pages));
        match self.present[page.index()] {
            Some(content) => {
                let right = content == self.must_hold[page.index()];
                assert!(right || self.in_between[page.index()], "{page} holds {content:?}");
                Guest::Runs
            }
            None => {
                self.events.push_back(Event::Fault(page));
                Guest::Waits(page)
            }
        }
    }

    fn give_back(&mut self) -> Guest {
        let start = self.dice.roll(self.pages);
        let end = (start + 1 + self.dice.roll(20)).min(self.pages);
        let range = Page(start)..Page(end);
        self.events.push_back(Event::Removed(range.clone()));
        Guest::GivesBack(range)
    }

    /// The kernel removes the pages at last; until then a guest that touched them might have seen
    /// either content.
    fn punch(&mut self, range: Range<Page>) {
        for page in Page::each(range) {
            self.present[page.index()] = None;
            self.must_hold[page.index()] = Content::Zero;
            self.in_between[page.index()] = false;
        }
    }

    fn step_handler(&mut self) {
        match std::mem::replace(&mut self.handler, Handler::Idle) {
            Handler::Has(answer) => self.answer(answer),
            Handler::Idle => match self.events.pop_front() {
                Some(Event::Fault(page)) => {
                    let answer = self.server.fault(self.now, page);
                    self.handler = Handler::Has(answer);
                }
                Some(Event::Removed(range)) => self.read_removal(range),
                None => {}
            },
        }
    }

    fn read_removal(&mut self, range: Range<Page>) {
        let stir = self.server.removed(range.clone());
        self.note(stir);
        Page::each(range.clone()).for_each(|page| self.in_between[page.index()] = true);
        let is_it = |guest: &&mut Guest| matches!(guest, Guest::GivesBack(it) if *it == range);
        let guest = self.guests.iter_mut().find(is_it).unwrap();
        *guest = Guest::Punches(range);
    }

    fn answer(&mut self, answer: Answer<Bytes>) {
        match answer {
            Answer::Zero(range) => self.zero(range),
            Answer::Late(page) => self.zero(page..Page(page.0 + 1)),
            Answer::Install(install) if install.source == Source::PageCache => {
                match self.cached[install.unit.index()] {
                    true => self.put(&install),
                    false => {
                        let stir = self.server.lost(&install);
                        self.note(stir);
                    }
                }
            }
            Answer::Install(install) => self.put(&install),
            Answer::Fetch(install) => self.fetch(&install),
            Answer::Ask(install) => {
                let stir = self.server.missed(&install);
                self.note(stir);
            }
            Answer::Wait => {}
        }
    }

    fn fetch(&mut self, install: &Install<()>) {
        if !self.cached[install.unit.index()] {
            let stir = self.server.missed(install);
            return self.note(stir);
        }
        if self.damaged.contains(&install.block) {
            let stir = self.server.set_aside(self.now, install);
            return self.note(stir);
        }
        let source = match self.dice.chance(50) && !self.rules.account_use {
            true => Source::Held(self.bytes_of(install.unit)),
            false => Source::PageCache,
        };
        let stir = self.server.fetched(self.now, install.unit, source);
        self.note(stir);
        self.put(install);
    }

    fn bytes_of(&mut self, unit: Unit) -> Bytes {
        let bytes = Rc::new(unit);
        self.bytes.push(Rc::downgrade(&bytes));
        bytes
    }

    fn put<S>(&mut self, install: &Install<S>) {
        if self.damaged.contains(&install.block) {
            let stir = self.server.set_aside(self.now, install);
            return self.note(stir);
        }
        let mut pages = install.pages;
        if install.version != self.server.version() {
            pages = pages.and(self.server.missing(install.block));
        }
        let first = self.server.block_size.first_page(install.block).0;
        for bit in (0..16).filter(|bit| install.pages.0 >> bit & 1 == 1) {
            let page = Page(first + bit);
            match pages.0 >> bit & 1 {
                1 => self.copy(page, Content::Image),
                _ => self.copy(page, Content::Zero),
            }
        }
        let stir = self.server.installed(install);
        self.note(stir);
    }

    fn zero(&mut self, range: Range<Page>) {
        Page::each(range).for_each(|page| self.copy(page, Content::Zero));
    }

    /// Like the kernel: does not change a page that is present, and wakes its waiters in either
    /// case.
    fn copy(&mut self, page: Page, content: Content) {
        self.present[page.index()].get_or_insert(content);
        for guest in &mut self.guests {
            if matches!(guest, Guest::Waits(it) if *it == page) {
                *guest = Guest::Runs;
            }
        }
    }

    fn step_reader(&mut self) {
        let which = self.dice.roll(READERS as u32) as usize;
        let next = match self.readers[which].clone() {
            Reader::Idle => self.take_read(which == 0),
            Reader::Reads(read, until) if until <= self.now => self.arrive(read),
            Reader::Retries(work) => {
                self.work(work);
                Reader::Serves
            }
            Reader::Serves => self.serve(),
            reading => reading,
        };
        self.readers[which] = next;
    }

    fn take_read(&mut self, may_fill: bool) -> Reader {
        if let Some(work) = self.server.take_retry(self.now) {
            return Reader::Retries(work);
        }
        let is_open =
            |unit| matches!(self.server.units.state(Unit(unit)), State::Stored | State::Asked);
        let open: Vec<bool> = (0..self.server.plan.units()).map(is_open).collect();
        match self.server.take_read(self.now, may_fill) {
            Take::Read(read) => {
                for unit in read.units.clone() {
                    if !open[unit as usize] && self.server.cost.is_far() {
                        continue;
                    }
                    let first = std::mem::replace(&mut self.may_read[unit as usize], false);
                    assert!(first, "unit {unit} was read twice");
                }
                let takes = Duration::from_micros(u64::from(self.dice.roll(8000)));
                Reader::Reads(read, self.now + takes)
            }
            Take::At(then) => {
                assert!(then <= self.now + self.rules.patience.max(self.rules.retry_max));
                Reader::Idle
            }
            Take::Idle => Reader::Idle,
        }
    }

    /// The units are read one by one, and some reads succeed.
    fn fail(&mut self, read: &Read) -> Reader {
        for (unit, why) in read.each() {
            if why != Why::Demand && !self.server.is_wanted(unit) {
                continue;
            }
            if self.dice.chance(20) {
                self.arrive_one(unit, why);
            } else if self.server.failed(self.now, unit, why) {
                self.may_read[unit.index()] = true;
            }
        }
        self.server.read_done(read.why);
        Reader::Serves
    }

    fn arrive(&mut self, read: Read) -> Reader {
        if self.is_down {
            return self.fail(&read);
        }
        let began = self.now.saturating_sub(Duration::from_micros(u64::from(self.dice.roll(8000))));
        if self.dice.chance(50) {
            self.server.went_to_storage();
        }
        self.server.read_took(&read, began, self.now);
        self.server.read_done(read.why);
        read.each().for_each(|(unit, why)| self.arrive_one(unit, why));
        Reader::Serves
    }

    fn arrive_one(&mut self, unit: Unit, why: Why) {
        self.cached[unit.index()] = true;
        let source = match self.rules.account_use {
            true => Source::PageCache,
            false => Source::Held(self.bytes_of(unit)),
        };
        let stir = self.server.arrived(self.now, unit, source, why);
        self.note(stir);
    }

    fn serve(&mut self) -> Reader {
        let Some(work) = self.server.take_urgent() else { return Reader::Idle };
        self.work(work);
        Reader::Serves
    }

    fn work(&mut self, work: Work<Bytes>) {
        match work {
            Work::Late(page) => self.zero(page..Page(page.0 + 1)),
            Work::Install(install) => self.put(&install),
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
        let idle = self.guests.iter().all(|guest| matches!(guest, Guest::Runs));
        idle && self.touches_left == 0 && self.finished
    }

    fn check_end(&mut self) {
        assert!(self.server.is_finished());
        assert_eq!(self.server.requested_in_vain(), None);
        assert!(!self.server.has_failed());
        for (page, (present, must)) in self.present.iter().zip(&self.must_hold).enumerate() {
            // What is a hole now reads as zeros once the range is unregistered.
            assert_eq!(present.unwrap_or(Content::Zero), *must, "page {page} at the end");
        }
        let counts = *self.server.counts();
        let used = counts.prefetched_used_pages;
        assert!(used <= counts.prefetched_pages + counts.faults, "{counts:?}");
    }
}

/// Reports reads that took long.
fn seem_far(server: &mut Server<Bytes>) {
    let at = |read| Duration::from_millis(20) * read;
    let read = Read { units: 0..1, why: Why::Fill, in_order: false };
    (0..12).for_each(|n| server.read_took(&read, at(n), at(n + 1)));
    assert!(server.cost.is_far());
}

fn run(seed: u64) {
    let mut world = World::new(seed);
    if world.dice.chance(30) {
        let share = world.dice.roll(101);
        let all: Vec<Unit> = (0..world.server.plan.units()).map(Unit).collect();
        let units = all.into_iter().filter(|_| world.dice.chance(share)).collect();
        let stir = world.server.read_ahead(units);
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
    fn every_page_is_right_whatever_the_order(seed in any::<u64>()) {
        run(seed);
    }
}

#[test]
fn a_guest_that_only_touches_zeros_does_not_stop_the_fill() {
    let ram = RegionMap::lay_out([("ram", 4096 * 64)]).unwrap();
    let block_size = BlockSize::default();
    let mut plan = Plan::new(32);
    (0..16).for_each(|unit| {
        plan.push([Block(unit)]);
    });
    let settled = Settled::new(&ram, block_size);
    let rules = Rules::default();
    let mut server: Server<()> = Server::new(block_size, plan, settled, rules, Duration::ZERO);
    let (mut now, mut units) = (Duration::ZERO, 0);
    while units < 16 {
        now += Duration::from_micros(500);
        assert!(now < rules.patience * 17);
        assert!(matches!(server.fault(now, Page(40)), Answer::Zero(_)));
        if let Take::Read(read) = server.take_read(now, true) {
            units += read.units.len();
            server.read_done(read.why);
            let _ = server.arrived(now, Unit(read.units.start), Source::PageCache, read.why);
        }
    }
}

#[test]
fn faults_on_a_unit_being_read_cause_no_second_read() {
    let ram = RegionMap::lay_out([("ram", 4096 * 8)]).unwrap();
    let block_size = BlockSize::default();
    let mut plan = Plan::new(4);
    plan.push([Block(2), Block(0), Block(1)]);
    let settled = Settled::new(&ram, block_size);
    let mut server = Server::new(block_size, plan, settled, Rules::default(), Duration::ZERO);
    let at = Duration::ZERO;
    let Answer::Fetch(fetch) = server.fault(at, Page(1)) else { panic!() };
    assert!(server.missed(&fetch).demand);
    assert_eq!(server.fault(at, Page(2)), Answer::Wait);
    let read = Read { units: 0..1, why: Why::Demand, in_order: false };
    assert_eq!(server.take_read(at, true), Take::Read(read));
    assert_eq!(server.fault(at, Page(4)), Answer::Wait);
    assert_eq!(server.take_read(at, false), Take::Idle);
    assert!(server.arrived(at, Unit(0), Source::Held("bytes"), Why::Demand).workers);
    let mut order = Vec::new();
    let later = Duration::from_secs(1);
    while let Some(Work::Install(install)) = server.take_install(later) {
        order.push((install.block.0, install.wanted.is_some()));
        let _ = server.installed(&install);
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
    let mut plan = Plan::new(1);
    plan.push([Block(0)]);
    let settled = Settled::new(&ram, block_size);
    let rules = Rules { account_use: true, ..Rules::default() };
    let mut server: Server<()> = Server::new(block_size, plan, settled, rules, Duration::ZERO);
    let Answer::Fetch(fetch) = server.fault(Duration::ZERO, Page(1)) else { panic!() };
    assert_eq!(fetch.pages, PageMask(0b10));
    let _ = server.fetched(Duration::ZERO, fetch.unit, Source::PageCache);
    assert_eq!(server.take_read(at, true), Take::Idle);
    assert_eq!(server.take_install(at), None, "the handler has taken the block");
    assert!(server.installed(&fetch).workers);
    let Some(Work::Install(rest)) = server.take_install(at) else { panic!() };
    assert_eq!(rest.pages, PageMask(0b01));
    assert!(server.installed(&rest).finished);
}

/// The unit was read by the fill, so workers know it; the page cache evicted it, and it was read
/// again on demand.
#[test]
fn a_block_that_workers_passed_before_accounting_ended_is_completed() {
    let ram = RegionMap::lay_out([("ram", 4096 * 4)]).unwrap();
    let (block_size, at) = (BlockSize::default(), Duration::from_secs(1));
    let mut plan = Plan::new(2);
    plan.push([Block(0), Block(1)]);
    let settled = Settled::new(&ram, block_size);
    let rules = Rules { account_use: true, ..Rules::default() };
    let mut server: Server<()> = Server::new(block_size, plan, settled, rules, Duration::ZERO);
    let read = |server: &mut Server<()>, why| {
        let Take::Read(read) = server.take_read(at, true) else { panic!() };
        assert_eq!(read.why, why);
        server.read_done(why);
        let _ = server.arrived(at, Unit(0), Source::PageCache, why);
    };
    read(&mut server, Why::Fill);
    let Answer::Install(lost) = server.fault(Duration::ZERO, Page(1)) else { panic!() };
    let _ = server.lost(&lost);
    read(&mut server, Why::Demand);
    let Some(Work::Install(page)) = server.take_urgent() else { panic!() };
    assert_eq!((page.block, page.pages), (Block(0), PageMask(0b10)));
    let Some(Work::Install(other)) = server.take_install(at) else { panic!() };
    assert_eq!(other.block, Block(1));
    let _ = server.installed(&other);
    assert_eq!(server.take_install(at), None, "the other block is taken");
    assert!(!server.installed(&page).finished);
    assert_eq!(server.take_read(at, true), Take::Idle);
    let Some(Work::Install(rest)) = server.take_install(at) else { panic!() };
    assert_eq!((rest.block, rest.pages), (Block(0), PageMask(0b01)));
    assert!(server.installed(&rest).finished);
}

#[test]
fn far_storage_is_read_from_front_to_back() {
    let ram = RegionMap::lay_out([("ram", 4096 * 1000)]).unwrap();
    let block_size = BlockSize::new(1).unwrap();
    let mut plan = Plan::new(1000);
    (0..1000).for_each(|block| {
        plan.push([Block(block)]);
    });
    let settled = Settled::new(&ram, block_size);
    let rules = Rules { adapts: true, may_read_all: true, held_max: 1000, ..Rules::default() };
    let mut server: Server<Bytes> = Server::new(block_size, plan, settled, rules, Duration::ZERO);
    let _ = server.read_ahead([700, 3, 5].map(Unit).into());
    seem_far(&mut server);
    let mut next = 0;
    while let Take::Read(read) = server.take_read(Duration::from_secs(1), false) {
        assert!(read.in_order && read.units.start == next, "{read:?}");
        next = read.units.end;
        server.read_done(read.why);
    }
    assert_eq!(next, 1000);
}

/// The guest requests a unit, waits for it, and gets it.
fn ask(server: &mut Server<Bytes>, unit: u32, from: Duration, to: Duration) {
    let Answer::Ask(install) = server.fault(from, Page(unit)) else { panic!() };
    assert!(server.missed(&install).demand);
    let Take::Read(read) = server.take_read(from, false) else { panic!() };
    server.read_took(&read, from, to);
    for (unit, why) in read.each() {
        let _ = server.arrived(to, unit, Source::PageCache, why);
    }
    server.read_done(read.why);
}

#[test]
fn the_rest_of_far_storage_waits_for_the_guest_but_not_for_ever() {
    let ram = RegionMap::lay_out([("ram", 4096 * 2000)]).unwrap();
    let block_size = BlockSize::new(1).unwrap();
    let mut plan = Plan::new(2000);
    (0..2000).for_each(|block| {
        plan.push([Block(block)]);
    });
    let settled = Settled::new(&ram, block_size);
    let rules = Rules { adapts: true, held_max: 4000, ..Rules::default() };
    let mut server: Server<Bytes> = Server::new(block_size, plan, settled, rules, Duration::ZERO);
    seem_far(&mut server);
    let ms = Duration::from_millis;
    let Take::Read(fill) = server.take_read(ms(1000), true) else { panic!() };
    assert!(!fill.in_order && fill.why == Why::Fill);
    server.read_done(fill.why);
    let mut now = ms(1000);
    let mut asked = 0;
    let all = loop {
        ask(&mut server, 1999 - 30 * asked, now, now + ms(20));
        asked += 1;
        now += ms(30);
        match server.take_read(now, true) {
            Take::At(then) => assert!(then > now),
            Take::Read(read) => break read,
            Take::Idle => panic!(),
        }
    };
    assert!(all.in_order && (10..60).contains(&asked), "{asked}");
}

#[test]
fn a_unit_that_fails_is_read_again_sooner_if_a_vcpu_waits_for_it() {
    let ram = RegionMap::lay_out([("ram", 4096 * 8)]).unwrap();
    let block_size = BlockSize::default();
    let mut plan = Plan::new(4);
    plan.push([Block(1)]);
    let settled = Settled::new(&ram, block_size);
    let mut server: Server<()> =
        Server::new(block_size, plan, settled, Rules::default(), Duration::ZERO);
    let mut now = Duration::from_secs(1);
    for _ in 0..10 {
        now += Duration::from_secs(20);
        let Take::Read(read) = server.take_read(now, true) else { panic!("{server:?}") };
        server.read_done(read.why);
        for (unit, why) in read.each() {
            assert!(server.failed(now, unit, why));
        }
    }
    assert!(server.has_failed() && server.requested_in_vain().is_none());
    // The background waits: other readers have nothing to do.
    assert_eq!(server.take_read(now, false), Take::Idle);
    assert_eq!(server.fault(now, Page(2)), Answer::Wait);
    let (_, block, page) = server.requested_in_vain().unwrap();
    assert_eq!((block, page), (Block(1), Page(2)));
    let soon = now + Duration::from_secs(1);
    let Take::At(then) = server.take_read(now, false) else { panic!() };
    assert_eq!(then, soon);
    let again = Read { units: 0..1, why: Why::Demand, in_order: false };
    assert_eq!(server.take_read(soon, false), Take::Read(again));
    assert!(server.requested_in_vain().is_some(), "until it is there");
    let _ = server.arrived(soon, Unit(0), Source::PageCache, Why::Demand);
    assert!(server.requested_in_vain().is_none());
}

#[test]
fn a_damaged_block_is_installed_once_it_is_repaired_and_keeps_nothing_else() {
    let ram = RegionMap::lay_out([("ram", 4096 * 8)]).unwrap();
    let block_size = BlockSize::default();
    let mut plan = Plan::new(4);
    plan.push([Block(0), Block(1)]);
    let settled = Settled::new(&ram, block_size);
    let mut server: Server<()> =
        Server::new(block_size, plan, settled, Rules::default(), Duration::ZERO);
    let now = Duration::from_secs(1);
    let Answer::Fetch(fetch) = server.fault(now, Page(1)) else { panic!() };
    assert!(server.set_aside(now, &fetch).workers);
    assert_eq!(server.fault(now, Page(0)), Answer::Wait);
    let Some(Work::Install(other)) = server.take_install(now) else { panic!() };
    assert_eq!(other.block, Block(1));
    let _ = server.installed(&other);
    assert_eq!((server.take_install(now), server.take_retry(now)), (None, None));
    let soon = now + Duration::from_millis(100);
    let Some(Work::Install(again)) = server.take_retry(soon) else { panic!() };
    assert_eq!((again.block, again.pages, again.wanted), (Block(0), PageMask(0b11), Some(Page(1))));
    assert_eq!(server.take_retry(soon), None, "one thread at a time");
    assert!(server.installed(&again).finished);
    assert!(!server.has_failed());
}
