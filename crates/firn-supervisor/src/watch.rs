//! Event sources: threads that each wait for one thing and turn it into an event.

use std::io;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use crossbeam_channel::Sender;
use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::iterator::Signals;

use crate::decisions::Event;
use crate::identity::ProcessHandle;
use crate::lock::Role;

/// The time that a save or restore that has lost its hypervisor gets to end.
const GRACE: Duration = Duration::from_secs(2);

/// Reports when the hypervisor has ended, and how.
pub(crate) fn hypervisor(handle: Arc<ProcessHandle>, events: Sender<Event>) -> io::Result<()> {
    spawn("hypervisor", move || {
        if handle.wait_gone_forever().is_ok() {
            let _ = events.send(Event::HypervisorGone(handle.exit()));
        }
    })
}

/// Reports when one of the guards has ended.
pub(crate) fn guard(handle: ProcessHandle, role: Role, events: Sender<Event>) -> io::Result<()> {
    spawn("guard", move || {
        if handle.wait_gone_forever().is_ok() {
            handle.exit();
            let _ = events.send(Event::GuardGone(role));
        }
    })
}

/// Reports, after a delay, that a guard that dies repeatedly may be started again.
pub(crate) fn guard_pause(role: Role, pause: Duration, events: Sender<Event>) -> io::Result<()> {
    spawn("guard", move || {
        thread::sleep(pause);
        let _ = events.send(Event::GuardDue(role));
    })
}

/// Reports SIGTERM and SIGINT.
pub(crate) fn signals(events: Sender<Event>) -> io::Result<()> {
    let mut signals = Signals::new([SIGTERM, SIGINT])?;
    spawn("signals", move || {
        for _ in signals.forever() {
            let _ = events.send(Event::Terminate);
        }
    })
}

/// Reports, after the grace period, that a save or restore had enough time to end.
pub(crate) fn grace(events: Sender<Event>) -> io::Result<()> {
    spawn("grace", move || {
        thread::sleep(GRACE);
        let _ = events.send(Event::GraceOver);
    })
}

/// Starts a named thread.
pub(crate) fn spawn(name: &str, run: impl FnOnce() + Send + 'static) -> io::Result<()> {
    thread::Builder::new().name(name.into()).spawn(run).map(drop)
}
