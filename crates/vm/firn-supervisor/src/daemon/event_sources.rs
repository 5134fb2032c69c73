//! Event sources: threads that each wait for one thing and turn it into an event.

use std::io;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use crossbeam_channel::Sender;
use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::iterator::Signals;

use crate::daemon::decisions::SupervisorEvent;
use crate::processes::identity::ProcessHandle;
use crate::processes::lock::ProcessRole;

/// The time that a save or restore that has lost its hypervisor gets to end.
const GRACE_PERIOD: Duration = Duration::from_secs(2);

/// Reports when the hypervisor has ended, and how.
pub(crate) fn watch_hypervisor(
    handle: Arc<ProcessHandle>,
    events: Sender<SupervisorEvent>,
) -> io::Result<()> {
    spawn_thread("hypervisor", move || {
        if handle.wait_gone_forever().is_ok() {
            let _ = events.send(SupervisorEvent::HypervisorGone(handle.reap_exit()));
        }
    })
}

/// Reports when one of the guards has ended.
pub(crate) fn watch_guard(
    handle: ProcessHandle,
    role: ProcessRole,
    events: Sender<SupervisorEvent>,
) -> io::Result<()> {
    spawn_thread("guard", move || {
        if handle.wait_gone_forever().is_ok() {
            handle.reap_exit();
            let _ = events.send(SupervisorEvent::GuardGone(role));
        }
    })
}

/// Reports, after a delay, that a guard that dies repeatedly may be started again.
pub(crate) fn delay_guard(
    role: ProcessRole,
    delay: Duration,
    events: Sender<SupervisorEvent>,
) -> io::Result<()> {
    spawn_thread("guard", move || {
        thread::sleep(delay);
        let _ = events.send(SupervisorEvent::GuardDue(role));
    })
}

/// Reports SIGTERM and SIGINT.
pub(crate) fn watch_signals(events: Sender<SupervisorEvent>) -> io::Result<()> {
    let mut signals = Signals::new([SIGTERM, SIGINT])?;
    spawn_thread("signals", move || {
        for _ in signals.forever() {
            let _ = events.send(SupervisorEvent::Terminate);
        }
    })
}

/// Reports, after the grace period, that a save or restore had enough time to end.
pub(crate) fn start_grace_period(events: Sender<SupervisorEvent>) -> io::Result<()> {
    spawn_thread("grace", move || {
        thread::sleep(GRACE_PERIOD);
        let _ = events.send(SupervisorEvent::GraceOver);
    })
}

/// Starts a named thread.
pub(crate) fn spawn_thread(name: &str, run: impl FnOnce() + Send + 'static) -> io::Result<()> {
    thread::Builder::new().name(name.into()).spawn(run).map(drop)
}
