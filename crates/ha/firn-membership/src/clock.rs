//! The clock that leases are measured by.

use std::time::Duration;

use rustix::time::{ClockId, clock_gettime};

/// Reads `CLOCK_BOOTTIME`, which advances while the host sleeps and while the process is stopped.
pub fn read_boot_clock() -> Duration {
    let now = clock_gettime(ClockId::Boottime);
    Duration::new(now.tv_sec.unsigned_abs(), now.tv_nsec.unsigned_abs() as u32)
}
