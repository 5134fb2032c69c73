//! When workers may install the rest of the units in memory.
//!
//! Done before the guest asks, it saves a fault per memory block. But if the guest never goes there, it only takes
//! processor time and memory bandwidth from it: with faults that follow one another at once, each in another locality
//! block, on two processors every fault took half as long again. Which of the two it is, faults tell:
//!
//! ```text
//!   faults on new units, far apart         |      |       |       |      workers run in every lull
//!   faults on new units, close together    |||||||||||||||||||||||||     a moment now and then; all in the next lull
//!   a fault on a unit in memory            |||M                          keen: workers run at once, for a while
//! ```
//!
//! A guest that stays within units soon faults on one that is in memory, if workers have not been there. Then they are
//! kept keen for [`KEEN`]; after that, another such fault keeps them so. It costs that guest one fault in [`KEEN`] or so.

use std::time::Duration;

/// A guest that has run for this long since its last fault leaves room for workers.
pub(crate) const LULL: Duration = Duration::from_micros(200);

/// How long a fault on a unit in memory keeps workers keen.
const KEEN: Duration = Duration::from_millis(10);

/// The longest that workers install nothing though there is something: a restore always ends.
const PATIENCE: Duration = Duration::from_millis(20);

/// How long they then may.
const MOMENT: Duration = Duration::from_micros(500);

/// Watches faults for the workers.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Rest {
    last_fault: Option<Duration>,
    open_until: Duration,
    last_install: Duration,
}

impl Rest {
    /// The guest waits for a page, or has just got it.
    pub(super) fn fault(&mut self, now: Duration) {
        self.last_fault = Some(now);
    }

    /// The guest waits for a page that is in memory and could have been installed.
    pub(super) fn late(&mut self, now: Duration) {
        self.open_until = self.open_until.max(now + KEEN);
    }

    /// Whether workers may install now.
    pub(super) fn is_open(&self, now: Duration) -> bool {
        let is_lull = self.last_fault.is_none_or(|fault| now >= fault + LULL);
        is_lull || now < self.open_until || now >= self.last_install + PATIENCE
    }

    /// A worker installs.
    pub(super) fn install(&mut self, now: Duration) {
        if now >= self.last_install + PATIENCE {
            self.open_until = self.open_until.max(now + MOMENT);
        }
        self.last_install = now;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const US: Duration = Duration::from_micros(1);

    fn after_a_fault_at(us: u32) -> Rest {
        let mut rest = Rest { last_install: us * US, ..Rest::default() };
        rest.fault(us * US);
        rest
    }

    #[test]
    fn workers_run_in_a_lull() {
        assert!(Rest::default().is_open(US));
        let rest = after_a_fault_at(1000);
        assert!(!rest.is_open(1199 * US));
        assert!(rest.is_open(1200 * US));
    }

    #[test]
    fn workers_run_at_once_when_the_guest_comes_back_to_a_unit() {
        let mut rest = after_a_fault_at(1000);
        rest.late(1005 * US);
        assert!(rest.is_open(1005 * US));
        rest.install(10_900 * US);
        rest.fault(11_000 * US);
        assert!(rest.is_open(11_004 * US));
        assert!(!rest.is_open(11_005 * US));
    }

    #[test]
    fn workers_never_starve() {
        let mut rest = after_a_fault_at(0);
        for us in 1..20_000 {
            rest.fault(us * US);
            assert!(!rest.is_open(us * US));
        }
        rest.fault(20_000 * US);
        assert!(rest.is_open(20_000 * US));
        rest.install(20_000 * US);
        assert!(rest.is_open(20_499 * US));
        rest.fault(20_500 * US);
        assert!(!rest.is_open(20_500 * US));
    }
}
