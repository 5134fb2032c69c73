//! Sweep throttle: how fast the background sweep may copy.
//!
//! A guest that touches memory quickly makes the checkpoint progress by itself, and a sweep beside
//! it only delays it (Halite, section 6). *Progress* is a block that was saved for the first time
//! because of an access, and that the image stores: faults on blocks that are saved already, and
//! blocks of zeros, cost compressors and storage nothing. For each block of progress, the sweep
//! leaves compressors and storage alone for the time that one of its own blocks takes:
//!
//! ```text
//!   progress     |     |     |     ||||||||||||||||||||||||||||
//!   sweep    #########.######.#####.###.........###.........###.........#############
//!                     ^ one block           ^ at most three times its own work: the floor
//! ```
//!
//! So both together copy what compressors and storage can take, at a rate *C*: a guest with a rate
//! of progress *G* leaves the sweep *C - G*. The time of a block is measured while the sweep works,
//! including its waits for compressors. The floor of the sweep is a quarter of its time, so a quarter
//! of *C* where the guest does not fill the buffers by itself. A larger share would fill the buffers
//! that the pipeline reserves for the guest's blocks, a quarter as well. A smaller one would help no
//! guest: one that makes three quarters of *C* as progress has a checkpoint at the rate *C* anyway.
//!
//! A save may have a time in which it is to end ([`SweepDeadline`]). While less is saved than by an
//! even rate until then, the sweep does not yield.

use std::time::Duration;

/// The next step of the sweep.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum SweepStep {
    /// Copy up to this many blocks, then call again.
    Copy(u32),
    /// Wait this long, then call again.
    Wait(Duration),
}

/// The throttle of one sweep.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SweepThrottle {
    throttled: bool,
    /// How long the sweep has worked since its last rest, and how many blocks it has copied.
    worked: Duration,
    copied: u32,
    /// How long the sweep is to rest for the progress since its last rest.
    owed: Duration,
    /// The progress that is accounted for, in blocks.
    progress: u64,
}

impl SweepThrottle {
    /// The sweep works for at least this share of its time.
    pub(crate) const FLOOR_SHARE: f64 = 0.25;
    /// The longest rest.
    pub(crate) const REST_MAX: Duration = Duration::from_millis(20);
    /// The shortest rest: the kernel's timers are not more exact. Shorter ones are added up.
    const REST_MIN: Duration = Duration::from_millis(1);
    /// Blocks between two calls.
    const BATCH: u32 = 32;

    /// A throttle that yields to the guest's progress, or one that never does.
    pub(crate) fn new(throttled: bool) -> Self {
        let zero = Duration::ZERO;
        Self { throttled, worked: zero, copied: 0, owed: zero, progress: 0 }
    }

    /// The sweep copied `blocks` blocks in this time, without the pauses of [`crate::duty_cycle`].
    pub(crate) fn record_batch(&mut self, blocks: u32, took: Duration) {
        self.worked += took;
        self.copied = self.copied.saturating_add(blocks);
    }

    /// The step to take now. `progress` is the number of blocks that the guest's accesses have
    /// saved so far.
    pub(crate) fn next_step(&mut self, progress: u64) -> SweepStep {
        let new = progress.saturating_sub(self.progress);
        self.progress = progress;
        if !self.throttled {
            return SweepStep::Copy(Self::BATCH);
        }
        let floor = self.worked.mul_f64(1.0 / Self::FLOOR_SHARE - 1.0);
        let block_time = self.worked / self.copied.max(1);
        let new = u32::try_from(new).unwrap_or(u32::MAX);
        self.owed = self.owed.saturating_add(block_time.saturating_mul(new)).min(floor);
        if self.owed < Self::REST_MIN {
            return SweepStep::Copy(Self::BATCH);
        }
        let rest = self.owed.min(Self::REST_MAX);
        (self.worked, self.copied, self.owed) = (Duration::ZERO, 0, Duration::ZERO);
        SweepStep::Wait(rest)
    }
}

/// The time in which a sweep is to end.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SweepDeadline {
    /// From the start of the sweep to its end.
    pub(crate) within: Duration,
    /// The start of the sweep.
    pub(crate) begun: Duration,
}

impl SweepDeadline {
    /// Whether less is saved now than at an even rate.
    pub(crate) fn is_late(self, saved: u32, total: u32, now: Duration) -> bool {
        let passed = now.saturating_sub(self.begun).as_secs_f64();
        passed * f64::from(total) > f64::from(saved) * self.within.as_secs_f64()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// A save on a clock of its own: buffers that the guest and the sweep fill, and that compressors
    /// and storage empty, a block in `block_us`.
    struct SimulatedSave {
        throttle: SweepThrottle,
        block_us: f64,
        /// Blocks that the guest touches for the first time each microsecond.
        guest_rate: f64,
        now_us: f64,
        /// Blocks in buffers.
        queue: f64,
        progress: f64,
        swept: u64,
        rested: Duration,
        longest_rest: Duration,
    }

    /// Buffers, and how many of them the sweep may fill.
    const BUFFERS: f64 = 8192.0;
    const ROOM: f64 = 0.75 * BUFFERS;
    /// The time to copy a block to a buffer.
    const COPY_US: f64 = 2.0;
    const BLOCKS: u64 = 100_000;

    impl SimulatedSave {
        fn new(throttled: bool, block_us: f64, guest_rate: f64) -> Self {
            Self {
                throttle: SweepThrottle::new(throttled),
                block_us,
                guest_rate,
                now_us: 0.0,
                queue: 0.0,
                progress: 0.0,
                swept: 0,
                rested: Duration::ZERO,
                longest_rest: Duration::ZERO,
            }
        }

        /// Time passes, in which the guest touches new blocks, as long as there are buffers.
        fn advance(&mut self, us: f64) {
            self.now_us += us;
            self.queue = (self.queue - us / self.block_us).max(0.0);
            let touched = (us * self.guest_rate).min(BUFFERS - self.queue);
            self.progress += touched;
            self.queue += touched;
        }

        fn is_saved(&self) -> bool {
            self.progress as u64 + self.swept >= BLOCKS
        }

        fn step(&mut self) {
            match self.throttle.next_step(self.progress as u64) {
                SweepStep::Wait(rest) => {
                    self.rested += rest;
                    self.longest_rest = self.longest_rest.max(rest);
                    self.advance(rest.as_secs_f64() * 1e6);
                }
                SweepStep::Copy(blocks) => {
                    let began = self.now_us;
                    (0..blocks).for_each(|_| self.copy_block());
                    let took = Duration::from_secs_f64((self.now_us - began) / 1e6);
                    self.throttle.record_batch(blocks, took);
                }
            }
        }

        fn copy_block(&mut self) {
            while self.queue > ROOM && !self.is_saved() {
                self.advance(1000.0);
            }
            self.advance(COPY_US);
            self.queue += 1.0;
            self.swept += 1;
        }

        /// Runs until everything is written.
        fn run(mut self) -> Self {
            while !self.is_saved() {
                self.step();
            }
            self.now_us += self.queue * self.block_us;
            self
        }

        fn rest_share(&self) -> f64 {
            self.rested.as_secs_f64() * 1e6 / self.now_us
        }
    }

    #[test]
    fn a_guest_without_progress_is_swept_at_full_speed() {
        let save = SimulatedSave::new(true, 20.0, 0.0).run();
        assert!(save.now_us <= 1.02 * 20.0 * BLOCKS as f64, "{}", save.now_us);
        assert_eq!(save.longest_rest, Duration::ZERO);
    }

    #[test]
    fn without_throttle_progress_does_not_matter() {
        let mut throttle = SweepThrottle::new(false);
        throttle.record_batch(1, Duration::from_secs(1));
        assert_eq!(throttle.next_step(1000), SweepStep::Copy(SweepThrottle::BATCH));
    }

    /// By the rule before, a fault in each 2 ms held the sweep down to 64 blocks in each 20 ms: to
    /// a sixteenth of what these compressors can take.
    #[test]
    fn one_new_block_each_millisecond_hardly_lengthens_a_save() {
        let alone = SimulatedSave::new(true, 20.0, 0.0).run();
        let beside = SimulatedSave::new(true, 20.0, 0.001).run();
        assert!(beside.now_us < 1.05 * alone.now_us, "{} against {}", beside.now_us, alone.now_us);
        assert!(beside.progress > 1700.0);
    }

    #[test]
    fn progress_holds_the_sweep_back_as_far_as_its_floor() {
        let mut throttle = SweepThrottle::new(true);
        throttle.record_batch(32, Duration::from_millis(4));
        assert_eq!(throttle.next_step(16), SweepStep::Wait(Duration::from_millis(2)));
        throttle.record_batch(32, Duration::from_millis(4));
        assert_eq!(throttle.next_step(1_000_000), SweepStep::Wait(Duration::from_millis(12)));
        throttle.record_batch(32, Duration::from_secs(4));
        assert_eq!(throttle.next_step(2_000_000), SweepStep::Wait(SweepThrottle::REST_MAX));
        assert_eq!(throttle.next_step(3_000_000), SweepStep::Copy(SweepThrottle::BATCH));
    }

    #[test]
    fn a_sweep_is_late_if_an_even_rate_would_have_saved_more() {
        let seconds = Duration::from_secs;
        let deadline = SweepDeadline { within: seconds(10), begun: seconds(5) };
        assert!(!deadline.is_late(0, 100, seconds(5)));
        assert!(deadline.is_late(9, 100, seconds(6)) && !deadline.is_late(10, 100, seconds(6)));
        assert!(deadline.is_late(99, 100, seconds(60)) && !deadline.is_late(0, 0, seconds(60)));
    }

    proptest! {
        #[test]
        fn no_guest_lengthens_a_save_by_half_or_keeps_the_sweep_from_its_floor(
            block_us in 3.0_f64..500.0,
            guest_rate in 0.0_f64..1.0,
        ) {
            let alone = SimulatedSave::new(true, block_us, 0.0).run();
            let beside = SimulatedSave::new(true, block_us, guest_rate).run();
            prop_assert!(
                beside.now_us <= 1.5 * alone.now_us,
                "{} against {}", beside.now_us, alone.now_us
            );
            prop_assert!(beside.rest_share() <= 1.01 - SweepThrottle::FLOOR_SHARE);
            prop_assert!(beside.longest_rest <= SweepThrottle::REST_MAX);
        }
    }
}
