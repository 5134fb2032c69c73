//! The guard: a process that does nothing but wait for the supervisor to die, and start another.
//!
//! ```text
//!      supervisor  <--- pidfd ---  guard          each waits on the other's pidfd,
//!          |        --- pidfd --->   |            and starts the other anew when it dies
//!          '-- dies: guard runs  `firn __supervise NAME --recover`
//!                          '-- dies: supervisor runs `firn __guard NAME`
//! ```
//!
//! Both at once: the next `firn` command that looks at the VM finds that nobody holds the supervisor's role and starts
//! a successor itself. A supervisor that has nothing left to look after writes so into its journal before it goes.

use std::collections::VecDeque;
use std::io;
use std::process::Child;
use std::time::{Duration, Instant};

use crate::identity::{ProcessHandle, ProcessIdentity};
use crate::journal::Journal;
use crate::lock::{self, Role, RoleLock};
use crate::name::VmName;
use crate::runtime::{RuntimeDir, VmDir};
use crate::spawn;

/// A supervisor that dies this often within [`RESTART_WINDOW`] dies of something that a restart does not cure.
const RESTARTS_MAX: usize = 5;

/// The time over which restarts are counted.
const RESTART_WINDOW: Duration = Duration::from_secs(10);

/// The guard of one VM; returns when there is nothing left to guard.
pub fn guard(base: &RuntimeDir, name: &VmName) -> io::Result<()> {
    spawn::detach_session();
    let vm = base.vm(name);
    if !vm.exists() {
        return Ok(());
    }
    let Some(_role) = RoleLock::try_take(vm.path(), Role::Guard)? else { return Ok(()) };
    crate::log::open(&vm)?;
    let mut restarts = Restarts::default();
    while let Some(handle) = watched(base, &vm, &mut restarts)? {
        handle.wait_gone_forever()?;
        handle.exit();
    }
    Ok(())
}

/// The supervisor to watch: the one there is, or a new one; `None` when none is needed.
fn watched(
    base: &RuntimeDir,
    vm: &VmDir,
    restarts: &mut Restarts,
) -> io::Result<Option<ProcessHandle>> {
    while needed(vm) {
        if let Some(supervisor) = running(vm)? {
            return Ok(Some(supervisor));
        }
        if !restarts.allow(Instant::now()) {
            tracing::error!("the supervisor died {RESTARTS_MAX} times in a row: giving up");
            return Ok(None);
        }
        tracing::warn!("the supervisor has died: starting another");
        if let Some(child) = handle_of(&spawn::successor(base, vm)?)? {
            return Ok(Some(child));
        }
    }
    Ok(None)
}

/// Whether the journal names something to look after.
fn needed(vm: &VmDir) -> bool {
    match Journal::load(&vm.journal()) {
        Ok(Some(journal)) => !journal.phase.is_over(),
        Ok(None) => false,
        Err(_) => vm.exists(),
    }
}

/// The process that holds the supervisor's role now.
pub(crate) fn running(vm: &VmDir) -> io::Result<Option<ProcessHandle>> {
    holder(vm, Role::Supervisor)
}

/// A handle on the process that holds a role. The role is looked at again once the handle is open, so that it can't be
/// a later process with the same pid.
pub(crate) fn holder(vm: &VmDir, role: Role) -> io::Result<Option<ProcessHandle>> {
    let Some(pid) = lock::holder(vm.path(), role)? else { return Ok(None) };
    let Ok(identity) = ProcessIdentity::of(pid) else { return Ok(None) };
    let handle = identity.open()?;
    let still = lock::holder(vm.path(), role)? == Some(pid);
    Ok(handle.filter(|_| still))
}

pub(crate) fn handle_of(child: &Child) -> io::Result<Option<ProcessHandle>> {
    match ProcessIdentity::of(child.id() as i32) {
        Ok(identity) => identity.open(),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}

/// Counts restarts, so that a process that can't live isn't started for ever.
#[derive(Debug, Default)]
pub(crate) struct Restarts {
    recent: VecDeque<Instant>,
}

impl Restarts {
    pub(crate) fn allow(&mut self, now: Instant) -> bool {
        self.recent.retain(|&then| now.saturating_duration_since(then) < RESTART_WINDOW);
        if self.recent.len() >= RESTARTS_MAX {
            return false;
        }
        self.recent.push_back(now);
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn restarts_are_limited_over_a_window() {
        let mut restarts = Restarts::default();
        let start = Instant::now();
        assert!((0..RESTARTS_MAX).all(|_| restarts.allow(start)));
        assert!(!restarts.allow(start));
        assert!(restarts.allow(start + RESTART_WINDOW));
    }

    #[test]
    fn a_vm_without_a_journal_needs_no_supervisor() {
        let dir = tempfile::tempdir().unwrap();
        let vm = RuntimeDir::at(dir.path().join("firn")).vm(&VmName::new("web").unwrap());
        assert!(!needed(&vm));
        vm.create().unwrap();
        assert!(!needed(&vm));
        let mut journal = Journal::new(vm.name().clone(), None);
        journal.store(&vm.journal()).unwrap();
        assert!(needed(&vm));
        journal.phase = crate::journal::Phase::Detached;
        journal.store(&vm.journal()).unwrap();
        assert!(!needed(&vm));
    }
}
