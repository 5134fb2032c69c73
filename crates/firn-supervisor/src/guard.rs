//! The guards: two processes that only wait for the supervisor to die, and start another one.
//!
//! ```text
//!      supervisor  <--- pidfd ---  guard          the supervisor waits for both of them, and each of them for it;
//!          |  |     --- pidfd --->   |            a process that dies is started anew
//!          |  |    <--- pidfd --- watcher
//!          |  '---- --- pidfd --->   |
//!          '-- dies: the guard runs  `firn __supervise NAME --recover`; if it is dead, or too slow, the watcher does
//!              either dies: the supervisor runs `firn __guard NAME [--watcher]`
//! ```
//!
//! So any two of the three may die at the same instant. If all three die, the next `firn` command
//! that needs the VM starts a supervisor, or the host's agent does. A supervisor that has nothing
//! left to manage records that in its journal before it exits.

use std::io;
use std::process::Child;
use std::thread;
use std::time::{Duration, Instant};

use crate::held::Held;
use crate::identity::{ProcessHandle, ProcessIdentity};
use crate::journal::Journal;
use crate::lock::{self, Role, RoleLock};
use crate::name::VmName;
use crate::restarts::Restarts;
use crate::runtime::{RuntimeDir, VmDir};
use crate::spawn;

/// The time that a watcher leaves to a living guard to start a supervisor.
const YIELD_FOR: Duration = Duration::from_secs(1);

/// The interval at which it is checked meanwhile whether there is a supervisor.
const STEP: Duration = Duration::from_millis(10);

/// Runs the guard of a VM; returns when there is nothing left to guard.
pub fn guard(base: &RuntimeDir, name: &VmName) -> io::Result<()> {
    hold_post(base, name, Role::Guard)
}

/// Runs the watcher of a VM, which acts where the guard does not.
pub fn watcher(base: &RuntimeDir, name: &VmName) -> io::Result<()> {
    hold_post(base, name, Role::Watcher)
}

fn hold_post(base: &RuntimeDir, name: &VmName, role: Role) -> io::Result<()> {
    spawn::detach_session();
    let vm = base.vm(name);
    if !vm.exists() {
        return Ok(());
    }
    let Some(_role) = RoleLock::try_take(vm.path(), role)? else { return Ok(()) };
    crate::log::open(&vm)?;
    let held = Held::from_stdin(&vm);
    let mut post = Post { base, vm: &vm, role, held, restarts: Restarts::default() };
    while let Some(handle) = post.watched()? {
        handle.wait_gone_forever()?;
        handle.exit();
    }
    Ok(())
}

struct Post<'a> {
    base: &'a RuntimeDir,
    vm: &'a VmDir,
    role: Role,
    held: Held,
    restarts: Restarts,
}

impl Post<'_> {
    /// Finds the supervisor to watch, or starts one; `None` when none is needed.
    fn watched(&mut self) -> io::Result<Option<ProcessHandle>> {
        let since = Instant::now();
        while needed(self.vm) {
            if let Some(supervisor) = running(self.vm)? {
                return Ok(Some(supervisor));
            }
            if self.yields(since.elapsed())? {
                thread::sleep(STEP);
                continue;
            }
            let pause = self.restarts.pause(Instant::now());
            if self.is_resolved_within(pause)? {
                continue;
            }
            tracing::warn!("the supervisor has died: starting another one");
            let child = spawn::successor(self.base, self.vm, &self.held.files())?;
            if let Some(child) = handle_of(&child)? {
                return Ok(Some(child));
            }
        }
        Ok(None)
    }

    /// Whether the guard is about to start a supervisor, so that the watcher need not.
    fn yields(&self, waited: Duration) -> io::Result<bool> {
        Ok(self.role == Role::Watcher
            && waited < YIELD_FOR
            && lock::holder(self.vm.path(), Role::Guard)?.is_some())
    }

    /// Whether another process has started a supervisor meanwhile, or none is needed any more.
    fn is_resolved_within(&self, pause: Duration) -> io::Result<bool> {
        let until = Instant::now() + pause;
        while Instant::now() < until {
            thread::sleep(STEP.max(pause / 100));
            if !needed(self.vm) || running(self.vm)?.is_some() {
                return Ok(true);
            }
        }
        Ok(false)
    }
}

/// Whether the journal names a VM that needs a supervisor.
fn needed(vm: &VmDir) -> bool {
    match Journal::load(&vm.journal()) {
        Ok(Some(journal)) => !journal.phase.is_over(),
        Ok(None) => false,
        Err(_) => vm.exists(),
    }
}

/// Finds the process that holds the supervisor's role now.
pub(crate) fn running(vm: &VmDir) -> io::Result<Option<ProcessHandle>> {
    holder(vm, Role::Supervisor)
}

/// Opens a handle on the process that holds a role. The role is checked again once the handle is
/// open, so that it can't be a later process with the same pid.
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

#[cfg(test)]
mod tests {
    use super::*;

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
