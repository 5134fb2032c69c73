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

use super::PageServer;
use super::actions::{ReadDecision, ReadReason, ThreadWakeups, UnitRead};
use super::fill_throttle::{FillPermission, PageServerRules};
use super::high_latency::{PrefetchRequests, is_misses_min};
use super::plan::ReadUnit;
use super::sequence::{CoalescingRules, order_requests};
use super::units::UnitState;

/// Reader threads that prefetch at once: enough that storage never waits for them, and no more,
/// because a demand read waits behind them.
const CONCURRENT_READS_MAX: u32 = 2;
/// Units in a short request.
const SHORT_REQUEST_UNITS: u32 = 4;
/// How long a guest is kept from running, at most, by the estimated cost of the reads (see
/// [`super::cost`]: they usually take half of it).
const GUEST_WAIT_MAX: Duration = Duration::from_secs(6);
/// How long after it waited for storage a guest is expected to wait again.
const WAIT_EXPECTED: Duration = Duration::from_millis(100);

/// The units to prefetch.
#[derive(Debug)]
pub(super) struct PrefetchQueue {
    units: Vec<ReadUnit>,
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
    in_stored_order: bool,
    /// Whether they cover all units, from front to back.
    in_order: bool,
    /// When the guest last waited for storage.
    waited: Duration,
    /// Until when prefetching leaves storage to the guest.
    rests_until: Duration,
}

impl PrefetchQueue {
    /// No units. A guest that starts will wait for storage, like one that just did.
    pub(super) fn empty(now: Duration) -> Self {
        Self {
            units: Vec::new(),
            listed: Vec::new(),
            unread: 0,
            requests: VecDeque::new(),
            running: 0,
            in_place: 0,
            is_over: true,
            in_stored_order: false,
            in_order: false,
            waited: now,
            rests_until: now,
        }
    }

    /// These units of `0..end`, for some of which a read may have begun, in requests of at most
    /// `longest` units. Requests that are running stay counted.
    fn with_units(&self, units: Vec<ReadUnit>, unread: u32, end: u32, longest: u32) -> Self {
        let mut listed = vec![false; end as usize];
        units.iter().for_each(|unit| listed[unit.index()] = true);
        let numbers: Vec<u32> = units.iter().map(|unit| unit.0).collect();
        let requests = order_requests(&numbers, end, CoalescingRules::low_latency(longest)).into();
        Self {
            is_over: units.is_empty(),
            units,
            listed,
            unread,
            requests,
            ..self.without_requests()
        }
    }

    /// No more units to prefetch. Requests that are running stay counted.
    fn without_requests(&self) -> Self {
        Self { running: self.running, rests_until: self.rests_until, ..Self::empty(self.waited) }
    }

    fn contains_unit(&self, unit: ReadUnit) -> bool {
        self.listed.get(unit.index()).copied().unwrap_or(false)
    }

    /// Whether there are requests to be made.
    pub(super) fn has_more(&self) -> bool {
        !self.requests.is_empty()
    }

    /// Whether these cover all units, from front to back.
    pub(super) fn covers_all_units(&self) -> bool {
        self.in_order && self.has_more()
    }

    /// A read of a unit begins.
    pub(super) fn record_start(&mut self, unit: ReadUnit) {
        let counts = u32::from(self.contains_unit(unit));
        self.unread = self.unread.saturating_sub(counts);
    }

    /// A reader has finished a request.
    pub(super) fn record_done(&mut self) {
        self.running -= 1;
    }

    /// The guest has begun to wait for storage.
    pub(super) fn record_wait(&mut self, now: Duration) {
        self.waited = now;
    }

    /// A prefetch took from `began` to `ended`: storage is left to the guest for as long. A read
    /// that took longer than `longest` counts as `longest`, because it does not predict the next.
    pub(super) fn yield_storage(&mut self, began: Duration, ended: Duration, longest: Duration) {
        let rest = ended.saturating_sub(began).min(longest);
        self.rests_until = self.rests_until.max(ended + rest);
    }

    /// How many units the fill may read from high-latency storage: none while the guest is about to
    /// wait for it again. The fill asks again after `patience`, at the latest.
    pub(super) fn permit_fill(&self, now: Duration, rules: &PageServerRules) -> FillPermission {
        match self.is_pressed(now) {
            true => FillPermission::At((self.waited + WAIT_EXPECTED).min(now + rules.patience)),
            false => FillPermission::Read(rules.run_max),
        }
    }

    fn is_pressed(&self, now: Duration) -> bool {
        now < self.waited + WAIT_EXPECTED
    }
}

impl<B: Clone> PageServer<B> {
    /// Has these units read as fast as storage allows, roughly in this order, before any background
    /// fill. [`ThreadWakeups::ahead`] reports when all of them are installed.
    pub fn prefetch_units(&mut self, units: Vec<ReadUnit>) -> ThreadWakeups {
        let unread = units.iter().filter(|&&unit| self.units.is_stored(unit)).count() as u32;
        self.prefetch =
            self.prefetch.with_units(units, unread, self.plan.unit_count(), self.rules.run_max);
        self.reorder_if_high_latency();
        self.complete_wakeups(ThreadWakeups { background: true, ..ThreadWakeups::default() })
    }

    /// Has all units read as fast as storage allows, from front to back.
    pub fn prefetch_all(&mut self) -> ThreadWakeups {
        let all = (0..self.plan.unit_count()).map(ReadUnit).collect();
        let stir = self.prefetch_units(all);
        self.prefetch.in_order = true;
        stir
    }

    /// Ends prefetching and the background fill: only demand reads remain.
    pub fn stop_background(&mut self) {
        self.prefetch = self.prefetch.without_requests();
        self.rules.fill = false;
    }

    /// Whether all units that were to be prefetched are installed.
    pub fn is_prefetch_done(&mut self) -> bool {
        while let Some(&unit) = self.prefetch.units.get(self.prefetch.in_place) {
            let in_place = match self.units.state_of(unit) {
                UnitState::Done | UnitState::Failed => true,
                UnitState::Memory { .. } => self.rules.account_use,
                _ => false,
            };
            if !in_place {
                return false;
            }
            self.prefetch.in_place += 1;
        }
        true
    }

    /// The guest waits for the prefetch, so low-latency storage is not left to the guest.
    pub fn await_prefetch(&mut self) {
        self.rules.guest_runs = false;
    }

    /// Whether a guest that may run must wait for the prefetch. With low-latency storage: as the
    /// rules decided. With storage of so high a latency that the guest would do nothing but wait:
    /// if all can be there soon.
    pub fn must_guest_wait(&self) -> bool {
        match self.cost.is_high_latency() && self.is_latency_certain() {
            true => self.rules.is_adaptive && self.prefetch_time() <= GUEST_WAIT_MAX,
            false => !self.rules.guest_runs,
        }
    }

    /// The guest runs. If it `is_adaptive`, prefetching leaves storage to it from now on.
    pub fn record_resume(&mut self, is_adaptive: bool) {
        self.rules.guest_runs |= is_adaptive;
    }

    fn prefetch_time(&self) -> Duration {
        let units = self.prefetch.requests.iter().map(|request| request.len() as u32);
        match self.prefetch.in_order {
            true => self.cost.estimate_reads(units.sum(), u32::MAX),
            false => units.map(|units| self.cost.estimate_reads(units, u32::MAX)).sum(),
        }
    }

    /// The next request; short, and after a pause, if the guest needs the storage.
    pub(super) fn take_prefetch(&mut self, now: Duration) -> ReadDecision {
        let is_near = self.rules.is_adaptive && !self.cost.is_high_latency();
        let yields = is_near && self.rules.guest_runs && self.prefetch.is_pressed(now);
        let at_once = if yields { 1 } else { CONCURRENT_READS_MAX };
        let longest = if yields && self.cost.is_known() { SHORT_REQUEST_UNITS } else { u32::MAX };
        if self.prefetch.running >= at_once {
            return ReadDecision::Idle;
        }
        if yields && now < self.prefetch.rests_until {
            return ReadDecision::At(self.prefetch.rests_until);
        }
        match self.next_prefetch(longest) {
            Some(units) => ReadDecision::Read(UnitRead {
                units,
                why: ReadReason::Ahead,
                in_order: self.prefetch.in_order,
            }),
            None => ReadDecision::Idle,
        }
    }

    fn next_prefetch(&mut self, longest: u32) -> Option<Range<u32>> {
        while let Some(request) = self.prefetch.requests.pop_front() {
            let mut units = request.clone();
            let stored = units.find(|&unit| self.units.is_stored(ReadUnit(unit)));
            let Some(first) = stored else { continue };
            let run = self.start_run(ReadUnit(first), longest.min(request.end - first));
            if run.end < request.end {
                self.prefetch.requests.push_front(run.end..request.end);
            }
            self.prefetch.running += 1;
            return Some(run);
        }
        None
    }

    /// Storage turned out to have high latency: see [`super::high_latency`].
    pub(super) fn reorder_if_high_latency(&mut self) {
        let is_far =
            self.rules.is_adaptive && self.cost.is_high_latency() && self.is_latency_certain();
        if is_far && self.prefetch.has_more() && !self.prefetch.in_stored_order {
            self.reorder_requests();
        }
    }

    /// Whether more reads would not change how high-latency storage is used. Reads that happen
    /// until then are of the working set, which is read in any case. If the working set is
    /// complete, whether anything else is read depends on the exact latency.
    fn is_latency_certain(&self) -> bool {
        !is_misses_min(self.rules.expected_misses) || self.cost.is_certain()
    }

    fn reorder_requests(&mut self) {
        self.prefetch.in_stored_order = true;
        let wanted = self.unstarted_units(self.prefetch.units.iter().copied());
        let all = match self.rules.may_read_all {
            true => self.unstarted_units((0..self.plan.unit_count()).map(ReadUnit)),
            false => Vec::new(),
        };
        let end = self.plan.unit_count();
        let reach = (end, self.rules.run_max);
        let requests =
            PrefetchRequests::new(&wanted, &all, self.rules.expected_misses, reach, &self.cost);
        self.prefetch.requests = requests.runs.into();
        self.prefetch.in_order = requests.covers_all_units;
    }

    fn unstarted_units(&self, units: impl Iterator<Item = ReadUnit>) -> Vec<u32> {
        units.filter(|&unit| self.units.is_stored(unit)).map(|unit| unit.0).collect()
    }

    /// The guest waits for storage.
    pub(super) fn watch_divergence(&mut self, unit: ReadUnit) {
        // On high-latency storage units are read in stored order, and all of them come soon.
        if !self.rules.guest_runs || self.prefetch.is_over || self.cost.is_high_latency() {
            return;
        }
        let share = f64::from(self.prefetch.unread) / f64::from(self.units.stored_count().max(1));
        if self.divergence.record_read(self.prefetch.contains_unit(unit), share.min(1.0)) {
            // A thread that waits for the prefetch learns that it is over.
            self.prefetch = PrefetchQueue { is_over: false, ..self.prefetch.without_requests() };
            self.counts.diverged = true;
        }
    }
}
