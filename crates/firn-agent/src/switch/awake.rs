//! Whether this agent stood still: it was stopped, or its host was. A VM's frames that lay here meanwhile were let out under a lease that may be
//! over, and its backup may run by now: they go nowhere any more.
//!
//! ```text
//!   supervisor: is the lease held? --- frame ---> | socket | agent | queue | ---> link
//!                                                    '-- stopped here: dropped with their connections, which begin anew
//! ```

use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use crate::heartbeat::now;

/// How long nobody has to look at the clock for that: as for heartbeats (`detect`). It is far less than passes from the end of a lease until
/// a backup runs.
const STILL_MAX: Duration = Duration::from_secs(1);

/// How often somebody looks.
pub const LOOK_EVERY: Duration = Duration::from_millis(100);

/// Counts how often it stood still.
#[derive(Debug, Default)]
pub struct Awake {
    /// When somebody looked last, in milliseconds.
    looked: AtomicU64,
    sleeps: AtomicU64,
}

impl Awake {
    /// How often it stood still so far. Whoever asks first after that finds it out.
    pub fn sleeps(&self) -> u64 {
        self.sleeps_at(now())
    }

    fn sleeps_at(&self, now: Duration) -> u64 {
        let now = now.as_millis() as u64;
        let before = self.looked.fetch_max(now, Ordering::SeqCst);
        if before != 0 && now.saturating_sub(before) > STILL_MAX.as_millis() as u64 {
            self.sleeps.fetch_add(1, Ordering::SeqCst);
        }
        self.sleeps.load(Ordering::SeqCst)
    }

    /// What has come since `sleeps` may go on.
    ///
    /// # Errors
    /// If it stood still since.
    pub fn check(&self, sleeps: u64) -> io::Result<()> {
        match self.sleeps() == sleeps {
            true => Ok(()),
            false => Err(io::Error::other("this agent stood still: what lay here goes nowhere")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sleep_is_noticed_by_whoever_looks_first_and_counts_once() {
        let (awake, at) = (Awake::default(), Duration::from_millis);
        assert_eq!(awake.sleeps_at(at(50_000)), 0);
        assert_eq!(awake.sleeps_at(at(51_000)), 0);
        assert_eq!(awake.sleeps_at(at(52_001)), 1);
        assert_eq!(awake.sleeps_at(at(52_001)), 1);
        assert_eq!(awake.sleeps_at(at(52_000)), 1, "somebody looked a moment before");
        assert_eq!(awake.sleeps_at(at(99_000)), 2);
    }

    #[test]
    fn what_lay_here_goes_nowhere_and_what_comes_does() {
        let awake = Awake::default();
        let before = awake.sleeps();
        assert!(awake.check(before).is_ok());
        awake.sleeps.fetch_add(1, Ordering::SeqCst);
        assert!(awake.check(before).is_err());
        assert!(awake.check(awake.sleeps()).is_ok());
    }
}
