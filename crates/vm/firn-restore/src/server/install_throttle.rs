//! Install throttle: decides when workers may install the remaining blocks of the units in memory.
//!
//! An install before the guest touches the block saves a fault. But if the guest never touches it,
//! the install only takes processor time and memory bandwidth from the guest: on two processors,
//! with faults that followed one another at once, each in another locality block, every fault took
//! half as long again. The faults show which of the two it is:
//!
//! ```text
//!   faults on new units, with pauses       |      |       |       |      workers run in every pause
//!   faults on new units, without pauses    |||||||||||||||||||||||||     an eighth of the time; all in the next pause
//!   faults on zero or settled pages        |||||||||||||||||||||||||     they do not count: no block comes with them
//!   a fault on a unit in memory            |||M                          workers run at once, for a while
//! ```
//!
//! A guest that stays within units soon faults on one that is in memory, if workers have not
//! installed it. Then workers run at once for [`EAGER_TIME`]; after that, another such fault starts
//! this time again. It costs that guest about one fault per [`EAGER_TIME`].

use std::time::Duration;

/// When the last fault of a guest was this long ago, workers may run.
pub(crate) const FAULT_PAUSE_MIN: Duration = Duration::from_micros(200);

/// How long workers run at once after a fault on a unit in memory.
const EAGER_TIME: Duration = Duration::from_millis(10);

/// The longest time in which workers install nothing though there is something. With
/// [`INSTALL_TIME`] it is the floor of workers: an eighth of the time, and so of what they can do.
const INSTALL_WAIT_MAX: Duration = Duration::from_micros(3500);

/// How long workers may install after that.
const INSTALL_TIME: Duration = Duration::from_micros(500);

/// Decides from the faults when workers may install.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct InstallThrottle {
    last_fault: Option<Duration>,
    open_until: Duration,
    last_install: Duration,
}

impl InstallThrottle {
    /// A vCPU begins to wait for a page that the image stores, or has just got it.
    pub(super) fn record_fault(&mut self, now: Duration) {
        self.last_fault = Some(now);
    }

    /// A vCPU waits for a page whose unit is in memory, so that workers could have installed it.
    pub(super) fn record_late_fault(&mut self, now: Duration) {
        self.open_until = self.open_until.max(now + EAGER_TIME);
    }

    /// Whether workers may install now.
    pub(super) fn is_open(&self, now: Duration) -> bool {
        let is_lull = self.last_fault.is_none_or(|fault| now >= fault + FAULT_PAUSE_MIN);
        is_lull || now < self.open_until || now >= self.last_install + INSTALL_WAIT_MAX
    }

    /// A worker installs.
    pub(super) fn record_install(&mut self, now: Duration) {
        if now >= self.last_install + INSTALL_WAIT_MAX {
            self.open_until = self.open_until.max(now + INSTALL_TIME);
        }
        self.last_install = now;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const US: Duration = Duration::from_micros(1);

    fn after_a_fault_at(us: u32) -> InstallThrottle {
        let mut rest = InstallThrottle { last_install: us * US, ..InstallThrottle::default() };
        rest.record_fault(us * US);
        rest
    }

    #[test]
    fn workers_run_in_a_lull() {
        assert!(InstallThrottle::default().is_open(US));
        let rest = after_a_fault_at(1000);
        assert!(!rest.is_open(1199 * US));
        assert!(rest.is_open(1200 * US));
    }

    #[test]
    fn workers_run_at_once_when_the_guest_faults_in_a_unit_again() {
        let mut rest = after_a_fault_at(1000);
        rest.record_late_fault(1005 * US);
        assert!(rest.is_open(1005 * US));
        rest.record_install(8000 * US);
        rest.record_install(10_900 * US);
        rest.record_fault(11_000 * US);
        assert!(rest.is_open(11_004 * US));
        assert!(!rest.is_open(11_005 * US));
    }

    #[test]
    fn workers_never_starve() {
        let mut rest = after_a_fault_at(0);
        for us in 1..3500 {
            rest.record_fault(us * US);
            assert!(!rest.is_open(us * US));
        }
        rest.record_fault(3500 * US);
        assert!(rest.is_open(3500 * US));
        rest.record_install(3500 * US);
        assert!(rest.is_open(3999 * US));
        rest.record_fault(4000 * US);
        assert!(!rest.is_open(4000 * US));
    }
}
