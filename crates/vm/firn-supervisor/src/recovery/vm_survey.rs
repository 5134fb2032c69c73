//! The survey of all VMs, for `firn ls` and `firn status`, independent of the state of their
//! supervisors.
//!
//! If a supervisor is dead, a successor is started first. A supervisor that does not answer, or
//! that dies repeatedly, does not hide its VM: the VM is listed from its journal, with the reason
//! and the command that helps.

use std::thread;
use std::time::{Duration, Instant};

use crate::client;
use crate::daemon::status::{UnattendedVm, VmStatus};
use crate::hypervisor::memory_use::MemoryUse;
use crate::processes::identity::is_stopped;
use crate::processes::lock::{self, ProcessRole};
use crate::processes::runtime::{RuntimeDir, VmDir};
use crate::records::failure::{Failure, FailureContext, FailureKind};
use crate::records::journal::Journal;
use crate::records::name::VmName;
use crate::recovery::force;
use crate::recovery::guard;
use crate::recovery::suggested_command::{
    SuggestedCommand, SupervisorState, VmState, suggest_command,
};

/// The maximum time that a supervisor may take to answer. It queries QEMU, which may be busy.
const ANSWER_WAIT: Duration = Duration::from_secs(10);

/// The interval between attempts to query a supervisor that has not opened its socket.
const RETRY_INTERVAL: Duration = Duration::from_millis(10);

/// The maximum number of times that a VM is examined whose supervisor ends meanwhile.
const EXAMINATIONS_MAX: u32 = 3;

/// What an examination found of a VM.
pub(crate) struct VmExamination {
    pub(crate) name: VmName,
    /// `None` if the journal can't be read.
    pub(crate) journal: Option<Journal>,
    supervision: SupervisorState,
    is_hypervisor_alive: bool,
    /// The supervisor's status of the VM, if it answers.
    status: Option<VmStatus>,
    /// The reason why there is no answer.
    why: String,
    supervisor_pid: Option<i32>,
}

impl VmExamination {
    pub(crate) fn vm_remnant(&self) -> VmState<'_> {
        let Self { journal, supervision, is_hypervisor_alive, .. } = self;
        let phase = journal.as_ref().map(|journal| &journal.phase);
        VmState { phase, supervision: *supervision, is_hypervisor_alive: *is_hypervisor_alive }
    }

    /// The command that helps.
    fn suggest_command(&self) -> SuggestedCommand {
        suggest_command(self.vm_remnant())
    }

    /// Whether the VM has changed since it was examined.
    fn has_changed(&self, vm: &VmDir) -> bool {
        let needs_no_supervisor =
            self.journal.as_ref().is_some_and(|journal| journal.phase.is_over());
        let holder = lock::role_holder(vm.path(), ProcessRole::Supervisor).ok().flatten();
        let is_silent = self.status.is_none() && self.supervision != SupervisorState::Answers;
        !needs_no_supervisor && is_silent && (holder != self.supervisor_pid || !vm.exists())
    }

    fn into_status(self) -> VmStatus {
        let unattended = self.unattended_vm();
        let clone = self.journal.as_ref().filter(|journal| journal.family.is_some());
        let record = clone.and_then(|journal| journal.hypervisor_record.as_ref());
        let memory_use = record.and_then(MemoryUse::of_hypervisor);
        let mut status = match (self.status, &self.journal) {
            (Some(status), _) => status,
            (None, Some(journal)) => VmStatus::from_journal(journal),
            (None, None) => VmStatus::for_unreadable_journal(self.name),
        };
        status.unattended = unattended;
        status.memory_use = memory_use;
        status
    }

    /// `None` for a VM whose supervisor answers, or that needs none.
    fn unattended_vm(&self) -> Option<UnattendedVm> {
        let needs_no_supervisor =
            self.journal.as_ref().is_some_and(|journal| journal.phase.is_over());
        if needs_no_supervisor || self.supervision == SupervisorState::Answers {
            return None;
        }
        let hint = format!("`{}` ends the VM", self.suggest_command().command_line(&self.name));
        let hint = match self.supervisor_pid.filter(|&pid| is_stopped(pid)) {
            Some(pid) => format!("`kill -CONT {pid}` continues its supervisor; {hint}"),
            None => hint,
        };
        Some(UnattendedVm { why: self.why.clone(), hint, supervisor_pid: self.supervisor_pid })
    }

    /// The failure of a command that needs the supervisor, if that does not answer.
    pub(crate) fn unattended_failure(&self) -> Option<Failure> {
        let unattended = self.unattended_vm()?;
        let failure = Failure::new(FailureKind::Busy, unattended.why);
        Some(failure.with_hint(unattended.hint))
    }
}

/// Examines a VM, after starting a supervisor if it needs one.
///
/// # Errors
/// If there is no VM of that name.
pub(crate) fn examine_vm(base: &RuntimeDir, vm: &VmDir) -> Result<VmExamination, Failure> {
    let mut tries = 0;
    loop {
        let ensured = client::ensure_supervisor(base, vm);
        let journal = match Journal::load(&vm.journal_file()) {
            Ok(Some(journal)) => Ok(journal),
            Ok(None) => return Err(ensured.err().unwrap_or_else(|| client::no_such_vm(vm))),
            Err(error) => Err(Failure::from_error(FailureKind::Other, &error)),
        };
        let sight = examine_once(vm, journal);
        tries += 1;
        // A supervisor that ended during the query has a successor, or there is nothing to manage.
        if !sight.has_changed(vm) || tries >= EXAMINATIONS_MAX {
            return Ok(sight);
        }
    }
}

fn examine_once(vm: &VmDir, journal: Result<Journal, Failure>) -> VmExamination {
    let supervisor_pid = lock::role_holder(vm.path(), ProcessRole::Supervisor).ok().flatten();
    let answer = match (&journal, supervisor_pid) {
        (Ok(journal), _) if journal.phase.is_over() => SupervisorAnswer::Silence,
        (_, None) => SupervisorAnswer::Silence,
        (_, Some(pid)) if is_stopped(pid) => SupervisorAnswer::Silence,
        (journal, Some(_)) => query_supervisor(vm, journal.as_ref().ok()),
    };
    let (supervision, status) = match answer {
        SupervisorAnswer::Status(status) => (SupervisorState::Answers, Some(*status)),
        SupervisorAnswer::Starts => (SupervisorState::Answers, None),
        SupervisorAnswer::Silence if supervisor_pid.is_some() => (SupervisorState::Mute, None),
        SupervisorAnswer::Silence => (SupervisorState::Absent, None),
    };
    let why = explain_silence(vm, supervisor_pid, journal.as_ref().err());
    let journal = journal.ok();
    let is_hypervisor_alive = force::is_hypervisor_alive(vm, journal.as_ref());
    let name = vm.name().clone();
    VmExamination { name, journal, supervision, is_hypervisor_alive, status, why, supervisor_pid }
}

enum SupervisorAnswer {
    Status(Box<VmStatus>),
    /// The supervisor does not accept requests yet.
    Starts,
    Silence,
}

/// Queries a supervisor, which may be about to open its socket.
fn query_supervisor(vm: &VmDir, journal: Option<&Journal>) -> SupervisorAnswer {
    let deadline = Instant::now() + ANSWER_WAIT;
    while Instant::now() < deadline {
        if let Some(status) = client::poll_status_within(vm, deadline - Instant::now()) {
            return SupervisorAnswer::Status(Box::new(status));
        }
        if journal.is_some_and(|journal| journal.phase.is_starting()) {
            return SupervisorAnswer::Starts;
        }
        if matches!(lock::role_holder(vm.path(), ProcessRole::Supervisor), Ok(None)) {
            break;
        }
        thread::sleep(RETRY_INTERVAL);
    }
    SupervisorAnswer::Silence
}

/// The reason why there is no answer, if there is none.
fn explain_silence(
    vm: &VmDir,
    supervisor_pid: Option<i32>,
    unreadable: Option<&Failure>,
) -> String {
    match (supervisor_pid, unreadable) {
        (Some(pid), _) if is_stopped(pid) => {
            format!("its supervisor (process {pid}) is stopped by a signal")
        }
        (Some(pid), _) => format!("its supervisor (process {pid}) does not answer"),
        (None, Some(failure)) => failure.to_string(),
        (None, None) => {
            format!("its supervisor dies repeatedly; see {}", vm.log_file().display())
        }
    }
}

/// A VM's status, whether or not its supervisor answers.
///
/// # Errors
/// If there is no VM of that name.
pub fn inspect_vm(base: &RuntimeDir, vm: &VmDir) -> Result<VmStatus, Failure> {
    examine_vm(base, vm).map(VmExamination::into_status)
}

/// The status of all VMs, by name. All supervisors are queried at once, so that those that don't
/// answer delay none of the others, but only the whole list. A VM that ends meanwhile is left out.
///
/// # Errors
/// If the runtime directory can't be read.
pub fn list_statuses(base: &RuntimeDir) -> Result<Vec<VmStatus>, Failure> {
    let vms = base.list_vms().while_doing("listing the VMs")?;
    thread::scope(|scope| {
        let ask = |vm| {
            let asked = thread::Builder::new().name("survey".into());
            asked.spawn_scoped(scope, move || inspect_vm(base, vm).ok()).ok()
        };
        let asked: Vec<_> = vms.iter().map(ask).collect();
        Ok(asked.into_iter().flatten().filter_map(|query| query.join().ok().flatten()).collect())
    })
}

/// Starts a supervisor for each VM that needs one and has none.
pub fn restart_supervisors(base: &RuntimeDir) {
    for vm in base.list_vms().unwrap_or_default() {
        if matches!(guard::find_supervisor(&vm), Ok(None)) {
            // If this fails, the next round tries again.
            let _ = client::ensure_supervisor(base, &vm);
        }
    }
}
