//! Install lock: keeps reads of events apart from installs of pages.
//!
//! When the guest gives a page back, the kernel blocks the thread that does so until the event is
//! *read*. The moment the event is read, the kernel resumes the thread, and the page disappears. A
//! worker may have decided before that moment to install the page. If it installed the page after
//! it, the page would have its old contents again, where there must be zeros. So workers share the
//! lock while they decide and install, and the handler reads events with the lock for itself:
//!
//! ```text
//!   worker    lock_shared [ still missing? -> UFFDIO_COPY ] unlock
//!   handler                                                 lock_exclusive [ read -> record removed pages ] unlock
//! ```
//!
//! If the handler always waited for workers, every fault would cost some microseconds. But while a
//! page is being given back and the event is not read, every install fails (`EAGAIN`), and a check for
//! that takes a tenth of a microsecond. So if workers hold the lock and no event waits, the handler
//! reads without the lock. One case remains: an event comes between the check and the read, and in the
//! same moment a worker is delayed between its decision and its install, for longer than it takes to
//! give a page back. The guest then finds the page's old contents, which it must expect of a page
//! it gave back anyway.

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::Duration;

/// How often a thread that waits for the lock checks it before it sleeps between checks.
const SPIN_CHECKS: u32 = 100;

/// The sleep between checks after that.
const PAUSE: Duration = Duration::from_micros(20);

/// A lock that workers share to install pages, and the handler has alone to read events.
#[derive(Debug, Default)]
pub(crate) struct InstallLock {
    shared_holds: AtomicU32,
    is_exclusive: AtomicBool,
}

/// A share of the lock: the handler does not have it meanwhile.
pub(crate) struct SharedHold<'a>(&'a InstallLock);

/// The whole lock: no worker has a share of it meanwhile.
pub(crate) struct ExclusiveHold<'a>(&'a InstallLock);

impl InstallLock {
    /// Takes a share of the lock, as soon as the handler does not hold it.
    pub(crate) fn lock_shared(&self) -> SharedHold<'_> {
        loop {
            self.shared_holds.fetch_add(1, Ordering::SeqCst);
            let hold = SharedHold(self);
            if !self.is_exclusive.load(Ordering::SeqCst) {
                return hold;
            }
            drop(hold);
            self.wait_while(|lock| lock.is_exclusive.load(Ordering::SeqCst));
        }
    }

    /// Takes the whole lock, and waits until no worker has a share. If a worker has one, and
    /// `is_urgent` returns false, it does not take the lock, and returns `None`. Only one thread may
    /// call it.
    pub(crate) fn lock_exclusive(
        &self,
        is_urgent: impl FnOnce() -> bool,
    ) -> Option<ExclusiveHold<'_>> {
        self.is_exclusive.store(true, Ordering::SeqCst);
        let hold = ExclusiveHold(self);
        let is_shared = |lock: &Self| lock.shared_holds.load(Ordering::SeqCst) > 0;
        if is_shared(self) {
            if !is_urgent() {
                return None;
            }
            self.wait_while(is_shared);
        }
        Some(hold)
    }

    fn wait_while(&self, condition: impl Fn(&Self) -> bool) {
        let mut checks = 0;
        while condition(self) {
            checks += 1;
            match checks {
                ..SPIN_CHECKS => std::hint::spin_loop(),
                _ => std::thread::sleep(PAUSE),
            }
        }
    }
}

impl Drop for SharedHold<'_> {
    fn drop(&mut self) {
        self.0.shared_holds.fetch_sub(1, Ordering::SeqCst);
    }
}

impl Drop for ExclusiveHold<'_> {
    fn drop(&mut self) {
        self.0.is_exclusive.store(false, Ordering::SeqCst);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_worker_shares_an_exclusive_lock() {
        let lock = InstallLock::default();
        let (value, stop) = (AtomicU32::new(0), AtomicBool::new(false));
        std::thread::scope(|scope| {
            for _ in 0..3 {
                scope.spawn(|| {
                    while !stop.load(Ordering::Relaxed) {
                        let _hold = lock.lock_shared();
                        value.fetch_add(1, Ordering::SeqCst);
                    }
                });
            }
            for _ in 0..2000 {
                let hold = lock.lock_exclusive(|| true).unwrap();
                let before = value.load(Ordering::SeqCst);
                std::hint::spin_loop();
                assert_eq!(value.load(Ordering::SeqCst), before);
                drop(hold);
            }
            stop.store(true, Ordering::Relaxed);
        });
    }

    #[test]
    fn a_shared_lock_is_not_taken_without_need() {
        let lock = InstallLock::default();
        let hold = lock.lock_shared();
        assert!(lock.lock_exclusive(|| false).is_none());
        drop((hold, lock.lock_shared()));
        assert!(lock.lock_exclusive(|| false).is_some());
    }
}
