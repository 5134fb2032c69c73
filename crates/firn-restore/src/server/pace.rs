//! When the background fill may read.
//!
//! A guest that touches missing memory makes the restore progress by itself, and a fill beside it only competes for the
//! disk (Halite, section 6). So the fill waits until faults have been quiet for a moment; while they stay quiet it reads
//! longer and longer runs, because then throughput counts. It never starves: when nothing was read for
//! [`Rules::patience`], neither on demand nor in the background, it reads one unit whatever the guest does. So a
//! restore always ends.
//!
//! ```text
//!   faults   |||| ||||||| ||   |  | | | (all on pages in memory)
//!   on disk  #### ####### ##   |                                #
//!   fill                       1                    1            1 2 4 8 16 16 16
//!                              ^ patience over      ^            ^ quiet
//! ```

use std::time::Duration;

/// The limits by which the page server works.
#[derive(Clone, Copy, Debug)]
pub struct Rules {
    /// Faults this long ago no longer hold the background fill back.
    pub quiet: Duration,
    /// The longest that nothing at all is read while there is something left to read.
    pub patience: Duration,
    /// Most units in one background read.
    pub run_max: u32,
    /// Most units whose bytes are held in memory at once (see [`super::Source`]).
    pub held_max: u32,
    /// Whether memory is filled in the background at all.
    pub fill: bool,
    /// Whether reads on demand bring their neighbours where storage is slow to get there.
    pub may_widen: bool,
    /// Whether reading ahead ends when the guest goes elsewhere.
    pub may_diverge: bool,
    /// Install nothing but the very page that faulted, so that each first touch of a prefetched page is seen.
    pub account_use: bool,
}

impl Default for Rules {
    fn default() -> Self {
        Self {
            quiet: Duration::from_millis(3),
            patience: Duration::from_millis(50),
            run_max: 16,
            held_max: 256,
            fill: true,
            may_widen: false,
            may_diverge: false,
            account_use: false,
        }
    }
}

/// What the fill may do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Leave {
    /// Read up to this many units now.
    Read(u32),
    /// Ask again at this time.
    At(Duration),
}

/// Watches faults and reads.
#[derive(Clone, Copy, Debug)]
pub(super) struct Pace {
    last_fault: Option<Duration>,
    last_read: Duration,
    run: u32,
    alone: Mean,
    in_sequence: Mean,
}

/// A read of at least so many units counts as one in sequence.
const LONG: u32 = 4;
/// A single read that takes at least so long is one of a disk.
const SLOW: Duration = Duration::from_millis(2);
/// Units read on demand from a disk whose speed in sequence is not known yet.
const UNKNOWN: u32 = 4;

/// A mean of times; zero of none.
#[derive(Clone, Copy, Debug, Default)]
struct Mean {
    sum: Duration,
    count: u32,
}

impl Mean {
    fn add(&mut self, time: Duration, count: u32) {
        self.sum += time;
        self.count += count;
    }

    fn mean(&self) -> Duration {
        self.sum.checked_div(self.count).unwrap_or_default()
    }
}

impl Pace {
    pub(super) fn new(now: Duration) -> Self {
        Self {
            last_fault: None,
            last_read: now,
            run: 1,
            alone: Mean::default(),
            in_sequence: Mean::default(),
        }
    }

    /// The guest waits for a page.
    pub(super) fn fault(&mut self, now: Duration) {
        self.last_fault = Some(now);
        self.run = 1;
    }

    /// Something was read: the restore progresses.
    pub(super) fn read(&mut self, now: Duration) {
        self.last_read = now;
    }

    /// So many neighbouring units were read in this time.
    pub(super) fn took(&mut self, units: u32, took: Duration) {
        match units {
            1 => self.alone.add(took, 1),
            LONG.. => self.in_sequence.add(took, units),
            _ => {}
        }
    }

    /// How many units to read where the guest waits for one. On a disk the heads' way takes as long as reading ten
    /// units in sequence: reading as long as it took to get there costs twice the time at most, and often saves the
    /// next way.
    pub(super) fn run_on_demand(&self, rules: &Rules) -> u32 {
        let alone = self.alone.mean();
        let worthwhile = match self.in_sequence.mean() {
            _ if alone < SLOW => 1,
            unit if unit.is_zero() => UNKNOWN,
            unit => (alone.as_micros() / unit.as_micros().max(1)) as u32,
        };
        worthwhile.clamp(1, rules.run_max.max(1))
    }

    /// How long a guest makes no fault before it counts as quiet. One that waits for slow storage only seems to be.
    fn quiet(&self, rules: &Rules) -> Duration {
        rules.quiet.max(self.alone.mean() * 2)
    }

    /// Whether the fill may read now.
    pub(super) fn ask(&mut self, rules: &Rules, now: Duration) -> Leave {
        let quiet = self.quiet(rules);
        let quiet_at = self.last_fault.map_or(Duration::ZERO, |fault| fault + quiet);
        if now >= quiet_at {
            let run = self.run;
            self.run = (run * 2).min(rules.run_max.max(1));
            return Leave::Read(run);
        }
        let patience_over = self.last_read + rules.patience;
        if now >= patience_over {
            return Leave::Read(1);
        }
        Leave::At(quiet_at.min(patience_over))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);

    #[test]
    fn runs_grow_while_it_is_quiet_and_start_over_at_a_fault() {
        let (rules, mut pace) = (Rules::default(), Pace::new(Duration::ZERO));
        let runs: Vec<_> = (0..6).map(|_| pace.ask(&rules, MS)).collect();
        assert_eq!(runs, [1, 2, 4, 8, 16, 16].map(Leave::Read));
        pace.fault(MS);
        assert_eq!(pace.ask(&rules, 2 * MS), Leave::At(4 * MS));
        assert_eq!(pace.ask(&rules, 4 * MS), Leave::Read(1));
    }

    #[test]
    fn a_disk_reads_on_for_as_long_as_it_took_to_get_there() {
        let (rules, mut pace) = (Rules::default(), Pace::new(Duration::ZERO));
        assert_eq!(pace.run_on_demand(&rules), 1);
        pace.took(1, 6 * MS);
        assert_eq!(pace.run_on_demand(&rules), UNKNOWN);
        pace.took(16, 8 * MS);
        assert_eq!(pace.run_on_demand(&rules), 12);
    }

    #[test]
    fn storage_that_answers_quickly_reads_what_is_asked_for() {
        let (rules, mut pace) = (Rules::default(), Pace::new(Duration::ZERO));
        pace.took(1, MS);
        pace.took(16, MS);
        assert_eq!(pace.run_on_demand(&rules), 1);
    }

    #[test]
    fn slow_storage_does_not_make_a_guest_quiet() {
        let (rules, mut pace) = (Rules::default(), Pace::new(Duration::ZERO));
        pace.fault(MS);
        pace.took(1, 8 * MS);
        pace.took(1, 12 * MS);
        assert_eq!(pace.ask(&rules, 5 * MS), Leave::At(21 * MS));
    }

    #[test]
    fn patience_ends_even_if_faults_do_not() {
        let (rules, mut pace) = (Rules::default(), Pace::new(Duration::ZERO));
        for ms in 1..50 {
            pace.fault(ms * MS);
            assert!(matches!(pace.ask(&rules, ms * MS), Leave::At(_)));
        }
        pace.fault(50 * MS);
        assert_eq!(pace.ask(&rules, 50 * MS), Leave::Read(1));
        pace.read(50 * MS);
        assert!(matches!(pace.ask(&rules, 51 * MS), Leave::At(_)));
    }
}
