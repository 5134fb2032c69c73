//! First touches: the memory blocks that the guest touches after the cut, each with the time of its
//! first touch. No I/O.
//!
//! The touched blocks are the working set of the image. Firn traces the guest for a second, or for
//! up to four seconds while the guest still touches new blocks. A working set that was traced for
//! so short a time is rarely complete. How much is missing, the times of the touches show:
//!
//! ```text
//!   touched         _________                           ___--
//!   blocks     ___--                               ___--
//!            --                               ___--
//!           |         time    |  |           |         time    |  |
//!                              last eighth                      last eighth
//!   the guest uses the same blocks again:    the guest touches new blocks all the time:
//!   the working set is complete              blocks are missing
//! ```
//!
//! The *late share* is the share of all touched blocks that were first touched in the last eighth
//! of the time from the first touch. The image records it (`found_late`), and a restore decides by
//! it whether it can rely on the working set.

use std::time::Duration;

use firn_types::Block;

/// The last part of the tracing time, as a share of it. It is long enough: a guest that touches new
/// pages does so in this part as well. It is short enough: a guest that repeats its work has begun
/// to repeat it before this part, although at first each touch costs it a fault.
const LATE_SHARE: f64 = 0.125;

/// The maximum late share of a guest that is settled: that has touched all blocks of its working
/// set. It is less than the late share up to which a restore considers a working set complete
/// (`firn-restore`, `high_latency`).
const SETTLED_SHARE_MAX: f64 = 0.002;

/// The minimum length of the last part, to decide that a guest is settled. In a shorter time a
/// guest may touch no new block only because it waits.
const QUIET_TIME_MIN: Duration = Duration::from_millis(500);

/// The minimum number of touched blocks for which a share is computed.
const TOUCHES_MIN: usize = 100;

/// The first touches of the guest during one save.
#[derive(Debug, Default)]
pub(crate) struct FirstTouches {
    /// For each block of the VM: whether it was touched.
    is_touched: Vec<bool>,
    /// The touched blocks, in the order of their first touches.
    blocks: Vec<Block>,
    /// The times of these first touches, since the save began.
    times: Vec<Duration>,
}

impl FirstTouches {
    /// No touches yet. `blocks` is the number of blocks of the VM.
    pub(crate) fn new(blocks: u32) -> Self {
        Self { is_touched: vec![false; blocks as usize], ..Self::default() }
    }

    /// Records that the guest touches a block, and returns whether it is the first touch. Only that
    /// counts.
    pub(crate) fn record_touch(&mut self, block: Block, now: Duration) -> bool {
        let is_first = !std::mem::replace(&mut self.is_touched[block.index()], true);
        if is_first {
            self.blocks.push(block);
            self.times.push(now);
        }
        is_first
    }

    /// The number of touched blocks.
    pub(crate) fn len(&self) -> u32 {
        self.blocks.len() as u32
    }

    /// The late share (see the module) at the time `end`. `None` if fewer than [`TOUCHES_MIN`]
    /// blocks were touched by then.
    pub(crate) fn late_share(&self, end: Duration) -> Option<f64> {
        Some(self.touched_share_within(self.late_period(end)?, end))
    }

    /// The length of the last eighth of the time from the first touch to `end`. `None` if fewer
    /// than [`TOUCHES_MIN`] blocks were touched by then.
    fn late_period(&self, end: Duration) -> Option<Duration> {
        let (first, enough) = (self.times.first()?, self.times.get(TOUCHES_MIN - 1)?);
        (*enough <= end).then(|| end.saturating_sub(*first).mul_f64(LATE_SHARE))
    }

    /// Of the blocks that were touched by `end`, the share whose first touch came in the last
    /// `length` before `end`.
    fn touched_share_within(&self, length: Duration, end: Duration) -> f64 {
        let since = end.saturating_sub(length);
        let by = |when: Duration| self.times.partition_point(|time| *time <= when);
        let all = by(end);
        (all - by(since)) as f64 / all.max(1) as f64
    }

    /// Whether Firn can end the tracing: in the last part of the time the guest has touched hardly
    /// any new block, or it has touched too few blocks in all for a decision.
    pub(crate) fn is_settled(&self, now: Duration) -> bool {
        self.late_period(now).is_none_or(|late| {
            self.touched_share_within(late.max(QUIET_TIME_MIN), now) <= SETTLED_SHARE_MAX
        })
    }

    /// The touched blocks, in the order of their first touches.
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
            .for_each(|(block, at)| _ = touches.record_touch(Block(block), ms(at)));
        touches
    }

    #[test]
    fn touched_blocks_are_in_order_and_listed_once() {
        let touches = touching([7, 3, 7, 7, 5, 3]);
        assert_eq!(touches.len(), 3);
        assert_eq!(touches.into_blocks(), [7, 3, 5].map(Block));
    }

    #[test]
    fn a_guest_that_goes_round_finds_nothing_late() {
        let round = (0..500).map(|at| at % 140);
        assert_eq!(touching(round).late_share(ms(1500)), Some(0.0));
    }

    #[test]
    fn a_steady_guest_touches_an_eighth_late() {
        let late = touching(0..800).late_share(ms(1800)).unwrap();
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
        assert_eq!(touching(0..101).late_share(ms(1500)), Some(0.0));
        assert_eq!(touching(0..99).late_share(ms(1500)), None);
    }

    #[test]
    fn touches_after_the_period_do_not_count() {
        let touches = touching(0..900);
        assert_eq!(touches.late_share(ms(1500)), touching(0..501).late_share(ms(1500)));
        assert_eq!(touches.late_share(ms(1050)), None);
    }
}
