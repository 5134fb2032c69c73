//! Fill throttle: decides when the background fill may read.
//!
//! A guest that touches missing memory makes the restore progress by itself, and a fill beside it
//! only competes for the disk (Halite, section 6). So the fill waits until there was no fault for a
//! moment. While there is none it reads longer and longer runs, because then throughput counts. It
//! never starves: when nothing was read for [`PageServerRules::patience`], neither on demand nor in
//! the background, it reads one unit whatever the guest does. So a restore always ends.
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
pub struct PageServerRules {
    /// The fill may read when the last fault was at least this long ago.
    pub quiet: Duration,
    /// The maximum time in which nothing at all is read while there is something left to read.
    pub patience: Duration,
    /// Maximum number of units in one background read.
    pub run_max: u32,
    /// Maximum number of units whose bytes are held in memory at once (see [`super::UnitSource`]).
    pub held_max: u32,
    /// Whether memory is filled in the background at all.
    pub fill: bool,
    /// Maximum number of bytes of a unit.
    pub unit_bytes: u32,
    /// How many units the guest is expected to request beside the prefetched ones.
    pub expected_misses: u32,
    /// The storage latency that earlier restores found, if it is high.
    pub known_latency: Option<Duration>,
    /// Whether the server adapts to the measured storage: see [`super`].
    pub is_adaptive: bool,
    /// Whether the guest runs while units are prefetched: it may need the storage, or use other
    /// pages than predicted.
    pub guest_runs: bool,
    /// Whether prefetching may read everything, where that takes no longer than what was to be
    /// prefetched.
    pub may_read_all: bool,
    /// Install only the requested page, so that each first touch of a prefetched page faults and is
    /// counted.
    pub account_use: bool,
    /// The pause after the first failure of a read or install.
    pub retry_min: Duration,
    /// The longest pause before the retry of something that a vCPU waits for; and between
    /// background reads that fail.
    pub retry_requested_max: Duration,
    /// The longest pause before the retry of something that no vCPU waits for.
    pub retry_max: Duration,
}

impl Default for PageServerRules {
    fn default() -> Self {
        Self {
            quiet: Duration::from_millis(3),
            patience: Duration::from_millis(50),
            run_max: 16,
            held_max: 256,
            fill: true,
            unit_bytes: 64 << 10,
            expected_misses: 400,
            known_latency: None,
            is_adaptive: false,
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
pub(super) enum FillPermission {
    /// Read up to this many units now.
    Read(u32),
    /// Ask again at this time.
    At(Duration),
}

/// Decides from faults and reads when the fill may read.
#[derive(Clone, Copy, Debug)]
pub(super) struct FillThrottle {
    last_fault: Option<Duration>,
    last_read: Duration,
    run: u32,
}

impl FillThrottle {
    pub(super) fn new(now: Duration) -> Self {
        Self { last_fault: None, last_read: now, run: 1 }
    }

    /// A vCPU begins to wait for a page.
    pub(super) fn record_fault(&mut self, now: Duration) {
        self.last_fault = Some(now);
        self.run = 1;
    }

    /// When a vCPU last began to wait for a page.
    pub(super) fn last_fault(&self) -> Duration {
        self.last_fault.unwrap_or_default()
    }

    /// A unit was read: the restore progresses.
    pub(super) fn record_read(&mut self, now: Duration) {
        self.last_read = now;
    }

    /// Whether the fill may read now.
    ///
    /// A guest that waits for slow storage only seems to be quiet. So the fill does not read before
    /// `round` is over.
    pub(super) fn permit_read(
        &mut self,
        rules: &PageServerRules,
        round: Duration,
        now: Duration,
    ) -> FillPermission {
        let quiet = rules.quiet.max(round);
        let quiet_at = self.last_fault.map_or(Duration::ZERO, |fault| fault + quiet);
        if now >= quiet_at {
            let run = self.run;
            self.run = (run * 2).min(rules.run_max.max(1));
            return FillPermission::Read(run);
        }
        let patience_over = self.last_read + rules.patience;
        if now >= patience_over {
            return FillPermission::Read(1);
        }
        FillPermission::At(quiet_at.min(patience_over))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);

    #[test]
    fn runs_grow_while_it_is_quiet_and_start_over_at_a_fault() {
        let (rules, mut pace) = (PageServerRules::default(), FillThrottle::new(Duration::ZERO));
        let runs: Vec<_> = (0..6).map(|_| pace.permit_read(&rules, Duration::ZERO, MS)).collect();
        assert_eq!(runs, [1, 2, 4, 8, 16, 16].map(FillPermission::Read));
        pace.record_fault(MS);
        assert_eq!(pace.permit_read(&rules, Duration::ZERO, 2 * MS), FillPermission::At(4 * MS));
        assert_eq!(pace.permit_read(&rules, Duration::ZERO, 4 * MS), FillPermission::Read(1));
    }

    #[test]
    fn slow_storage_does_not_make_a_guest_quiet() {
        let (rules, mut pace) = (PageServerRules::default(), FillThrottle::new(Duration::ZERO));
        pace.record_fault(MS);
        assert_eq!(pace.permit_read(&rules, 20 * MS, 5 * MS), FillPermission::At(21 * MS));
    }

    #[test]
    fn patience_ends_even_if_faults_do_not() {
        let (rules, mut pace) = (PageServerRules::default(), FillThrottle::new(Duration::ZERO));
        for ms in 1..50 {
            pace.record_fault(ms * MS);
            assert!(matches!(
                pace.permit_read(&rules, Duration::ZERO, ms * MS),
                FillPermission::At(_)
            ));
        }
        pace.record_fault(50 * MS);
        assert_eq!(pace.permit_read(&rules, Duration::ZERO, 50 * MS), FillPermission::Read(1));
        pace.record_read(50 * MS);
        assert!(matches!(pace.permit_read(&rules, Duration::ZERO, 51 * MS), FillPermission::At(_)));
    }
}
