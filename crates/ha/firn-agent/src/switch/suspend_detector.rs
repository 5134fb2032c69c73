//! Detects that this agent did not run for a while: it was stopped, or its host slept. A VM's
//! frames that lay in the agent meanwhile were released under a lease that may have expired, and
//! the VM's backup may run by now: such frames are dropped.
//!
//! ```text
//!   supervisor: is the lease held? --- frame ---> | socket | agent | queue | ---> link
//!                                                    '-- stopped here: frames are dropped with
//!                                                        their connections, which begin anew
//! ```

use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use firn_membership::STALL_MAX;

use crate::peer_monitor::read_boot_clock;

/// Time between two reads of the clock.
pub const CLOCK_READ_INTERVAL: Duration = Duration::from_millis(100);

/// Counts the times that this agent did not run for too long.
#[derive(Debug, Default)]
pub struct SuspendDetector {
    /// When the clock was read last, in milliseconds.
    last_read: AtomicU64,
    suspends: AtomicU64,
}

impl SuspendDetector {
    /// Returns the count so far. The first caller after a suspend detects it.
    pub fn count_suspends(&self) -> u64 {
        self.count_suspends_at(read_boot_clock())
    }

    fn count_suspends_at(&self, now: Duration) -> u64 {
        let now = now.as_millis() as u64;
        let before = self.last_read.fetch_max(now, Ordering::SeqCst);
        if before != 0 && now.saturating_sub(before) > STALL_MAX.as_millis() as u64 {
            self.suspends.fetch_add(1, Ordering::SeqCst);
        }
        self.suspends.load(Ordering::SeqCst)
    }

    /// Checks frames that arrived when the count was `sleeps`.
    ///
    /// # Errors
    /// If the agent was suspended since: the frames must be dropped.
    pub fn check_since(&self, sleeps: u64) -> io::Result<()> {
        match self.count_suspends() == sleeps {
            true => Ok(()),
            false => {
                Err(io::Error::other("this agent did not run for a while: its frames are dropped"))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_host_sleep_is_detected_once() {
        let (awake, at) = (SuspendDetector::default(), Duration::from_millis);
        assert_eq!(awake.count_suspends_at(at(50_000)), 0);
        assert_eq!(awake.count_suspends_at(at(50_700)), 0);
        assert_eq!(awake.count_suspends_at(at(51_401)), 1);
        assert_eq!(awake.count_suspends_at(at(51_401)), 1);
        assert_eq!(awake.count_suspends_at(at(51_400)), 1, "somebody looked a moment before");
        assert_eq!(awake.count_suspends_at(at(99_000)), 2);
    }

    #[test]
    fn work_from_before_a_sleep_is_rejected() {
        let awake = SuspendDetector::default();
        let before = awake.count_suspends();
        assert!(awake.check_since(before).is_ok());
        awake.suspends.fetch_add(1, Ordering::SeqCst);
        assert!(awake.check_since(before).is_err());
        assert!(awake.check_since(awake.count_suspends()).is_ok());
    }
}
