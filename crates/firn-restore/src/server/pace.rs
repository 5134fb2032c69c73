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
    /// Bytes of a unit at most.
    pub unit_bytes: u32,
    /// How many units the guest is expected to ask for beside what is read ahead.
    pub missed: u32,
    /// What getting to storage has cost other restores, if it is far.
    pub way: Option<Duration>,
    /// Whether it goes by what the storage turns out to be like: see [`super`].
    pub adapts: bool,
    /// Whether the guest runs while units are read ahead: it may need the storage, or go elsewhere.
    pub guest_runs: bool,
    /// Whether reading ahead may bring in everything, where that takes no longer than what was to be read ahead.
    pub may_read_all: bool,
    /// Install nothing but the very page that faulted, so that each first touch of a prefetched page is seen.
    pub account_use: bool,
    /// The pause after the first failure of a read or install.
    pub retry_min: Duration,
    /// The longest pause before something is tried again that a vCPU waits for; and between background reads that fail.
    pub retry_requested_max: Duration,
    /// The longest pause before something is tried again that no vCPU waits for.
    pub retry_max: Duration,
}

impl Default for Rules {
    fn default() -> Self {
        Self {
            quiet: Duration::from_millis(3),
            patience: Duration::from_millis(50),
            run_max: 16,
            held_max: 256,
            fill: true,
            unit_bytes: 64 << 10,
            missed: 400,
            way: None,
            adapts: false,
            guest_runs: false,
            may_read_all: false,
            account_use: false,
            retry_min: Duration::from_millis(100),
            retry_requested_max: Duration::from_secs(1),
            retry_max: Duration::from_secs(10),
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
}

impl Pace {
    pub(super) fn new(now: Duration) -> Self {
        Self { last_fault: None, last_read: now, run: 1 }
    }

    /// The guest waits for a page.
    pub(super) fn fault(&mut self, now: Duration) {
        self.last_fault = Some(now);
        self.run = 1;
    }

    /// When the guest last began to wait for a page.
    pub(super) fn last_fault(&self) -> Duration {
        self.last_fault.unwrap_or_default()
    }

    /// Something was read: the restore progresses.
    pub(super) fn read(&mut self, now: Duration) {
        self.last_read = now;
    }

    /// Whether the fill may read now.
    ///
    /// A guest that waits for slow storage only seems to be quiet: not before `round`.
    pub(super) fn ask(&mut self, rules: &Rules, round: Duration, now: Duration) -> Leave {
        let quiet = rules.quiet.max(round);
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
        let runs: Vec<_> = (0..6).map(|_| pace.ask(&rules, Duration::ZERO, MS)).collect();
        assert_eq!(runs, [1, 2, 4, 8, 16, 16].map(Leave::Read));
        pace.fault(MS);
        assert_eq!(pace.ask(&rules, Duration::ZERO, 2 * MS), Leave::At(4 * MS));
        assert_eq!(pace.ask(&rules, Duration::ZERO, 4 * MS), Leave::Read(1));
    }

    #[test]
    fn slow_storage_does_not_make_a_guest_quiet() {
        let (rules, mut pace) = (Rules::default(), Pace::new(Duration::ZERO));
        pace.fault(MS);
        assert_eq!(pace.ask(&rules, 20 * MS, 5 * MS), Leave::At(21 * MS));
    }

    #[test]
    fn patience_ends_even_if_faults_do_not() {
        let (rules, mut pace) = (Rules::default(), Pace::new(Duration::ZERO));
        for ms in 1..50 {
            pace.fault(ms * MS);
            assert!(matches!(pace.ask(&rules, Duration::ZERO, ms * MS), Leave::At(_)));
        }
        pace.fault(50 * MS);
        assert_eq!(pace.ask(&rules, Duration::ZERO, 50 * MS), Leave::Read(1));
        pace.read(50 * MS);
        assert!(matches!(pace.ask(&rules, Duration::ZERO, 51 * MS), Leave::At(_)));
    }
}
