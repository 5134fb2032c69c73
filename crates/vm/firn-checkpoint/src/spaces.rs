//! Recent address spaces: which address spaces of the guest were used last.
//!
//! A program will most likely write again the pages that it has written. If they are copied first,
//! and released, they need not fault (Sun, Blough, "Fast, Lightweight Virtual Machine
//! Checkpointing", section 4.4: "last n address spaces"). A vCPU shows only which address space it
//! is in now, so it is polled repeatedly for a while.

use std::thread;
use std::time::{Duration, Instant};

use firn_types::GuestPhys;
use firn_vmm::{QemuVm, QmpError};

/// How long vCPUs are polled.
const POLL_TIME: Duration = Duration::from_millis(200);
/// How often. Each poll costs the hypervisor's main thread about a millisecond.
const POLL_INTERVAL: Duration = Duration::from_millis(10);

/// Address spaces, the most recent one first.
#[derive(Debug, Default, PartialEq, Eq)]
struct RecentSpaces(Vec<GuestPhys>);

impl RecentSpaces {
    fn record_use(&mut self, root: GuestPhys) {
        self.0.retain(|known| *known != root);
        self.0.insert(0, root);
    }

    fn take_first(mut self, count: usize) -> Vec<GuestPhys> {
        self.0.truncate(count);
        self.0
    }
}

/// The top-level page tables of the address spaces that vCPUs used last, at most `count`.
pub(crate) fn used_last(vm: &mut QemuVm, count: usize) -> Result<Vec<GuestPhys>, QmpError> {
    let mut seen = RecentSpaces::default();
    let until = Instant::now() + POLL_TIME;
    while count > 0 && Instant::now() < until {
        vm.page_table_roots()?.into_iter().for_each(|root| seen.record_use(root.gpa));
        thread::sleep(POLL_INTERVAL);
    }
    Ok(seen.take_first(count))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn recent_spaces_are_first_and_listed_once() {
        let mut seen = RecentSpaces::default();
        [7, 8, 7, 9, 8, 8].into_iter().for_each(|root| seen.record_use(GuestPhys(root)));
        assert_eq!(seen.take_first(2), [GuestPhys(8), GuestPhys(9)]);
    }
}
