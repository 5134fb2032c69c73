//! Fill pace: keeps the background fill below the limit of storage that limits bytes.
//!
//! A network volume may pass so many bytes a second, and enforce that in slices of time: what is
//! within the limit of a slice passes at once, the next read waits until the slice is over. A fill
//! that reads all that the storage passes has a read waiting nearly always. A demand read waits
//! behind it for 100 to 200 ms, and the guest, which responded, does not.
//!
//! ```text
//!   reads of the fill   . . . . . . #######  . . . . . #######  . . . . . #######       .  about 1 ms
//!                       |---- cycle ------|  |--- cycle -----|  |---- cycle ----|       #  a stall, 80 ms
//! ```
//!
//! Some cycles in a row in which the fill read at the same rate show the limit. From then on the
//! fill reads half of it, evenly, so that the storage owes no slice anything. A disk has no
//! stalls: there all reads take long. Where stalls have another cause, their cycles seldom
//! agree; if they do, the fill takes twice as long, and nothing else happens.

use std::time::Duration;

/// A stall takes this long at least, and this many times as long as the reads since the last one.
const STALL_MIN: Duration = Duration::from_millis(20);
const STALL_FACTOR: f64 = 8.0;
/// The units of a cycle that counts: fewer are too few to compare rates.
const CYCLE_UNITS_MIN: u32 = 32;
/// The rates of cycles agree if each is within this share of their mean.
const AGREEMENT: f64 = 0.35;
/// The number of cycles in a row that must agree.
const CYCLES_MIN: u32 = 3;
/// The share of the limit that the fill uses.
const LIMIT_SHARE: f64 = 0.5;

/// The reads since the last stall.
#[derive(Clone, Copy, Debug, Default)]
struct StallCycle {
    began: Option<Duration>,
    units: u32,
    /// The time that its reads took, and their units, without the stall.
    quick_seconds: f64,
    quick_units: u32,
}

/// Finds the limit from the reads of the fill.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct FillPace {
    cycle: StallCycle,
    /// The mean rate of the last cycles, which agreed, in units per second, and their number.
    rate: f64,
    cycles: u32,
    /// The time that a unit is to take, once the limit is known.
    unit_time: Option<Duration>,
}

impl FillPace {
    /// The fill has read `units` from `began` to `ended`.
    pub(super) fn record_read(&mut self, units: u32, began: Duration, ended: Duration) {
        if self.unit_time.is_some() {
            return;
        }
        let took = ended.saturating_sub(began);
        self.cycle.units = self.cycle.units.saturating_add(units);
        if self.cycle.is_stall(units, took) {
            self.end_cycle(ended);
        } else {
            self.cycle.quick_seconds += took.as_secs_f64();
            self.cycle.quick_units = self.cycle.quick_units.saturating_add(units);
        }
    }

    /// The time from the beginning of a read of these units to the next.
    pub(super) fn time_for(&self, units: u32) -> Duration {
        self.unit_time.unwrap_or_default() * units
    }

    fn end_cycle(&mut self, now: Duration) {
        let cycle = std::mem::replace(
            &mut self.cycle,
            StallCycle { began: Some(now), ..StallCycle::default() },
        );
        let Some(rate) = cycle.rate_at(now) else {
            self.cycles = 0;
            return;
        };
        let agrees = (rate - self.rate).abs() <= AGREEMENT * self.rate;
        self.cycles = if self.cycles > 0 && agrees { self.cycles + 1 } else { 1 };
        let before = if self.cycles > 1 { self.rate } else { rate };
        self.rate = before + (rate - before) / f64::from(self.cycles);
        if self.cycles >= CYCLES_MIN {
            self.unit_time = Some(Duration::from_secs_f64(1.0 / (LIMIT_SHARE * self.rate)));
        }
    }
}

impl StallCycle {
    fn is_stall(&self, units: u32, took: Duration) -> bool {
        let usual = self.quick_seconds / f64::from(self.quick_units.max(1)) * f64::from(units);
        self.quick_units > 0 && took >= STALL_MIN && took.as_secs_f64() >= STALL_FACTOR * usual
    }

    /// The units per second; `None` if it is no cycle, but what came before the first stall, or too
    /// short to compare.
    fn rate_at(&self, now: Duration) -> Option<f64> {
        let seconds = now.saturating_sub(self.began?).as_secs_f64();
        (self.units >= CYCLE_UNITS_MIN && seconds > 0.0).then(|| f64::from(self.units) / seconds)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);
    const UNITS: u32 = 15;

    /// Storage that passes so many units in a slice of 100 ms, each read in a millisecond, and has
    /// the next read wait until the slice is over; zero: it passes all.
    struct Storage {
        pace: FillPace,
        now: Duration,
        per_slice: u32,
        used: u32,
        slice: u32,
    }

    impl Storage {
        fn new(per_slice: u32) -> Self {
            let pace = FillPace::default();
            Self { pace, now: Duration::ZERO, per_slice, used: 0, slice: 0 }
        }

        fn current_slice(&self) -> u32 {
            (self.now.as_millis() / 100) as u32
        }

        /// Reads at the pace, and returns how long that took.
        fn read(&mut self) -> Duration {
            let began = self.now;
            if self.current_slice() != self.slice {
                (self.slice, self.used) = (self.current_slice(), 0);
            }
            if self.per_slice > 0 && self.used + UNITS > self.per_slice {
                self.slice += 1;
                (self.now, self.used) = (100 * MS * self.slice, 0);
            }
            self.used += UNITS;
            self.now += MS;
            let took = self.now - began;
            self.pace.record_read(UNITS, began, self.now);
            self.now = self.now.max(began + self.pace.time_for(UNITS));
            took
        }
    }

    #[test]
    fn a_limit_on_bytes_is_used_by_half() {
        // 125 MB a second.
        let mut storage = Storage::new(190);
        (0..80).for_each(|_| _ = storage.read());
        let (began, mut longest) = (storage.now, Duration::ZERO);
        (0..200).for_each(|_| longest = longest.max(storage.read()));
        let rate = f64::from(200 * UNITS) / (storage.now - began).as_secs_f64();
        assert!((800.0..1000.0).contains(&rate), "{rate} of 1800");
        assert_eq!(longest, MS, "no read waits, so none waits behind it");
    }

    #[test]
    fn other_storage_is_read_as_fast_as_it_can() {
        let mut flash = Storage::new(0);
        (0..1000).for_each(|_| _ = flash.read());
        assert_eq!(flash.pace.time_for(UNITS), Duration::ZERO);
        // A disk: no read is quick.
        let mut pace = FillPace::default();
        for read in 0..1000 {
            let began = read * 20 * MS;
            pace.record_read(UNITS, began, began + (15 + read % 6) * MS);
        }
        assert_eq!(pace.time_for(UNITS), Duration::ZERO);
    }

    #[test]
    fn delays_now_and_then_are_no_limit() {
        let (mut pace, mut now) = (FillPace::default(), Duration::ZERO);
        for read in 0_u32..2000 {
            // Gaps of 3 to 60 reads, which differ from one to the next.
            let is_delayed = [3, 40, 97, 112, 171, 180].contains(&(read % 190));
            let took = if is_delayed { 50 * MS } else { MS };
            pace.record_read(UNITS, now, now + took);
            now += took;
        }
        assert_eq!(pace.time_for(UNITS), Duration::ZERO);
    }
}
