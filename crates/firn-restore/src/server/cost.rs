//! What a read costs: so much to get there, and so much for each unit.
//!
//! On a disk getting there takes as long as reading ten locality blocks or more in sequence; on flash, hardly longer than
//! reading one; and a network volume may have a limit on either. Which it is decides what is read together, and nobody
//! tells beforehand, so it is learned from the reads themselves:
//!
//! ```text
//!   cost   |                    .  x           slope     what a unit costs
//!          |          x  .
//!          |  x .                              at zero   what getting there costs
//!          | .
//!          +------------------------- units
//! ```
//!
//! A line through all reads, by least squares; older reads count less and less. The cost of a read is the time in which
//! it kept the storage from all others: from the end of the read before it, or its own beginning, to its end. Single
//! times mean little where requests queue or a limit is enforced in bursts; sums of them still do.

use std::time::Duration;

/// What each further read leaves of the weight of those before it.
const FADING: f64 = 0.99;
/// Reads after which the line is trusted.
const ENOUGH: f64 = 7.0;
/// Getting there is far if it takes at least so long.
const FAR: Duration = Duration::from_millis(2);
/// And as long as reading so many units.
const FAR_UNITS: f64 = 3.0;
/// The least that a unit can cost, in seconds.
const UNIT_MIN: f64 = 1e-6;
/// The most that a unit costs storage worth reading in sequence: 64 KiB at 60 MB/s, in seconds. The slope is an estimate
/// and may be wrong for a while; what is above this line is not the units' doing.
const UNIT_MAX: f64 = 0.00105;
/// So many reads in a row must look far.
const SURE: u32 = 4;

/// What is known before anything was read: units and seconds of two reads of common flash storage.
const KNOWN: [(f64, f64); 2] = [(1.0, 0.0002), (16.0, 0.0017)];

/// Learns from reads.
#[derive(Clone, Copy, Debug)]
pub(super) struct Cost {
    last_end: Duration,
    /// Reads in a row by which storage looked far.
    far: u32,
    weight: f64,
    units: f64,
    units_squared: f64,
    seconds: f64,
    units_seconds: f64,
}

/// The line: both in seconds.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Line {
    getting_there: f64,
    unit: f64,
}

impl Default for Cost {
    fn default() -> Self {
        let nothing = Self {
            last_end: Duration::ZERO,
            far: 0,
            weight: 0.0,
            units: 0.0,
            units_squared: 0.0,
            seconds: 0.0,
            units_seconds: 0.0,
        };
        KNOWN.into_iter().fold(nothing, |cost, (units, seconds)| cost.with(units, seconds))
    }
}

impl Cost {
    /// So many neighbouring units were read from `began` to `ended`.
    pub(super) fn read(&mut self, units: u32, began: Duration, ended: Duration) {
        let cost = ended.saturating_sub(began.max(self.last_end));
        self.last_end = self.last_end.max(ended);
        *self = self.with(f64::from(units), cost.as_secs_f64());
        self.far = if self.is_far() || self.looks_far() { self.far + 1 } else { 0 };
    }

    fn with(self, units: f64, seconds: f64) -> Self {
        Self {
            last_end: self.last_end,
            far: self.far,
            weight: self.weight * FADING + 1.0,
            units: self.units * FADING + units,
            units_squared: self.units_squared * FADING + units * units,
            seconds: self.seconds * FADING + seconds,
            units_seconds: self.units_seconds * FADING + units * seconds,
        }
    }

    fn line(&self) -> Line {
        let spread = self.weight * self.units_squared - self.units * self.units;
        let slope = self.weight * self.units_seconds - self.units * self.seconds;
        let unit = if spread > 0.0 { (slope / spread).max(UNIT_MIN) } else { UNIT_MIN };
        let getting_there = ((self.seconds - unit * self.units) / self.weight).max(0.0);
        // Not more than was measured, where getting there is nothing.
        let unit = unit.min(self.seconds / self.units).max(UNIT_MIN);
        Line { getting_there, unit }
    }

    /// Whether getting there is what costs. Once sure it stays so: long reads, as they are made then, no longer tell.
    pub(super) fn is_far(&self) -> bool {
        self.far >= SURE
    }

    /// Whether enough was read to say anything.
    pub(super) fn is_known(&self) -> bool {
        self.weight >= ENOUGH
    }

    fn looks_far(&self) -> bool {
        let (Line { getting_there, unit }, far) = (self.line(), FAR.as_secs_f64());
        let beyond_units = (self.seconds - UNIT_MAX * self.units) / self.weight;
        let is_line_far = getting_there >= far && getting_there >= FAR_UNITS * unit;
        self.is_known() && is_line_far && beyond_units >= far
    }

    /// How many units cost as much as getting there.
    pub(super) fn worth(&self) -> u32 {
        let Line { getting_there, unit } = self.line();
        (getting_there / unit) as u32
    }

    /// What it costs to read so many units, at most `longest` at once.
    pub(super) fn of(&self, units: u32, longest: u32) -> Duration {
        let Line { getting_there, unit } = self.line();
        let ways = units.div_ceil(longest.max(1));
        Duration::from_secs_f64(getting_there * f64::from(ways) + unit * f64::from(units))
    }

    /// Getting there, twice: a guest that has not touched anything for less long may be waiting all the time.
    pub(super) fn round(&self) -> Duration {
        Duration::from_secs_f64(self.line().getting_there * 2.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What one storage or another takes for a read of so many units, in microseconds.
    fn after(reads: u32, takes: impl Fn(u32) -> u64) -> Cost {
        let (mut cost, mut now) = (Cost::default(), Duration::ZERO);
        for at in 0..reads {
            let units = [1, 2, 16, 4, 1, 7][at as usize % 6];
            let began = now;
            now += Duration::from_micros(takes(units));
            cost.read(units, began, now);
        }
        cost
    }

    #[test]
    fn a_disk_is_far() {
        let cost = after(30, |units| 8000 + 600 * u64::from(units));
        assert!(cost.is_far());
        assert!((10..=18).contains(&cost.worth()), "{}", cost.worth());
        let all = cost.of(160, 16).as_secs_f64();
        assert!((0.12..0.21).contains(&all), "{all}");
    }

    #[test]
    fn a_limit_on_requests_is_far() {
        let cost = after(30, |units| u64::from(units * 625).max(12_500));
        assert!(cost.is_far() && cost.worth() >= 16);
    }

    #[test]
    fn flash_and_a_limit_on_bytes_are_near() {
        assert!(!after(30, |units| 80 + 30 * u64::from(units)).is_far());
        assert!(!after(30, |units| 520 * u64::from(units)).is_far());
    }

    #[test]
    fn a_limit_enforced_in_bursts_comes_out_the_same() {
        // Nothing for a while, then the whole debt at once: of bytes, or of requests.
        let burst = |of: &dyn Fn(u32) -> u64| {
            let (mut cost, mut now, mut debt) = (Cost::default(), Duration::ZERO, 0);
            for at in 0..120 {
                let units = [16, 1, 1, 16, 3, 1, 2][at % 7];
                let began = now;
                debt += of(units);
                if debt >= 100_000 {
                    now += Duration::from_micros(std::mem::take(&mut debt));
                }
                cost.read(units, began, now);
            }
            cost
        };
        assert!(!burst(&|units| 520 * u64::from(units)).is_far());
        assert!(burst(&|_| 12_500).is_far());
    }

    #[test]
    fn reads_side_by_side_share_the_time() {
        let (mut cost, ms) = (Cost::default(), Duration::from_millis);
        for at in 0..50 {
            // Two under way at any time, each for 8 ms, one done every 4.
            cost.read(1, ms(4 * at), ms(4 * at + 8));
        }
        let alone = cost.of(1, 1).as_secs_f64();
        assert!((0.003..0.005).contains(&alone), "{alone}");
    }

    #[test]
    fn nothing_is_far_before_enough_was_read() {
        assert!(!after(8, |_| 20_000).is_far());
        assert!(after(9, |_| 20_000).is_far());
    }
}
