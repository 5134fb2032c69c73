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

use crate::processes::identity::{ProcessHandle, ProcessIdentity};
use crate::processes::lock::{self, ProcessRole, RoleLock};
use crate::processes::restarts::RestartBackoff;
use crate::processes::runtime::{RuntimeDir, VmDir};
use crate::processes::spawn;
use crate::records::journal::Journal;
use crate::records::name::VmName;
use crate::recovery::image_files::KeptImageFiles;

/// The time that a watcher leaves to a living guard to start a supervisor.
const YIELD_TIME: Duration = Duration::from_secs(1);

/// The interval at which it is checked meanwhile whether there is a supervisor.
const CHECK_INTERVAL: Duration = Duration::from_millis(10);

/// Runs the guard of a VM; returns when there is nothing left to guard.
pub fn run_guard(base: &RuntimeDir, name: &VmName) -> io::Result<()> {
    guard_vm(base, name, ProcessRole::Guard)
}

/// Runs the watcher of a VM, which acts where the guard does not.
pub fn run_watcher(base: &RuntimeDir, name: &VmName) -> io::Result<()> {
    guard_vm(base, name, ProcessRole::Watcher)
}

fn guard_vm(base: &RuntimeDir, name: &VmName, role: ProcessRole) -> io::Result<()> {
    spawn::detach_session();
    let vm = base.vm_dir(name);
    if !vm.exists() {
        return Ok(());
    }
    let Some(_role) = RoleLock::try_take(vm.path(), role)? else { return Ok(()) };
    crate::processes::log::open_log(&vm)?;
    let held = KeptImageFiles::from_stdin(&vm);
    let mut post = GuardProcess { base, vm: &vm, role, held, restarts: RestartBackoff::default() };
    while let Some(handle) = post.find_or_start_supervisor()? {
        handle.wait_gone_forever()?;
        handle.reap_exit();
    }
    Ok(())
}

struct GuardProcess<'a> {
    base: &'a RuntimeDir,
    vm: &'a VmDir,
    role: ProcessRole,
    held: KeptImageFiles,
    restarts: RestartBackoff,
}

impl GuardProcess<'_> {
    /// Finds the supervisor to watch, or starts one; `None` when none is needed.
    fn find_or_start_supervisor(&mut self) -> io::Result<Option<ProcessHandle>> {
        let since = Instant::now();
        while needs_supervisor(self.vm) {
            if let Some(supervisor) = find_supervisor(self.vm)? {
                return Ok(Some(supervisor));
            }
            if self.yields_to_guard(since.elapsed())? {
                thread::sleep(CHECK_INTERVAL);
                continue;
            }
            let pause = self.restarts.next_delay(Instant::now());
            if self.is_resolved_within(pause)? {
                continue;
            }
            tracing::warn!("the supervisor has died: starting another one");
            let child = spawn::spawn_successor(self.base, self.vm, &self.held.clone_files())?;
            if let Some(child) = handle_of(&child)? {
                return Ok(Some(child));
            }
        }
        Ok(None)
    }

    /// Whether the guard is about to start a supervisor, so that the watcher need not.
    fn yields_to_guard(&self, waited: Duration) -> io::Result<bool> {
        Ok(self.role == ProcessRole::Watcher
            && waited < YIELD_TIME
            && lock::role_holder(self.vm.path(), ProcessRole::Guard)?.is_some())
    }

    /// Whether another process has started a supervisor meanwhile, or none is needed any more.
    fn is_resolved_within(&self, pause: Duration) -> io::Result<bool> {
        let until = Instant::now() + pause;
        while Instant::now() < until {
            thread::sleep(CHECK_INTERVAL.max(pause / 100));
            if !needs_supervisor(self.vm) || find_supervisor(self.vm)?.is_some() {
                return Ok(true);
            }
        }
        Ok(false)
    }
}

/// Whether the journal names a VM that needs a supervisor.
fn needs_supervisor(vm: &VmDir) -> bool {
    match Journal::load(&vm.journal_file()) {
        Ok(Some(journal)) => !journal.phase.is_over(),
        Ok(None) => false,
        Err(_) => vm.exists(),
    }
}

/// Finds the process that holds the supervisor's role now.
pub(crate) fn find_supervisor(vm: &VmDir) -> io::Result<Option<ProcessHandle>> {
    role_holder(vm, ProcessRole::Supervisor)
}

/// Opens a handle on the process that holds a role. The role is checked again once the handle is
/// open, so that it can't be a later process with the same pid.
pub(crate) fn role_holder(vm: &VmDir, role: ProcessRole) -> io::Result<Option<ProcessHandle>> {
    let Some(pid) = lock::role_holder(vm.path(), role)? else { return Ok(None) };
    let Ok(identity) = ProcessIdentity::from_pid(pid) else { return Ok(None) };
    let handle = identity.open_handle()?;
    let still_holds = lock::role_holder(vm.path(), role)? == Some(pid);
    Ok(handle.filter(|_| still_holds))
}

pub(crate) fn handle_of(child: &Child) -> io::Result<Option<ProcessHandle>> {
    match ProcessIdentity::from_pid(child.id() as i32) {
        Ok(identity) => identity.open_handle(),
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
        let vm =
            RuntimeDir::from_path(dir.path().join("firn")).vm_dir(&VmName::new("web").unwrap());
        assert!(!needs_supervisor(&vm));
        vm.create_private().unwrap();
        assert!(!needs_supervisor(&vm));
        let mut journal = Journal::new(vm.name().clone(), None);
        journal.write_file(&vm.journal_file()).unwrap();
        assert!(needs_supervisor(&vm));
        journal.phase = crate::records::journal::VmPhase::Detached;
        journal.write_file(&vm.journal_file()).unwrap();
        assert!(!needs_supervisor(&vm));
    }
}
