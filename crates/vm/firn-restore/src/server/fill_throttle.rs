//! Fill throttle: decides when the background fill may read.
//!
//! A guest that waits for storage makes the restore progress by itself, and a fill beside it only
//! competes for the storage (Halite, section 6). A guest that waits seldom does neither, however
//! many faults it has: faults on zero pages, on pages that are settled, and on units in memory or
//! in the page cache need no storage, and hold nothing back. So the fill leaves the storage alone
//! while a demand read runs, and after each of its own reads for three times as long as demand
//! reads have taken since the read before:
//!
//! ```text
//!   faults on memory |||||||||||||||||||||||||||||||||||||||||||||||||||||||||||||||||||
//!   demand reads       #        #         ###### ##### ###### ##### ######
//!   fill             ##  .#####  .#######        ##                  ##    .############
//!                       ^ three times           ^ at most seven times its own read: the floor
//! ```
//!
//! A guest that waits for storage a tenth of its time leaves the fill two thirds of it. One that
//! waits a third of its time and more progresses by itself, and the fill falls to its floor: an
//! eighth of the time, and so of what the storage can do, which each read measures. A larger share
//! would delay that guest's reads by more than an eighth.
//!
//! In the first seconds of a restore the guest waits for its working set, and the fill reads as little
//! as it can: how soon the guest responds matters more there than when its last page is in memory.
//!
//! A fill that begins when the guest is responsive (see [`super::fill_start`]) leaves all of the link to
//! it for longer after each demand read, also for one that waited for the fill: the next page that a
//! program needs, it needs as soon as it has this one. If each of five such reads waits for a read of
//! the fill, the guest does not respond for a quarter of a second.
//!
//! Where the storage limits bytes, the fill uses half of the limit: see [`super::fill_pace`].
//!
//! While demand reads come, a background read is short, so that they wait for little; on storage of
//! high latency it is long all the same, because there the access is what it costs.

use std::time::Duration;

use super::fill_pace::FillPace;

/// The limits by which the page server works.
#[derive(Clone, Copy, Debug)]
pub struct PageServerRules {
    /// The longest time for which a prefetch leaves the storage to the guest.
    pub patience: Duration,
    /// Maximum number of units in one background read.
    pub run_max: u32,
    /// Maximum number of units whose bytes are held in memory at once (see [`super::UnitSource`]).
    pub held_max: u32,
    /// Whether memory is filled in the background at all.
    pub fill: bool,
    /// Whether the background fill waits until the guest is responsive, and leaves half of the
    /// storage's time to others from then on.
    pub is_fill_late: bool,
    /// How long such a fill waits at least.
    pub fill_delay: Duration,
    /// Maximum number of bytes of a unit.
    pub unit_bytes: u32,
    /// How many units the guest is expected to request beside the prefetched ones.
    pub expected_misses: u32,
    /// The storage latency that earlier restores found, if it is high.
    pub known_latency: Option<Duration>,
    /// Whether the server adapts to the measured storage: see [`super`].
    pub is_adaptive: bool,
    /// Whether the guest runs while units are prefetched: it may need the storage, or use other
    /// pages than predicted.
    pub guest_runs: bool,
    /// Whether prefetching may read everything, where that takes no longer than what was to be
    /// prefetched.
    pub may_read_all: bool,
    /// Install only the requested page, so that each first touch of a prefetched page faults and is
    /// counted.
    pub account_use: bool,
    /// The pause after the first failure of a read or install.
    pub retry_min: Duration,
    /// The longest pause before the retry of something that a vCPU waits for; and between
    /// background reads that fail.
    pub retry_requested_max: Duration,
    /// The longest pause before the retry of something that no vCPU waits for.
    pub retry_max: Duration,
}

impl Default for PageServerRules {
    fn default() -> Self {
        Self {
            patience: Duration::from_millis(50),
            run_max: 16,
            held_max: 256,
            fill: true,
            is_fill_late: false,
            fill_delay: Duration::ZERO,
            unit_bytes: 64 << 10,
            expected_misses: 400,
            known_latency: None,
            is_adaptive: false,
            guest_runs: false,
            may_read_all: false,
            account_use: false,
            retry_min: Duration::from_millis(100),
            retry_requested_max: Duration::from_secs(1),
            retry_max: Duration::from_secs(10),
        }
    }
}

/// How often the fill checks whether a demand read has ended: more often where reads are short.
pub(super) const DEMAND_POLL: Duration = Duration::from_millis(1);
const DEMAND_POLL_MIN: Duration = Duration::from_micros(100);
/// How many times as long as a demand read takes the storage is left to the guest.
const DEMAND_FACTOR: u32 = 3;
/// The longest rest, as a multiple of the read before it: the fill reads an eighth of the time.
const REST_FACTOR: u32 = 7;
/// The longest rest, whatever the read before it took.
pub(super) const REST_MAX: Duration = Duration::from_millis(200);
/// For how long after its first demand read a guest waits for its working set: so long the fill may
/// rest for [`REST_MAX`] after each read.
const WORKING_SET_TIME: Duration = Duration::from_secs(5);
/// How long a fill that waited for a responsive guest leaves the link to it after each demand read, at
/// most. Such a guest needs few more pages, one after the other, as a program needs them.
const LATE_REST: Duration = Duration::from_millis(200);
/// While demand reads come, a background read should not take longer.
const SHORT_READ: Duration = Duration::from_millis(4);

/// What the fill may do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum FillPermission {
    /// Read up to this many units now.
    Read(u32),
    /// Ask again at this time.
    At(Duration),
}

/// The storage, as the fill sees it when it asks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct StorageUse {
    /// A demand read runs, or waits for a reader.
    pub(super) is_guest_waiting: bool,
    /// A guest that has not touched anything for a shorter time may be about to wait: see
    /// [`super::cost::StorageCost::double_latency`].
    pub(super) round: Duration,
    /// The minimum length of a background read, in units.
    pub(super) run_min: u32,
}

/// Decides from demand reads and background reads when the fill may read.
#[derive(Clone, Copy, Debug)]
pub(super) struct FillThrottle {
    last_fault: Duration,
    /// The end of the first and of the last demand read.
    first_demand: Option<Duration>,
    last_demand: Option<Duration>,
    /// The time that demand reads took since the last background read began.
    demand_time: Duration,
    /// Whether there was a demand read since the last background read began.
    is_demanded: bool,
    /// The background read that runs: when it began.
    began: Option<Duration>,
    /// The end of the last background read, and its length.
    ended: Duration,
    took: Duration,
    /// Maximum number of units of the next background read.
    run: u32,
    pace: FillPace,
    /// Before this time the pace permits no read.
    paced_at: Duration,
}

impl FillThrottle {
    pub(super) fn new(now: Duration) -> Self {
        let zero = Duration::ZERO;
        Self {
            last_fault: zero,
            first_demand: None,
            last_demand: None,
            demand_time: zero,
            is_demanded: false,
            began: None,
            ended: now,
            took: zero,
            run: 1,
            pace: FillPace::default(),
            paced_at: zero,
        }
    }

    /// A vCPU begins to wait for a page.
    pub(super) fn record_fault(&mut self, now: Duration) {
        self.last_fault = now;
    }

    /// When a vCPU last began to wait for a page.
    pub(super) fn last_fault(&self) -> Duration {
        self.last_fault
    }

    /// The guest waited for a read from storage. What it waited for a background read does not
    /// count: that the fill delays the guest must not delay the fill.
    pub(super) fn record_demand_read(&mut self, began: Duration, ended: Duration) {
        self.first_demand.get_or_insert(ended);
        self.last_demand = Some(ended);
        self.is_demanded = true;
        let alone = match self.began {
            Some(fill_began) => fill_began.min(ended).saturating_sub(began),
            None => ended.saturating_sub(began.max(self.ended)),
        };
        self.demand_time += alone;
    }

    /// The background read that was permitted last has ended.
    pub(super) fn record_fill_end(&mut self, now: Duration) {
        let Some(began) = self.began.take() else { return };
        (self.ended, self.took) = (now, now.saturating_sub(began));
        self.pace.record_read(self.run, began, now);
        self.paced_at = (began + self.pace.time_for(self.run)).min(now + REST_MAX);
        let is_long = self.is_demanded && self.took > SHORT_READ;
        self.run = if is_long { self.run / 2 } else { self.run.saturating_mul(2) }.max(1);
    }

    /// Whether the fill may read now.
    pub(super) fn permit_read(
        &mut self,
        rules: &PageServerRules,
        storage: StorageUse,
        now: Duration,
    ) -> FillPermission {
        let floor_at = self.ended + self.longest_rest(now);
        let rested_at = self.ended + self.demand_time * DEMAND_FACTOR;
        let round = if rules.is_fill_late { storage.round.max(LATE_REST) } else { storage.round };
        let round_at = self.last_demand.map_or(Duration::ZERO, |ended| ended + round);
        let free_at = match storage.is_guest_waiting {
            true => now + (self.took / 4).clamp(DEMAND_POLL_MIN, DEMAND_POLL),
            false => rested_at.max(round_at),
        };
        // The link may be shared, and a demand read waits behind what it transfers.
        let shared_at = self.ended + if rules.is_fill_late { self.took } else { Duration::ZERO };
        let at = free_at.min(floor_at).max(shared_at).max(self.paced_at);
        if now < at {
            return FillPermission::At(at);
        }
        let run_max = rules.run_max.max(1);
        self.run = self.run.clamp(storage.run_min.clamp(1, run_max), run_max);
        (self.began, self.demand_time, self.is_demanded) = (Some(now), Duration::ZERO, false);
        FillPermission::Read(self.run)
    }

    /// For how long the fill rests at most after its last read.
    fn longest_rest(&self, now: Duration) -> Duration {
        match self.first_demand.is_some_and(|first| now < first + WORKING_SET_TIME) {
            true => REST_MAX,
            false => (self.took * REST_FACTOR).min(REST_MAX),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const MS: Duration = Duration::from_millis(1);
    const IDLE: StorageUse =
        StorageUse { is_guest_waiting: false, round: Duration::ZERO, run_min: 1 };

    /// A restore on a clock of its own, from storage that does one read after the other. The guest
    /// touches missing units at a rate, and waits for each.
    struct SimulatedFill {
        throttle: FillThrottle,
        rules: PageServerRules,
        now: Duration,
        access: Duration,
        unit: Duration,
        /// The time between the end of one demand read and the next.
        think: Duration,
        next_demand: Duration,
        /// The demand read that runs: when it began, and when it will end.
        running: Option<(Duration, Duration)>,
        free_at: Duration,
        demanded: u32,
        filled: u32,
        fill_time: Duration,
        /// The time that demand reads waited behind background reads.
        delayed: Duration,
    }

    impl SimulatedFill {
        fn new(access_us: u64, unit_us: u64, think: Duration) -> Self {
            Self {
                throttle: FillThrottle::new(Duration::ZERO),
                rules: PageServerRules::default(),
                now: Duration::ZERO,
                access: Duration::from_micros(access_us),
                unit: Duration::from_micros(unit_us),
                think,
                next_demand: think,
                running: None,
                free_at: Duration::ZERO,
                demanded: 0,
                filled: 0,
                fill_time: Duration::ZERO,
                delayed: Duration::ZERO,
            }
        }

        /// The same, long after the first demand read.
        fn after_working_set(mut self) -> Self {
            self.throttle = FillThrottle::new(WORKING_SET_TIME);
            self.throttle.first_demand = Some(Duration::ZERO);
            (self.now, self.free_at) = (WORKING_SET_TIME, WORKING_SET_TIME);
            self.next_demand = WORKING_SET_TIME + self.think;
            self
        }

        /// The demand reads until `then`.
        fn run_demand_reads(&mut self, then: Duration) {
            while self.next_demand < then {
                self.end_demand_read(self.next_demand);
                let begins = self.next_demand.max(self.free_at);
                let ends = begins + self.access + self.unit;
                self.delayed += begins - self.next_demand;
                self.throttle.record_fault(self.next_demand);
                self.running = Some((self.next_demand, ends));
                (self.free_at, self.next_demand) = (ends, ends + self.think);
                self.demanded += 1;
            }
        }

        /// Reports the demand read that runs, if it has ended.
        fn end_demand_read(&mut self, now: Duration) {
            if let Some((began, ended)) = self.running.take_if(|(_, ended)| *ended <= now) {
                self.throttle.record_demand_read(began, ended);
            }
        }

        fn step(&mut self) {
            self.run_demand_reads(self.now);
            self.end_demand_read(self.now);
            let storage = StorageUse { is_guest_waiting: self.free_at > self.now, ..IDLE };
            match self.throttle.permit_read(&self.rules, storage, self.now) {
                FillPermission::At(then) => {
                    assert!(then > self.now && then <= self.now + REST_MAX);
                    self.now = then;
                }
                FillPermission::Read(units) => {
                    let begins = self.now.max(self.free_at);
                    let ends = begins + self.access + self.unit * units;
                    self.fill_time += ends - begins;
                    self.free_at = ends;
                    self.now = ends;
                    self.filled += units;
                    self.run_demand_reads(ends);
                    self.throttle.record_fill_end(ends);
                    self.end_demand_read(ends);
                }
            }
        }

        /// Runs until this many units are there.
        fn run(mut self, units: u32) -> Self {
            while self.demanded + self.filled < units {
                self.step();
            }
            self
        }
    }

    const NEVER: Duration = Duration::from_secs(1 << 30);

    #[test]
    fn runs_grow_without_demand_reads_and_shrink_with_them() {
        let (rules, mut throttle) = (PageServerRules::default(), FillThrottle::new(Duration::ZERO));
        let read = |throttle: &mut FillThrottle, ms: u32| {
            let FillPermission::Read(units) = throttle.permit_read(&rules, IDLE, ms * 100 * MS)
            else {
                panic!()
            };
            throttle.record_fill_end(ms * 100 * MS + 5 * MS);
            units
        };
        let runs: Vec<_> = (0..6).map(|at| read(&mut throttle, at)).collect();
        assert_eq!(runs, [1, 2, 4, 8, 16, 16]);
        let runs: Vec<_> = (10..16)
            .map(|at| {
                let FillPermission::Read(units) = throttle.permit_read(&rules, IDLE, at * 100 * MS)
                else {
                    panic!()
                };
                throttle.record_demand_read(at * 100 * MS, at * 100 * MS + MS);
                throttle.record_fill_end(at * 100 * MS + 5 * MS);
                units
            })
            .collect();
        assert_eq!(runs, [16, 8, 4, 2, 1, 1]);
    }

    #[test]
    fn high_latency_keeps_reads_long_and_makes_the_fill_wait_a_round() {
        let (rules, mut throttle) = (PageServerRules::default(), FillThrottle::new(Duration::ZERO));
        let high = StorageUse { round: 20 * MS, run_min: 16, ..IDLE };
        let FillPermission::Read(16) = throttle.permit_read(&rules, high, MS) else { panic!() };
        throttle.record_fill_end(21 * MS);
        throttle.record_demand_read(22 * MS, 23 * MS);
        assert_eq!(throttle.permit_read(&rules, high, 24 * MS), FillPermission::At(43 * MS));
        assert_eq!(throttle.permit_read(&rules, high, 43 * MS), FillPermission::Read(16));
    }

    #[test]
    fn a_late_fill_uses_half_of_the_time() {
        let rules = PageServerRules { is_fill_late: true, ..PageServerRules::default() };
        let mut throttle = FillThrottle::new(Duration::ZERO);
        let mut now = Duration::ZERO;
        for _ in 0..100 {
            let FillPermission::Read(_) = throttle.permit_read(&rules, IDLE, now) else { panic!() };
            now += 28 * MS;
            throttle.record_fill_end(now);
            assert_eq!(throttle.permit_read(&rules, IDLE, now), FillPermission::At(now + 28 * MS));
            now += 28 * MS;
        }
    }

    #[test]
    fn faults_that_need_no_storage_hold_nothing_back() {
        let (rules, mut throttle) = (PageServerRules::default(), FillThrottle::new(Duration::ZERO));
        for at in (1..100).map(|ms| ms * MS) {
            throttle.record_fault(at);
            assert!(matches!(throttle.permit_read(&rules, IDLE, at), FillPermission::Read(_)));
            throttle.record_fill_end(at + MS / 2);
        }
    }

    #[test]
    fn a_guest_that_waits_for_its_working_set_keeps_nearly_all_of_the_storage() {
        let fill = SimulatedFill::new(1000, 100, Duration::ZERO).run(4000);
        assert!(fill.now < WORKING_SET_TIME, "{:?}", fill.now);
        assert!(fill.fill_time.as_secs_f64() < 0.02 * fill.now.as_secs_f64());
        assert!(fill.filled > 10, "{}", fill.filled);
    }

    #[test]
    fn a_guest_that_always_waits_for_storage_keeps_most_of_it() {
        let fill = SimulatedFill::new(1000, 100, Duration::ZERO).after_working_set().run(20_000);
        let time = (fill.now - WORKING_SET_TIME).as_secs_f64();
        let share = fill.fill_time.as_secs_f64() / time;
        assert!((0.08..0.16).contains(&share), "{share}");
        assert!(fill.delayed.as_secs_f64() < 0.16 * time);
    }

    proptest! {
        /// The rule before: a fault in each 3 ms held the fill down to a unit in each 50 ms.
        #[test]
        fn a_guest_that_waits_seldom_hardly_lengthens_the_fill(
            access_us in 20_u64..300,
            unit_us in 20_u64..1000,
            seldom in 20_u32..200,
        ) {
            let think = Duration::from_micros(access_us + unit_us) * seldom;
            let alone = SimulatedFill::new(access_us, unit_us, NEVER).run(20_000);
            let beside = SimulatedFill::new(access_us, unit_us, think).run(20_000);
            prop_assert!(
                beside.now.as_secs_f64() <= 1.5 * alone.now.as_secs_f64(),
                "{:?} against {:?}", beside.now, alone.now
            );
        }

        #[test]
        fn the_fill_never_falls_below_its_floor(
            access_us in 20_u64..20_000,
            unit_us in 20_u64..1000,
            think_us in 0_u64..10_000,
        ) {
            let think = Duration::from_micros(think_us);
            let fill = SimulatedFill::new(access_us, unit_us, think).after_working_set().run(5000);
            let share = fill.fill_time.as_secs_f64() / (fill.now - WORKING_SET_TIME).as_secs_f64();
            prop_assert!(share >= 0.05, "{share}");
        }
    }
}
