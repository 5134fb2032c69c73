//! Storage cost: estimates the latency of an access from the times of the reads.
//!
//! On a disk an access takes as long as reading ten locality blocks or more in sequence; on flash,
//! hardly longer than reading one; and a network volume may have a limit on requests or on bytes.
//! The latency decides what is read together. It is not known beforehand, so it is learned from the
//! reads themselves:
//!
//! ```text
//!   mean cost of a read   |-------------------------------|
//!   cost of its units,    |--------|                            at 60 MB/s, which is slow
//!   at most
//!   access latency        :        |----------------------|     at least
//! ```
//!
//! The cost of a read is the time in which it kept the storage from all others: from the end of the
//! read before it, or its own beginning, to its end. Where requests queue, or a limit is enforced
//! in bursts, single times mean little and do not depend on the length of a read. Their mean does,
//! except for one read that was delayed alone. What others read from the same storage takes part of
//! the time, so the bytes that the kernel read ahead, and those that the hypervisor read while it
//! started, are bytes of these reads as well. The mean needs short reads: long reads alone show a
//! latency of zero. So reads of one unit are summed on their own as well, if other reads of one
//! unit came before: a read that was delayed by a long one shows nothing about its own cost. A
//! latency that several reads in a row have shown therefore holds from then on, and only its value
//! becomes more certain for a while. Where earlier restores have found it, it holds from the first
//! read.

use std::time::Duration;

/// The latency from which storage counts as high-latency, in seconds.
const HIGH_LATENCY_SECONDS: f64 = 0.002;
/// The minimum rate at which storage reads in sequence, in bytes per second.
const SEQUENCE_MIN: f64 = 60e6;
/// A single read that took more than this share of the time of all reads was delayed, for whatever
/// reason.
const DELAYED_SHARE: f64 = 0.6;
/// The minimum number of reads for a useful mean.
const READS_MIN: f64 = 5.0;
/// A read of one unit counts as a single one after this many of its kind, without a longer one
/// between.
const SINGLES_MIN: u32 = 3;
/// The number of reads in a row that must show a high latency.
const SLOW_READS_MIN: u32 = 4;
/// This many reads later, their mean does not get better: limits that are enforced ten times a
/// second have acted several times.
const CERTAIN_READS: f64 = 16.0;

/// The sums of some reads.
#[derive(Clone, Copy, Debug, Default)]
struct ReadTotals {
    reads: f64,
    units: f64,
    seconds: f64,
    /// The time of the longest of them.
    longest: f64,
}

impl ReadTotals {
    fn add_read(&mut self, units: u32, seconds: f64) {
        self.reads += 1.0;
        self.units += f64::from(units);
        self.seconds += seconds;
        self.longest = self.longest.max(seconds);
    }

    fn without_longest(&self) -> Self {
        Self { reads: self.reads - 1.0, seconds: self.seconds - self.longest, ..*self }
    }

    /// The sums without one read that was delayed, if there is one.
    fn without_delayed(&self) -> Self {
        match self.longest > DELAYED_SHARE * self.seconds {
            true => self.without_longest(),
            false => *self,
        }
    }

    /// The minimum latency, in seconds, if a unit costs `unit` seconds; none if there are too few
    /// reads.
    fn latency_min(&self, unit: f64) -> Option<f64> {
        let of = self.without_delayed();
        (self.reads >= READS_MIN).then(|| (of.seconds - unit * of.units) / self.reads)
    }

    /// The mean time of a read, in seconds, its bytes included: where requests are limited, the
    /// bytes take no extra time.
    fn mean_seconds(&self) -> f64 {
        self.seconds / self.reads.max(1.0)
    }

    fn difference_from(&self, other: &Self) -> Self {
        Self {
            reads: self.reads - other.reads,
            units: self.units - other.units,
            seconds: self.seconds - other.seconds,
            longest: self.longest,
        }
    }
}

/// An estimate of the storage latency that reads improve.
#[derive(Clone, Copy, Debug)]
pub(crate) struct StorageCost {
    unit_bytes: u32,
    /// The maximum cost of a unit, in seconds.
    unit: f64,
    last_end: Duration,
    /// Whether reads are not counted any more.
    is_over: bool,
    all: ReadTotals,
    /// Of these, those before the first that took any time: limits let a few requests pass before
    /// they act.
    free: ReadTotals,
    /// The reads of one unit that followed others like them.
    single: ReadTotals,
    /// The number of consecutive reads of one unit, up to now.
    singles: u32,
    /// The number of reads in a row that showed a high latency.
    slow_reads: u32,
    /// The latency, in seconds, of high-latency storage.
    latency: Option<f64>,
    /// The latency that earlier restores found. It counts from the first read that goes to storage.
    known: Option<f64>,
    /// The latency that the reads of this restore show.
    found: Option<f64>,
    /// The number of reads after which the estimate is certain.
    certain_at: f64,
}

impl StorageCost {
    /// The cost of units of `unit_bytes` bytes, from storage whose latency other restores may have
    /// found.
    pub(super) fn new(unit_bytes: u32, known: Option<Duration>) -> Self {
        Self {
            unit_bytes,
            unit: f64::from(unit_bytes) / SEQUENCE_MIN,
            last_end: Duration::ZERO,
            is_over: false,
            all: ReadTotals::default(),
            free: ReadTotals::default(),
            single: ReadTotals::default(),
            singles: 0,
            slow_reads: 0,
            latency: None,
            known: known.as_ref().map(Duration::as_secs_f64),
            found: None,
            certain_at: f64::INFINITY,
        }
    }

    /// The cost of storage whose latency other restores have found.
    pub(crate) fn from_known_latency(unit_bytes: u32, latency: Duration) -> Self {
        let latency = Some(latency.as_secs_f64());
        Self { latency, ..Self::new(unit_bytes, None) }
    }

    /// Units are read from front to back: the kernel reads ahead of the requests, and every other
    /// read waits behind that. From here on the times of reads show nothing.
    pub(super) fn stop_learning(&mut self) {
        self.is_over = true;
    }

    /// A read went to storage, so the image is not all in the page cache: the latency that others
    /// found holds.
    pub(super) fn record_storage_access(&mut self) {
        self.latency = self.latency.or(self.known);
    }

    /// Others have read these bytes, perhaps from the same storage, and delayed reads of this
    /// restore.
    pub(super) fn record_other_reads(&mut self, bytes: u64) {
        self.all.units += bytes as f64 / f64::from(self.unit_bytes);
    }

    /// `units` neighbouring units were read from `began` to `ended`; the kernel has fetched so many
    /// bytes for that, or an unknown number if zero.
    pub(super) fn record_read(
        &mut self,
        units: u32,
        fetched: u64,
        began: Duration,
        ended: Duration,
    ) {
        if self.is_over {
            return;
        }
        let fetched_units = u32::try_from(fetched / u64::from(self.unit_bytes)).unwrap_or(u32::MAX);
        let units = units.max(fetched_units);
        let cost = ended.saturating_sub(began.max(self.last_end)).as_secs_f64();
        self.last_end = self.last_end.max(ended);
        if self.all.longest.max(cost) < HIGH_LATENCY_SECONDS {
            self.free.add_read(units, cost);
        }
        self.all.add_read(units, cost);
        if self.singles >= SINGLES_MIN && units == 1 {
            self.single.add_read(units, cost);
        }
        self.singles = if units == 1 { self.singles + 1 } else { 0 };
        self.update_latency();
    }

    fn update_latency(&mut self) {
        let rest = self.all.without_delayed().difference_from(&self.free);
        let single = self.single.without_delayed();
        let by =
            [(self.all.latency_min(self.unit), rest), (self.single.latency_min(self.unit), single)];
        let found = by.into_iter().find_map(|(least, of)| {
            let least = least.filter(|least| *least >= HIGH_LATENCY_SECONDS)?;
            Some(of.mean_seconds().max(least))
        });
        self.slow_reads = if found.is_some() { self.slow_reads + 1 } else { 0 };
        if self.slow_reads >= SLOW_READS_MIN && self.all.reads <= self.certain_at {
            self.certain_at = self.certain_at.min(self.all.reads + CERTAIN_READS);
            self.found = found;
            self.latency = self.known.or(found);
        }
    }

    /// The latency, if the reads of this restore have shown that it is high.
    pub(super) fn found_latency(&self) -> Option<Duration> {
        self.found.map(Duration::from_secs_f64)
    }

    /// The latency; zero for low-latency storage.
    pub(super) fn access_latency(&self) -> Duration {
        Duration::from_secs_f64(self.latency.unwrap_or_default())
    }

    /// Whether there are enough reads for an estimate.
    pub(super) fn is_known(&self) -> bool {
        self.all.reads >= READS_MIN
    }

    /// Whether more reads would not improve the estimate.
    pub(super) fn is_certain(&self) -> bool {
        self.is_over || self.known.is_some() || self.all.reads >= self.certain_at
    }

    /// Whether the storage has high latency.
    pub(super) fn is_high_latency(&self) -> bool {
        self.latency.is_some()
    }

    /// The number of units that cost as much as one access, if storage reads twice as fast in
    /// sequence as the minimum.
    pub(super) fn units_per_access(&self) -> u32 {
        (self.latency.unwrap_or_default() / (self.unit / 2.0)) as u32
    }

    /// The time to read this many units, at most `longest` in one request; of low-latency storage,
    /// the cost of the units.
    pub(super) fn estimate_reads(&self, units: u32, longest: u32) -> Duration {
        let accesses = units.div_ceil(longest.max(1));
        let latency = self.latency.unwrap_or_default();
        Duration::from_secs_f64(latency * f64::from(accesses) + self.unit * f64::from(units))
    }

    /// The time to read this many units with one request, if the access and the transfer overlap,
    /// and storage reads twice as fast in sequence as the minimum. Reads seldom take less.
    pub(super) fn request_time_min(&self, units: u32) -> Duration {
        self.access_latency().max(self.transfer_time(units))
    }

    /// The time to transfer this many units in sequence, without the access.
    pub(super) fn transfer_time(&self, units: u32) -> Duration {
        Duration::from_secs_f64(self.unit / 2.0 * f64::from(units))
    }

    /// Twice the latency: a guest that has not touched anything for a shorter time may be waiting
    /// all the time.
    pub(super) fn double_latency(&self) -> Duration {
        self.access_latency() * 2
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn new() -> StorageCost {
        StorageCost::new(65_536, None)
    }

    /// After reads of storage for which `takes` returns the microseconds of a number of units.
    fn after(reads: u32, takes: impl Fn(u32) -> u64) -> StorageCost {
        let (mut cost, mut now) = (new(), Duration::ZERO);
        for at in 0..reads {
            let units = [1, 2, 15, 4, 1, 7][at as usize % 6];
            let began = now;
            now += Duration::from_micros(takes(units));
            cost.record_read(units, 0, began, now);
        }
        cost
    }

    /// As [`after`], but reads take no time until their sum reaches a tenth of a second.
    fn after_bursts(of: impl Fn(u32) -> u64) -> StorageCost {
        let (mut cost, mut now, mut debt) = (new(), Duration::ZERO, 0);
        for at in 0..120 {
            let units = [15, 1, 1, 15, 3, 1, 2][at % 7];
            let began = now;
            debt += of(units);
            if debt >= 100_000 {
                now += Duration::from_micros(std::mem::take(&mut debt));
            }
            cost.record_read(units, 0, began, now);
        }
        cost
    }

    #[test]
    fn long_reads_hide_no_disk() {
        // A disk of 80 requests and 100 MB a second, by 100 requests of 15 units, and then by the
        // demand reads of a guest.
        let (mut cost, mut now) = (new(), Duration::ZERO);
        let mut read = |cost: &mut StorageCost, units| {
            let began = now;
            now += Duration::from_micros(12_500);
            cost.record_read(units, 0, began, now);
        };
        (0..100).for_each(|_| read(&mut cost, 15));
        assert!(!cost.is_high_latency());
        (0..12).for_each(|_| read(&mut cost, 1));
        assert!(
            (10..15).contains(&cost.access_latency().as_millis()),
            "{:?}",
            cost.access_latency()
        );
    }

    #[test]
    fn delays_by_long_reads_are_no_storage_latency() {
        // 125 MB a second, which delays the read that follows sixteen long reads.
        let (mut cost, mut now) = (new(), Duration::ZERO);
        for at in 0..400 {
            let began = now;
            let is_long = at % 20 < 16;
            now += Duration::from_micros(if at % 20 == 16 { 120_000 } else { 300 });
            cost.record_read(if is_long { 15 } else { 1 }, 0, began, now);
            assert!(!cost.is_high_latency(), "{at}");
        }
    }

    /// Reads beside a hypervisor that starts from the same storage, which has a limit of 125 MB a
    /// second: as measured.
    #[test]
    fn what_the_hypervisor_reads_is_no_storage_latency() {
        let after = |other_bytes| {
            let (mut cost, mut now) = (new(), Duration::ZERO);
            cost.record_other_reads(other_bytes);
            let first = [(15, 2_900), (15, 4_600), (12, 56_000), (15, 88_900)];
            let rest = [(1, 1_400), (1, 200), (1, 1_900), (1, 200), (2, 400), (1, 200), (1, 300)];
            for (units, micros) in first.into_iter().chain(rest) {
                let began = now;
                now += Duration::from_micros(micros);
                cost.record_read(units, 0, began, now);
            }
            cost
        };
        assert!(after(0).is_high_latency(), "nothing else explains the delays");
        assert!(!after(20_000_000).is_high_latency());
    }

    #[test]
    fn what_the_kernel_reads_ahead_counts() {
        let after = |fetched| {
            let (mut cost, mut now) = (new(), Duration::ZERO);
            for _ in 0..20 {
                let began = now;
                now += Duration::from_millis(100);
                cost.record_read(15, fetched, began, now);
            }
            cost
        };
        assert!(after(0).is_high_latency() && !after(12_000_000).is_high_latency());
    }

    #[test]
    fn the_latency_estimate_becomes_certain_with_more_reads() {
        // Limits that let requests pass for a tenth of a second, and then delay one: 12.5 ms
        // each in the end.
        let held_up = |at: u32| if at % 8 == 5 { 100_000 } else { 0 };
        let after = |reads: u32| {
            let (mut cost, mut now) = (new(), Duration::ZERO);
            for at in 0..reads {
                let began = now;
                now += Duration::from_micros(held_up(at) + 100);
                cost.record_read(1, 0, began, now);
            }
            cost
        };
        let way_ms = |reads: u32| after(reads).access_latency().as_secs_f64() * 1e3;
        assert!(after(20).is_high_latency() && !after(20).is_certain() && after(40).is_certain());
        assert!((10.0..18.0).contains(&way_ms(40)), "{}", way_ms(40));
        assert!((way_ms(200) - way_ms(40)).abs() < 1e-9, "and holds");
    }

    #[test]
    fn a_disk_has_high_latency() {
        let cost = after(30, |units| 8000 + 600 * u64::from(units));
        assert!(cost.is_high_latency());
        assert!((8..=20).contains(&cost.units_per_access()), "{}", cost.units_per_access());
        let all = cost.estimate_reads(150, 15).as_secs_f64();
        assert!((0.2..0.3).contains(&all), "{all}");
    }

    #[test]
    fn a_request_limit_counts_as_high_latency() {
        assert!(after(30, |units| u64::from(units * 625).max(12_500)).is_high_latency());
        let cost = after_bursts(|_| 12_500);
        assert!(cost.is_high_latency());
        assert!((9..18).contains(&cost.access_latency().as_millis()), "{cost:?}");
    }

    #[test]
    fn flash_and_a_limit_on_bytes_are_near() {
        assert!(!after(30, |units| 80 + 30 * u64::from(units)).is_high_latency());
        assert!(!after(30, |units| 520 * u64::from(units)).is_high_latency());
        assert!(!after_bursts(|units| 520 * u64::from(units)).is_high_latency());
    }

    #[test]
    fn one_read_that_was_held_up_is_no_distance() {
        let held_up = |read: u64| if read == 2 { 5_000_000 } else { 500 };
        let (mut cost, mut now) = (new(), Duration::ZERO);
        for read in 0..100 {
            let began = now;
            now += Duration::from_micros(held_up(read));
            cost.record_read(1, 0, began, now);
        }
        assert!(!cost.is_high_latency());
    }

    #[test]
    fn the_cost_limit_of_a_unit_depends_on_its_size() {
        let is_far = |unit_bytes| {
            let (mut cost, mut now) = (StorageCost::new(unit_bytes, None), Duration::ZERO);
            (0..20).for_each(|_| {
                let began = now;
                now += Duration::from_millis(10);
                cost.record_read(1, 0, began, now);
            });
            cost.is_high_latency()
        };
        assert!(is_far(65_536) && !is_far(1 << 20));
    }

    #[test]
    fn reads_side_by_side_share_the_time() {
        let (mut cost, ms) = (new(), Duration::from_millis);
        for at in 0..50 {
            // Two reads run at any time, each for 8 ms; one ends every 4 ms.
            cost.record_read(1, 0, ms(4 * at), ms(4 * at + 8));
        }
        assert!((0.0055..0.0095).contains(&cost.double_latency().as_secs_f64()), "{cost:?}");
    }

    #[test]
    fn a_certain_estimate_is_kept() {
        let (mut cost, ms) = (after(30, |_| 12_500), Duration::from_millis);
        (0..100).for_each(|at| cost.record_read(15, 0, ms(1000 + 12 * at), ms(1012 + 12 * at)));
        assert!(cost.is_high_latency() && cost.units_per_access() > 0);
    }

    #[test]
    fn a_delayed_read_does_not_raise_the_latency() {
        let (mut cost, mut now) = (new(), Duration::ZERO);
        for ms in [400, 8, 8, 8, 8, 8, 8, 8] {
            let began = now;
            now += Duration::from_millis(ms);
            cost.record_read(1, 0, began, now);
        }
        assert!((6..9).contains(&cost.access_latency().as_millis()), "{cost:?}");
    }

    #[test]
    fn a_known_latency_counts_from_the_first_read() {
        let ms = Duration::from_millis;
        let mut cost = StorageCost::new(65_536, Some(ms(12)));
        assert!(!cost.is_high_latency());
        cost.record_read(1, 0, ms(0), ms(0));
        assert!(!cost.is_high_latency());
        cost.record_storage_access();
        assert!(cost.is_high_latency() && cost.found_latency().is_none());
        assert_eq!(cost.access_latency(), ms(12));
        (0..20).for_each(|at| cost.record_read(1, 0, ms(20 * at), ms(20 * at + 20)));
        assert!(cost.found_latency().unwrap() > ms(15));
        assert_eq!(cost.access_latency(), ms(12));
    }

    #[test]
    fn no_storage_has_high_latency_before_enough_reads() {
        assert!(!after(READS_MIN as u32 + SLOW_READS_MIN - 2, |_| 20_000).is_high_latency());
        assert!(after(READS_MIN as u32 + SLOW_READS_MIN - 1, |_| 20_000).is_high_latency());
    }
}
