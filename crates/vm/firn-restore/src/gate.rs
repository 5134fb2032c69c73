//! Install gate: keeps reads of events apart from installs of pages.
//!
//! When the guest gives a page back, the kernel blocks the thread that does so until the event is
//! *read*, and resumes it at once then: the page disappears. A worker that decided to install the
//! page before, and does so after, would restore its old contents, where there must be zeros. So a
//! worker decides and installs inside the gate, and the handler reads with the gate closed:
//!
//! ```text
//!   worker    enter [ still missing? -> UFFDIO_COPY ] leave
//!   handler                                                close [ read -> settle what was given back ] open
//! ```
//!
//! Waiting for workers would cost every fault some microseconds. But while a page is being given
//! back and the event is not read, every install fails (`EAGAIN`), and checking for that takes a
//! tenth of a microsecond. So if workers are inside and no event waits, the handler reads with the
//! gate open. One case remains: an event comes between the check and the read, and in the same
//! moment a worker is delayed between its decision and its install, for longer than it takes to
//! give a page back. The guest then finds the page's old contents, which it must expect of a page
//! it gave back anyway.

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::Duration;

/// How often the handler checks for workers inside before it sleeps between checks.
const SPIN_CHECKS: u32 = 100;

/// Pause between checks after that.
const PAUSE: Duration = Duration::from_micros(20);

/// The gate between installs and reads of events.
#[derive(Debug, Default)]
pub(crate) struct InstallGate {
    inside: AtomicU32,
    closed: AtomicBool,
}

/// A thread that holds this is inside the gate.
pub(crate) struct InstallPermit<'a>(&'a InstallGate);

/// The gate is closed and no thread is inside.
pub(crate) struct ClosedGate<'a>(&'a InstallGate);

impl InstallGate {
    /// Enters, as soon as the gate is open.
    pub(crate) fn enter_gate(&self) -> InstallPermit<'_> {
        loop {
            self.inside.fetch_add(1, Ordering::SeqCst);
            let inside = InstallPermit(self);
            if !self.closed.load(Ordering::SeqCst) {
                return inside;
            }
            drop(inside);
            self.wait_while(|gate| gate.closed.load(Ordering::SeqCst));
        }
    }

    /// Closes the gate and waits until no thread is inside. Leaves it open, and returns `None`, if
    /// a thread is inside and `is_urgent` returns false. Only one thread may close it.
    pub(crate) fn close_gate(&self, is_urgent: impl FnOnce() -> bool) -> Option<ClosedGate<'_>> {
        self.closed.store(true, Ordering::SeqCst);
        let closed = ClosedGate(self);
        let is_inside = |gate: &Self| gate.inside.load(Ordering::SeqCst) > 0;
        if is_inside(self) {
            if !is_urgent() {
                return None;
            }
            self.wait_while(is_inside);
        }
        Some(closed)
    }

    fn wait_while(&self, condition: impl Fn(&Self) -> bool) {
        let mut looks = 0;
        while condition(self) {
            looks += 1;
            match looks {
                ..SPIN_CHECKS => std::hint::spin_loop(),
                _ => std::thread::sleep(PAUSE),
            }
        }
    }
}

impl Drop for InstallPermit<'_> {
    fn drop(&mut self) {
        self.0.inside.fetch_sub(1, Ordering::SeqCst);
    }
}

impl Drop for ClosedGate<'_> {
    fn drop(&mut self) {
        self.0.closed.store(false, Ordering::SeqCst);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_thread_is_inside_a_closed_gate() {
        let gate = InstallGate::default();
        let (value, stop) = (AtomicU32::new(0), AtomicBool::new(false));
        std::thread::scope(|scope| {
            for _ in 0..3 {
                scope.spawn(|| {
                    while !stop.load(Ordering::Relaxed) {
                        let _inside = gate.enter_gate();
                        value.fetch_add(1, Ordering::SeqCst);
                    }
                });
            }
            for _ in 0..2000 {
                let closed = gate.close_gate(|| true).unwrap();
                let before = value.load(Ordering::SeqCst);
                std::hint::spin_loop();
                assert_eq!(value.load(Ordering::SeqCst), before);
                drop(closed);
            }
            stop.store(true, Ordering::Relaxed);
        });
    }

    #[test]
    fn it_stays_open_if_there_is_no_need() {
        let gate = InstallGate::default();
        let inside = gate.enter_gate();
        assert!(gate.close_gate(|| false).is_none());
        drop((inside, gate.enter_gate()));
        assert!(gate.close_gate(|| false).is_some());
    }
}
