//! The clock that leases are counted by.

use std::time::Duration;

use rustix::time::{ClockId, clock_gettime};

/// Now, by `CLOCK_BOOTTIME`, which goes on while the host sleeps and the process is stopped.
pub fn now() -> Duration {
    let now = clock_gettime(ClockId::Boottime);
    Duration::new(now.tv_sec.unsigned_abs(), now.tv_nsec.unsigned_abs() as u32)
}
