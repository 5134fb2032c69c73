//! Prefetching: reads what the guest is expected to touch, before it does.
//!
//! Prefetching helps a guest that would wait for storage otherwise; the guest must not wait for it.
//! Low-latency storage answers at once unless another read occupies it, so while the guest waits
//! now and then, prefetching takes half of the time, in short requests:
//!
//! ```text
//!   the guest waits         |        |                                 no wait for WAIT_EXPECTED
//!   prefetches     ####....####....####....####....####....####....##############################
//! ```
//!
//! High-latency storage is the opposite: the access is what costs, for the guest as for
//! prefetching, and every page that is read along saves the guest an access. There, all wanted
//! units are read in stored order, as fast as possible. If they can all be there soon, the guest
//! does not run before ([`PageServer::must_guest_wait`]): it would do nothing but wait, for one
//! page after the other.

use std::collections::VecDeque;
use std::ops::Range;
use std::time::Duration;

use super::Server;
use super::actions::{Read, Stir, Take, Why};
use super::far::{Requests, is_next_to_nothing};
use super::pace::{Leave, Rules};
use super::plan::Unit;
use super::sequence::{Reach, sequence};
use super::units::State;

/// Reader threads that prefetch at once: enough that storage never waits for them, and no more,
/// because a demand read waits behind them.
const AT_ONCE: u32 = 2;
/// Units in a short request.
const SHORT: u32 = 4;
/// How long a guest is kept from running, at most, by the estimated cost of the reads (see
/// [`super::cost`]: they usually take half of it).
const SOON: Duration = Duration::from_secs(6);
/// How long after it waited for storage a guest is expected to wait again.
const PRESSED: Duration = Duration::from_millis(100);

/// The units to prefetch.
#[derive(Debug)]
pub(super) struct Ahead {
    units: Vec<Unit>,
    /// For each unit, whether it is one of them.
    listed: Vec<bool>,
    /// The number of these units that no read has begun for.
    unread: u32,
    /// Requests that are not made yet.
    requests: VecDeque<Range<u32>>,
    /// Requests that readers are working on.
    running: u32,
    /// The number of `units`, from the first, that are installed.
    in_place: usize,
    /// The server has reported that all of them are installed.
    pub(super) is_over: bool,
    /// Whether requests are in stored order.
    by_place: bool,
    /// Whether they cover all units, from front to back.
    in_order: bool,
    /// When the guest last waited for storage.
    waited: Duration,
    /// Until when prefetching leaves storage to the guest.
    rests_until: Duration,
}

impl Ahead {
    /// No units. A guest that starts will wait for storage, like one that just did.
    pub(super) fn nothing(now: Duration) -> Self {
        Self {
            units: Vec::new(),
            listed: Vec::new(),
            unread: 0,
            requests: VecDeque::new(),
            running: 0,
            in_place: 0,
            is_over: true,
            by_place: false,
            in_order: false,
            waited: now,
            rests_until: now,
        }
    }

    /// These units of `0..end`, for some of which a read may have begun, in requests of at most
    /// `longest` units. Requests that are running stay counted.
    fn with(&self, units: Vec<Unit>, unread: u32, end: u32, longest: u32) -> Self {
        let mut listed = vec![false; end as usize];
        units.iter().for_each(|unit| listed[unit.index()] = true);
        let numbers: Vec<u32> = units.iter().map(|unit| unit.0).collect();
        let requests = sequence(&numbers, end, Reach::near(longest)).into();
        Self { is_over: units.is_empty(), units, listed, unread, requests, ..self.ended() }
    }

    /// No more units to prefetch. Requests that are running stay counted.
    fn ended(&self) -> Self {
        Self { running: self.running, rests_until: self.rests_until, ..Self::nothing(self.waited) }
    }

    fn has(&self, unit: Unit) -> bool {
        self.listed.get(unit.index()).copied().unwrap_or(false)
    }

    /// Whether there are requests to be made.
    pub(super) fn has_more(&self) -> bool {
        !self.requests.is_empty()
    }

    /// Whether these cover all units, from front to back.
    pub(super) fn goes_through_all(&self) -> bool {
        self.in_order && self.has_more()
    }

    /// A read of a unit begins.
    pub(super) fn begun(&mut self, unit: Unit) {
        let counts = u32::from(self.has(unit));
        self.unread = self.unread.saturating_sub(counts);
    }

    /// A reader has finished a request.
    pub(super) fn done(&mut self) {
        self.running -= 1;
    }

    /// The guest has begun to wait for storage.
    pub(super) fn waited(&mut self, now: Duration) {
        self.waited = now;
    }

    /// A prefetch took from `began` to `ended`: storage is left to the guest for as long. A read
    /// that took longer than `longest` counts as `longest`, because it does not predict the next.
    pub(super) fn rest(&mut self, began: Duration, ended: Duration, longest: Duration) {
        let rest = ended.saturating_sub(began).min(longest);
        self.rests_until = self.rests_until.max(ended + rest);
    }

    /// How many units the fill may read from high-latency storage: none while the guest is about to
    /// wait for it again. The fill asks again after `patience`, at the latest.
    pub(super) fn leave(&self, now: Duration, rules: &Rules) -> Leave {
        match self.is_pressed(now) {
            true => Leave::At((self.waited + PRESSED).min(now + rules.patience)),
            false => Leave::Read(rules.run_max),
        }
    }

    fn is_pressed(&self, now: Duration) -> bool {
        now < self.waited + PRESSED
    }
}

impl<B: Clone> Server<B> {
    /// Has these units read as fast as storage allows, roughly in this order, before any background
    /// fill. [`ThreadWakeups::ahead`] reports when all of them are installed.
    pub fn read_ahead(&mut self, units: Vec<Unit>) -> Stir {
        let unread = units.iter().filter(|&&unit| self.units.is_stored(unit)).count() as u32;
        self.ahead = self.ahead.with(units, unread, self.plan.units(), self.rules.run_max);
        self.go_by_place_if_far();
        self.stir(Stir { background: true, ..Stir::default() })
    }

    /// Has all units read as fast as storage allows, from front to back.
    pub fn read_all(&mut self) -> Stir {
        let all = (0..self.plan.units()).map(Unit).collect();
        let stir = self.read_ahead(all);
        self.ahead.in_order = true;
        stir
    }

    /// Ends prefetching and the background fill: only demand reads remain.
    pub fn stop_background(&mut self) {
        self.ahead = self.ahead.ended();
        self.rules.fill = false;
    }

    /// Whether all units that were to be prefetched are installed.
    pub fn is_ahead_done(&mut self) -> bool {
        while let Some(&unit) = self.ahead.units.get(self.ahead.in_place) {
            let in_place = match self.units.state(unit) {
                State::Done | State::Failed => true,
                State::Memory { .. } => self.rules.account_use,
                _ => false,
            };
            if !in_place {
                return false;
            }
            self.ahead.in_place += 1;
        }
        true
    }

    /// The guest waits for the prefetch, so low-latency storage is not left to the guest.
    pub fn await_ahead(&mut self) {
        self.rules.guest_runs = false;
    }

    /// Whether a guest that may run must wait for the prefetch. With low-latency storage: as the
    /// rules decided. With storage of so high a latency that the guest would do nothing but wait:
    /// if all can be there soon.
    pub fn guest_waits(&self) -> bool {
        match self.cost.is_far() && self.is_clear() {
            true => self.rules.adapts && self.ahead_takes() <= SOON,
            false => !self.rules.guest_runs,
        }
    }

    /// The guest runs. If it `adapts`, prefetching leaves storage to it from now on.
    pub fn resumed(&mut self, adapts: bool) {
        self.rules.guest_runs |= adapts;
    }

    fn ahead_takes(&self) -> Duration {
        let units = self.ahead.requests.iter().map(|request| request.len() as u32);
        match self.ahead.in_order {
            true => self.cost.of(units.sum(), u32::MAX),
            false => units.map(|units| self.cost.of(units, u32::MAX)).sum(),
        }
    }

    /// The next request; short, and after a pause, if the guest needs the storage.
    pub(super) fn take_ahead(&mut self, now: Duration) -> Take {
        let is_near = self.rules.adapts && !self.cost.is_far();
        let yields = is_near && self.rules.guest_runs && self.ahead.is_pressed(now);
        let at_once = if yields { 1 } else { AT_ONCE };
        let longest = if yields && self.cost.is_known() { SHORT } else { u32::MAX };
        if self.ahead.running >= at_once {
            return Take::Idle;
        }
        if yields && now < self.ahead.rests_until {
            return Take::At(self.ahead.rests_until);
        }
        match self.next_ahead(longest) {
            Some(units) => {
                Take::Read(Read { units, why: Why::Ahead, in_order: self.ahead.in_order })
            }
            None => Take::Idle,
        }
    }

    fn next_ahead(&mut self, longest: u32) -> Option<Range<u32>> {
        while let Some(request) = self.ahead.requests.pop_front() {
            let mut units = request.clone();
            let stored = units.find(|&unit| self.units.is_stored(Unit(unit)));
            let Some(first) = stored else { continue };
            let run = self.start_run(Unit(first), longest.min(request.end - first));
            if run.end < request.end {
                self.ahead.requests.push_front(run.end..request.end);
            }
            self.ahead.running += 1;
            return Some(run);
        }
        None
    }

    /// Storage turned out to have high latency: see [`super::high_latency`].
    pub(super) fn go_by_place_if_far(&mut self) {
        let is_far = self.rules.adapts && self.cost.is_far() && self.is_clear();
        if is_far && self.ahead.has_more() && !self.ahead.by_place {
            self.go_by_place();
        }
    }

    /// Whether more reads would not change how high-latency storage is used. Reads that happen
    /// until then are of the working set, which is read in any case. If the working set is
    /// complete, whether anything else is read depends on the exact latency.
    fn is_clear(&self) -> bool {
        !is_next_to_nothing(self.rules.missed) || self.cost.is_certain()
    }

    fn go_by_place(&mut self) {
        self.ahead.by_place = true;
        let wanted = self.not_begun(self.ahead.units.iter().copied());
        let all = match self.rules.may_read_all {
            true => self.not_begun((0..self.plan.units()).map(Unit)),
            false => Vec::new(),
        };
        let end = self.plan.units();
        let reach = (end, self.rules.run_max);
        let requests = Requests::new(&wanted, &all, self.rules.missed, reach, &self.cost);
        self.ahead.requests = requests.runs.into();
        self.ahead.in_order = requests.in_order;
    }

    fn not_begun(&self, units: impl Iterator<Item = Unit>) -> Vec<u32> {
        units.filter(|&unit| self.units.is_stored(unit)).map(|unit| unit.0).collect()
    }

    /// The guest waits for storage.
    pub(super) fn watch_divergence(&mut self, unit: Unit) {
        // On high-latency storage units are read in stored order, and all of them come soon.
        if !self.rules.guest_runs || self.ahead.is_over || self.cost.is_far() {
            return;
        }
        let share = f64::from(self.ahead.unread) / f64::from(self.units.stored().max(1));
        if self.divergence.read(self.ahead.has(unit), share.min(1.0)) {
            // A thread that waits for the prefetch learns that it is over.
            self.ahead = Ahead { is_over: false, ..self.ahead.ended() };
            self.counts.diverged = true;
        }
    }
}
