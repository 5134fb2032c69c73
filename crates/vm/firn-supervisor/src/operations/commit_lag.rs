//! How far a standby is behind: the age of the newest committed epoch, counted from its cut. A
//! failover at that moment would undo so much of the VM's time. Pure: the caller gives the time.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

/// The most cuts that wait for their commit. A protection has few: it waits for its backup.
const CUTS_MAX: usize = 256;

/// The cuts that are not committed yet, and the time of the newest one that is.
#[derive(Debug, Default)]
pub(crate) struct CommitLag {
    waiting: VecDeque<(u64, Instant)>,
    committed: Option<Instant>,
}

impl CommitLag {
    /// Adds an epoch that was cut at this time.
    pub(crate) fn add_cut(&mut self, epoch: u64, now: Instant) {
        if self.waiting.len() >= CUTS_MAX {
            self.waiting.pop_front();
        }
        self.waiting.push_back((epoch, now));
    }

    /// The backup would run this epoch.
    pub(crate) fn commit_epoch(&mut self, committed: u64) {
        while let Some(&(_, at)) = self.waiting.front().filter(|cut| cut.0 <= committed) {
            self.committed = Some(at);
            self.waiting.pop_front();
        }
    }

    /// The age of the newest committed epoch; `None` before there is one.
    pub(crate) fn age_at(&self, now: Instant) -> Option<Duration> {
        self.committed.map(|at| now.saturating_duration_since(at))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ms(ms: u64) -> Duration {
        Duration::from_millis(ms)
    }

    #[test]
    fn the_lag_is_the_age_of_the_newest_committed_cut() {
        let (mut lag, start) = (CommitLag::default(), Instant::now());
        assert_eq!(lag.age_at(start), None);
        (1..=3).for_each(|epoch| lag.add_cut(epoch, start + ms(100 * epoch)));
        assert_eq!(lag.age_at(start + ms(350)), None);
        lag.commit_epoch(1);
        assert_eq!(lag.age_at(start + ms(350)), Some(ms(250)));
        // Two at once; and one that was reported before.
        lag.commit_epoch(3);
        lag.commit_epoch(3);
        lag.commit_epoch(2);
        assert_eq!(lag.age_at(start + ms(350)), Some(ms(50)));
        assert_eq!(lag.age_at(start + ms(900)), Some(ms(600)), "it grows until the next commit");
    }

    #[test]
    fn a_backup_that_commits_nothing_costs_no_memory() {
        let (mut lag, start) = (CommitLag::default(), Instant::now());
        (1..=10_000).for_each(|epoch| lag.add_cut(epoch, start + ms(epoch)));
        assert_eq!(lag.waiting.len(), CUTS_MAX);
        lag.commit_epoch(10_000);
        assert_eq!(lag.age_at(start + ms(10_001)), Some(ms(1)));
    }
}
