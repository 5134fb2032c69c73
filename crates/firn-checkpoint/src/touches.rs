//! What the guest touches first after the cut, in order, and whether that came to an end. Pure.
//!
//! A guest is traced for a second, or for up to four while it finds more, and never has touched all that it will. How much
//! is missing shows in how it was found: one that goes round in the same pages touches hardly a new one at the end of that
//! time, and has named them all; one that touches as many as at its beginning goes on like that.
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

/// The last part of the time in which a guest is traced: long enough for a guest that goes on to show it, and short
/// enough for one that goes round to have come round before, though at first each touch costs it a fault.
const LATE: f64 = 0.125;

/// Of a guest that has touched all that it will, so little is found late: less than what a restore takes for complete
/// (`firn-restore`, `far`).
const SETTLED: f64 = 0.002;

/// And it must not have found more for so long: one that waits for something for a moment finds nothing either.
const LULL: Duration = Duration::from_millis(500);

/// So many touches tell something.
const ENOUGH: usize = 100;

/// The first touches of a save.
#[derive(Debug, Default)]
pub(crate) struct Touches {
    is_touched: Vec<bool>,
    blocks: Vec<Block>,
    /// When each was touched.
    times: Vec<Duration>,
}

impl Touches {
    /// None, of so many blocks.
    pub(crate) fn new(blocks: u32) -> Self {
        Self { is_touched: vec![false; blocks as usize], ..Self::default() }
    }

    /// The guest touches a block, for the first time or not.
    pub(crate) fn note(&mut self, block: Block, now: Duration) {
        if !std::mem::replace(&mut self.is_touched[block.index()], true) {
            self.blocks.push(block);
            self.times.push(now);
        }
    }

    /// How many blocks there are.
    pub(crate) fn len(&self) -> u32 {
        self.blocks.len() as u32
    }

    /// Of the blocks that were found by `end`, the share that was in the last eighth of the time from the first of them;
    /// none if there are too few to tell.
    pub(crate) fn found_late(&self, end: Duration) -> Option<f64> {
        Some(self.found_within(self.late(end)?, end))
    }

    /// The last part of the time from the first touch to `end`; none if there are too few touches to tell.
    fn late(&self, end: Duration) -> Option<Duration> {
        let (first, enough) = (self.times.first()?, self.times.get(ENOUGH - 1)?);
        (*enough <= end).then(|| end.saturating_sub(*first).mul_f64(LATE))
    }

    /// The share of the blocks that was found in the time of such a length before `end`.
    fn found_within(&self, length: Duration, end: Duration) -> f64 {
        let since = end.saturating_sub(length);
        let by = |when: Duration| self.times.partition_point(|time| *time <= when);
        let all = by(end);
        (all - by(since)) as f64 / all.max(1) as f64
    }

    /// Whether it pays to go on watching: the guest goes round, or has only just begun to.
    pub(crate) fn is_settled(&self, now: Duration) -> bool {
        self.late(now).is_none_or(|late| self.found_within(late.max(LULL), now) <= SETTLED)
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
    fn touching(blocks: impl IntoIterator<Item = u32>) -> Touches {
        let mut touches = Touches::new(1000);
        let times = 1000..;
        blocks.into_iter().zip(times).for_each(|(block, at)| touches.note(Block(block), ms(at)));
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
        // 400 blocks, one each millisecond, then the same again.
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
