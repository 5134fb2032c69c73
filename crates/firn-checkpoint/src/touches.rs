//! First touches: the blocks that the guest touches first after the cut, in order, and whether it
//! has touched all that it uses. No I/O.
//!
//! A guest is traced for a second, or for up to four while it touches new blocks, and never has
//! touched all that it will. The times of the touches show how much is missing: a guest that uses
//! the same pages again and again touches hardly a new one at the end of that time, and has touched
//! them all; a guest that touches as many new pages as at its beginning will touch more.
//!
//! ```text
//!   found           _________                           ___--
//!              ___--                               ___--
//!            --                               ___--
//!           |         time    |  |           |         time    |  |
//!                              late                             late
//! ```

use std::time::Duration;

use firn_types::Block;

/// The last part of the time in which a guest is traced: long enough for a guest that touches new
/// pages to do so in it, and short enough for a guest that repeats its work to have repeated it
/// before, though at first each touch costs it a fault.
const LATE_SHARE: f64 = 0.125;

/// The maximum share that is found late of a guest that has touched all that it will: less than the
/// share up to which a restore considers a working set complete (`firn-restore`, `high_latency`).
const SETTLED_SHARE_MAX: f64 = 0.002;

/// The guest must also have touched nothing new for this long: one that waits for a moment touches
/// nothing either.
const QUIET_TIME_MIN: Duration = Duration::from_millis(500);

/// The minimum number of touches for a result.
const TOUCHES_MIN: usize = 100;

/// The first touches of a save.
#[derive(Debug, Default)]
pub(crate) struct FirstTouches {
    is_touched: Vec<bool>,
    blocks: Vec<Block>,
    /// When each was touched.
    times: Vec<Duration>,
}

impl FirstTouches {
    /// No touches, of this number of blocks.
    pub(crate) fn new(blocks: u32) -> Self {
        Self { is_touched: vec![false; blocks as usize], ..Self::default() }
    }

    /// The guest touches a block, for the first time or not.
    pub(crate) fn record_touch(&mut self, block: Block, now: Duration) {
        if !std::mem::replace(&mut self.is_touched[block.index()], true) {
            self.blocks.push(block);
            self.times.push(now);
        }
    }

    /// The number of touched blocks.
    pub(crate) fn len(&self) -> u32 {
        self.blocks.len() as u32
    }

    /// Of the blocks that were touched by `end`, the share in the last eighth of the time from the
    /// first of them; none if there are too few for a result.
    pub(crate) fn found_late(&self, end: Duration) -> Option<f64> {
        Some(self.found_within(self.late_period(end)?, end))
    }

    /// The last part of the time from the first touch to `end`; none if there are too few touches
    /// for a result.
    fn late_period(&self, end: Duration) -> Option<Duration> {
        let (first, enough) = (self.times.first()?, self.times.get(TOUCHES_MIN - 1)?);
        (*enough <= end).then(|| end.saturating_sub(*first).mul_f64(LATE_SHARE))
    }

    /// The share of the blocks that was touched in the time of this length before `end`.
    fn found_within(&self, length: Duration, end: Duration) -> f64 {
        let since = end.saturating_sub(length);
        let by = |when: Duration| self.times.partition_point(|time| *time <= when);
        let all = by(end);
        (all - by(since)) as f64 / all.max(1) as f64
    }

    /// Whether watching the guest further is not worth it: it touches hardly any new blocks, or
    /// there are too few touches for a result.
    pub(crate) fn is_settled(&self, now: Duration) -> bool {
        self.late_period(now).is_none_or(|late| {
            self.found_within(late.max(QUIET_TIME_MIN), now) <= SETTLED_SHARE_MAX
        })
    }

    /// The blocks, in order.
    pub(crate) fn into_blocks(self) -> Vec<Block> {
        self.blocks
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn ms(ms: u64) -> Duration {
        Duration::from_millis(ms)
    }

    /// A guest that touches these blocks, one each millisecond from the thousandth on.
    fn touching(blocks: impl IntoIterator<Item = u32>) -> FirstTouches {
        let mut touches = FirstTouches::new(1000);
        let times = 1000..;
        blocks
            .into_iter()
            .zip(times)
            .for_each(|(block, at)| touches.record_touch(Block(block), ms(at)));
        touches
    }

    #[test]
    fn blocks_come_in_order_and_once() {
        let touches = touching([7, 3, 7, 7, 5, 3]);
        assert_eq!(touches.len(), 3);
        assert_eq!(touches.into_blocks(), [7, 3, 5].map(Block));
    }

    #[test]
    fn a_guest_that_goes_round_finds_nothing_late() {
        let round = (0..500).map(|at| at % 140);
        assert_eq!(touching(round).found_late(ms(1500)), Some(0.0));
    }

    #[test]
    fn a_guest_that_goes_on_finds_an_eighth_of_all_late() {
        let late = touching(0..800).found_late(ms(1800)).unwrap();
        assert!((0.12..0.13).contains(&late), "{late}");
    }

    #[test]
    fn a_guest_is_watched_until_it_goes_round() {
        // 400 blocks, one each millisecond, then the same blocks again.
        let touches = touching((0..800).map(|at| at % 400));
        assert!(!touches.is_settled(ms(1300)), "it goes on");
        assert!(!touches.is_settled(ms(1500)), "for a moment it found nothing");
        assert!(touches.is_settled(ms(1900)));
        assert!(touching(0..50).is_settled(ms(1050)), "too few to tell");
    }

    #[test]
    fn a_guest_that_falls_silent_finds_nothing_late() {
        // 101 blocks in a tenth of a second, then nothing for four.
        assert_eq!(touching(0..101).found_late(ms(1500)), Some(0.0));
        assert_eq!(touching(0..99).found_late(ms(1500)), None);
    }

    #[test]
    fn what_came_later_does_not_count() {
        let touches = touching(0..900);
        assert_eq!(touches.found_late(ms(1500)), touching(0..501).found_late(ms(1500)));
        assert_eq!(touches.found_late(ms(1050)), None);
    }
}
