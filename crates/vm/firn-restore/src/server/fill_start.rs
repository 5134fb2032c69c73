//! Fill start: when a background fill that waits for the guest may begin.
//!
//! From object storage each byte that the fill reads costs money, and a share of a link that the
//! guest's own reads need. In the first seconds they need all of it. So such a fill waits until the
//! guest is responsive, by the definition of TTR(1 s, 90 %) (Zhang et al., VEE 2011, section 4.3): in
//! a window of a second, the guest waited for storage for a tenth of the time at most.
//!
//! ```text
//!   prefetches       ###########|
//!   demand reads     ## ### ##  | ### ##   #    #              #
//!   the fill                    | asks, and counts . . . . . . . . |## ## ## ##
//!                                                 '-- a second ----'
//! ```
//!
//! The fill asks for the first time when all prefetches have begun. A guest that does not become
//! responsive needs memory that no prefetch brings, and how much of it is not known. So once the
//! guest has waited for as long as a fill would take that uses all of the link, such a fill begins:
//! at most twice the time of the better choice (the rent-or-buy problem). In any case a fill begins
//! after a minute. Once it has begun, it stays so. A restore that is to learn what the guest needs
//! delays all of that.

use std::time::Duration;

/// The window in which a guest that is responsive hardly waits for storage.
const WINDOW: Duration = Duration::from_secs(1);
/// The parts of the window.
const PARTS: u32 = 10;
const PART: Duration = Duration::from_millis(100);
/// The maximum time of demand reads in a window of a responsive guest.
const WAITED_MAX: Duration = Duration::from_millis(100);
/// The longest time for which the fill waits.
const WAIT_MAX: Duration = Duration::from_secs(60);

/// How much of the link a fill uses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum FillShare {
    /// All of it: the guest waits for what only the fill brings.
    Whole,
    /// Half of it, at most.
    Half,
}

/// What the fill may do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum FillStartDecision {
    /// Ask again at this time.
    At(Duration),
    Begun(FillShare),
}

/// Decides when the fill begins.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct FillStart {
    begun: Option<FillShare>,
    /// How long the fill waits at least after it has asked first.
    delay: Duration,
    /// How long the guest has waited, in all.
    waited_in_all: Duration,
    /// When the fill asked first.
    asked: Option<Duration>,
    /// The time that demand reads took in each part of the last window, as a ring.
    waited: [Duration; PARTS as usize],
    /// The number of the newest part, counted from time zero.
    newest: u32,
    /// The end of the last demand read: those at the same time count once.
    last_end: Duration,
}

impl FillStart {
    /// A fill that waits for at least this long.
    pub(super) fn with_delay(delay: Duration) -> Self {
        Self { delay, ..Self::default() }
    }

    /// The guest waited for a read from storage.
    pub(super) fn record_demand_read(&mut self, began: Duration, ended: Duration) {
        if self.begun == Some(FillShare::Whole) {
            return;
        }
        let mut from = began.max(self.last_end);
        self.waited_in_all += ended.saturating_sub(from);
        self.last_end = self.last_end.max(ended);
        self.drop_old_parts(ended);
        while from < ended {
            let part = part_of(from);
            let until = ended.min(PART * (part + 1));
            if part + PARTS > self.newest {
                self.waited[(part % PARTS) as usize] += until - from;
            }
            from = until;
        }
    }

    /// Whether the fill may begin, or has begun. All of it would take `fill_time`.
    pub(super) fn check_start(
        &mut self,
        is_guest_waiting: bool,
        fill_time: Duration,
        now: Duration,
    ) -> FillStartDecision {
        let asked = *self.asked.get_or_insert(now);
        if now < asked + self.delay {
            return FillStartDecision::At(asked + self.delay);
        }
        if self.waited_in_all >= fill_time {
            self.begun = Some(FillShare::Whole);
        }
        if let Some(share) = self.begun {
            return FillStartDecision::Begun(share);
        }
        self.drop_old_parts(now);
        let waited: Duration = self.waited.iter().sum();
        let is_responsive = now >= asked + WINDOW && !is_guest_waiting && waited <= WAITED_MAX;
        if is_responsive || now >= asked + WAIT_MAX {
            self.begun = Some(FillShare::Half);
            return FillStartDecision::Begun(FillShare::Half);
        }
        FillStartDecision::At(now + PART)
    }

    fn drop_old_parts(&mut self, now: Duration) {
        let newest = part_of(now);
        for part in (self.newest + 1..=newest).take(PARTS as usize) {
            self.waited[(part % PARTS) as usize] = Duration::ZERO;
        }
        self.newest = self.newest.max(newest);
    }
}

fn part_of(time: Duration) -> u32 {
    u32::try_from(time.as_millis() / PART.as_millis()).unwrap_or(u32::MAX - PARTS)
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);
    /// A fill that takes longer than any guest of these tests waits.
    const LONG: Duration = Duration::from_secs(3600);
    const HALF: FillStartDecision = FillStartDecision::Begun(FillShare::Half);

    fn waits(decision: FillStartDecision) -> bool {
        matches!(decision, FillStartDecision::At(_))
    }

    /// When the fill begins, for a guest that has waited for `read` in each `every` until `until`.
    fn begins_at(read: Duration, every: Duration, until: Duration) -> Duration {
        let (mut start, mut next) = (FillStart::default(), 7 * MS);
        let mut now = Duration::ZERO;
        loop {
            while next + read <= now && next < until {
                start.record_demand_read(next, next + read);
                next += every;
            }
            let is_waiting = next < until && next <= now;
            match start.check_start(is_waiting, LONG, now) {
                FillStartDecision::At(then) => {
                    assert!(then > now);
                    now = then;
                }
                FillStartDecision::Begun(share) => {
                    assert_eq!(share, FillShare::Half);
                    return now;
                }
            }
        }
    }

    #[test]
    fn a_guest_that_does_not_wait_is_responsive_after_a_window() {
        assert_eq!(begins_at(MS, MS, Duration::ZERO), WINDOW);
    }

    #[test]
    fn a_guest_that_waits_seldom_is_responsive() {
        assert!(begins_at(20 * MS, 300 * MS, WAIT_MAX) <= 2 * WINDOW);
    }

    #[test]
    fn the_fill_waits_until_a_window_after_the_guest_has_its_working_set() {
        let busy = Duration::from_secs(7);
        let begun = begins_at(20 * MS, 25 * MS, busy);
        assert!(begun > busy + WINDOW / 2 && begun <= busy + WINDOW + 2 * PART, "{begun:?}");
    }

    #[test]
    fn a_guest_that_always_waits_is_filled_after_a_minute() {
        assert_eq!(begins_at(20 * MS, 25 * MS, 2 * WAIT_MAX), WAIT_MAX);
    }

    #[test]
    fn reads_at_the_same_time_count_once() {
        let mut start = FillStart::default();
        assert!(waits(start.check_start(false, 91 * MS, Duration::ZERO)));
        (0..4).for_each(|_| start.record_demand_read(500 * MS, 590 * MS));
        assert_eq!(start.check_start(false, 91 * MS, 1000 * MS), HALF);
    }

    #[test]
    fn a_read_that_runs_is_a_guest_that_waits() {
        let mut start = FillStart::default();
        assert!(waits(start.check_start(true, LONG, Duration::ZERO)));
        assert!(waits(start.check_start(true, LONG, 5000 * MS)));
        assert_eq!(start.check_start(false, LONG, 5100 * MS), HALF);
        // It does not end once it has begun.
        start.record_demand_read(5100 * MS, 9000 * MS);
        assert_eq!(start.check_start(true, LONG, 9000 * MS), HALF);
    }

    #[test]
    fn only_the_last_second_of_a_long_read_counts() {
        let mut start = FillStart::default();
        assert!(waits(start.check_start(false, LONG, Duration::ZERO)));
        start.record_demand_read(Duration::ZERO, 3000 * MS);
        assert!(waits(start.check_start(false, LONG, 3010 * MS)));
        assert!(waits(start.check_start(false, LONG, 3700 * MS)));
        assert_eq!(start.check_start(false, LONG, 3800 * MS), HALF);
    }

    #[test]
    fn a_guest_that_has_waited_as_long_as_a_fill_takes_is_filled_with_all_of_the_link() {
        let mut start = FillStart::default();
        let whole = FillStartDecision::Begun(FillShare::Whole);
        for at in 0..24 {
            assert!(waits(start.check_start(true, 500 * MS, 21 * at * MS)), "{at}");
            start.record_demand_read(21 * at * MS, (21 * at + 20) * MS);
        }
        assert!(waits(start.check_start(true, 500 * MS, 504 * MS)));
        start.record_demand_read(504 * MS, 524 * MS);
        assert_eq!(start.check_start(true, 500 * MS, 524 * MS), whole);
        // Less is left later, and it stays so.
        assert_eq!(start.check_start(false, LONG, 9000 * MS), whole);
    }

    #[test]
    fn a_fill_with_a_delay_does_not_begin_before() {
        let mut start = FillStart::with_delay(10 * WINDOW);
        assert_eq!(start.check_start(false, MS, MS), FillStartDecision::At(10 * WINDOW + MS));
        // Even if the guest has waited for longer than the fill takes.
        start.record_demand_read(MS, 500 * MS);
        assert!(waits(start.check_start(false, MS, 9 * WINDOW)));
        let whole = FillStartDecision::Begun(FillShare::Whole);
        assert_eq!(start.check_start(false, MS, 10 * WINDOW + MS), whole);
    }

    #[test]
    fn a_fill_with_half_of_the_link_becomes_one_with_all_of_it() {
        let mut start = FillStart::default();
        assert!(waits(start.check_start(false, 500 * MS, Duration::ZERO)));
        assert_eq!(start.check_start(false, 500 * MS, 1000 * MS), HALF);
        start.record_demand_read(1000 * MS, 1500 * MS);
        let whole = FillStartDecision::Begun(FillShare::Whole);
        assert_eq!(start.check_start(false, 500 * MS, 1500 * MS), whole);
    }
}
