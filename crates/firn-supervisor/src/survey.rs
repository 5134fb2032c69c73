//! The survey of all VMs, for `firn ls` and `firn status`, independent of the state of their
//! supervisors.
//!
//! If a supervisor is dead, a successor is started first. A supervisor that does not answer, or
//! that dies repeatedly, does not hide its VM: the VM is listed from its journal, with the reason
//! and the command that helps.

use std::thread;
use std::time::{Duration, Instant};

use crate::client;
use crate::failure::{Context, Failure, FailureKind};
use crate::force;
use crate::guard;
use crate::identity::is_stopped;
use crate::journal::Journal;
use crate::lock::{self, Role};
use crate::name::VmName;
use crate::runtime::{RuntimeDir, VmDir};
use crate::status::{Status, Unattended};
use crate::ways::{Command, Remnant, Supervision, way_out};

/// The maximum time that a supervisor may take to answer. It queries QEMU, which may be busy.
const ANSWER_WAIT: Duration = Duration::from_secs(10);

/// The interval between attempts to query a supervisor that has not opened its socket.
const RETRY: Duration = Duration::from_millis(10);

/// The maximum number of times that a VM is examined whose supervisor ends meanwhile.
const TRIES: u32 = 3;

/// What an examination found of a VM.
pub(crate) struct Sight {
    pub(crate) name: VmName,
    /// `None` if the journal can't be read.
    pub(crate) journal: Option<Journal>,
    supervision: Supervision,
    hypervisor_lives: bool,
    /// The supervisor's status of the VM, if it answers.
    told: Option<Status>,
    /// The reason why there is no answer.
    why: String,
    supervisor_pid: Option<i32>,
}

impl Sight {
    pub(crate) fn remnant(&self) -> Remnant<'_> {
        let Self { journal, supervision, hypervisor_lives, .. } = self;
        let phase = journal.as_ref().map(|journal| &journal.phase);
        Remnant { phase, supervision: *supervision, hypervisor_lives: *hypervisor_lives }
    }

    /// The command that helps.
    fn way_out(&self) -> Command {
        way_out(self.remnant())
    }

    /// Whether the VM has changed since it was examined.
    fn has_changed(&self, vm: &VmDir) -> bool {
        let needs_nobody = self.journal.as_ref().is_some_and(|journal| journal.phase.is_over());
        let holder = lock::holder(vm.path(), Role::Supervisor).ok().flatten();
        let is_silent = self.told.is_none() && self.supervision != Supervision::Answers;
        !needs_nobody && is_silent && (holder != self.supervisor_pid || !vm.exists())
    }

    fn status(self) -> Status {
        let unattended = self.unattended();
        let mut status = match (self.told, &self.journal) {
            (Some(told), _) => told,
            (None, Some(journal)) => Status::of(journal),
            (None, None) => Status::unknown(self.name),
        };
        status.unattended = unattended;
        status
    }

    /// `None` for a VM whose supervisor answers, or that needs none.
    fn unattended(&self) -> Option<Unattended> {
        let needs_nobody = self.journal.as_ref().is_some_and(|journal| journal.phase.is_over());
        if needs_nobody || self.supervision == Supervision::Answers {
            return None;
        }
        let hint = format!("`{}` ends the VM", self.way_out().line(&self.name));
        let hint = match self.supervisor_pid.filter(|&pid| is_stopped(pid)) {
            Some(pid) => format!("`kill -CONT {pid}` continues its supervisor; {hint}"),
            None => hint,
        };
        Some(Unattended { why: self.why.clone(), hint, supervisor_pid: self.supervisor_pid })
    }

    /// The failure of a command that needs the supervisor, if that does not answer.
    pub(crate) fn refusal(&self) -> Option<Failure> {
        let unattended = self.unattended()?;
        let failure = Failure::new(FailureKind::Busy, unattended.why);
        Some(failure.hint(unattended.hint))
    }
}

/// Examines a VM, after starting a supervisor if it needs one.
///
/// # Errors
/// If there is no VM of that name.
pub(crate) fn examine(base: &RuntimeDir, vm: &VmDir) -> Result<Sight, Failure> {
    let mut tries = 0;
    loop {
        let brought_back = client::look_after(base, vm);
        let journal = match Journal::load(&vm.journal()) {
            Ok(Some(journal)) => Ok(journal),
            Ok(None) => return Err(brought_back.err().unwrap_or_else(|| client::no_such_vm(vm))),
            Err(error) => Err(Failure::from_error(FailureKind::Other, &error)),
        };
        let sight = examine_once(vm, journal);
        tries += 1;
        // A supervisor that ended during the query has a successor, or there is nothing to manage.
        if !sight.has_changed(vm) || tries >= TRIES {
            return Ok(sight);
        }
    }
}

fn examine_once(vm: &VmDir, journal: Result<Journal, Failure>) -> Sight {
    let supervisor_pid = lock::holder(vm.path(), Role::Supervisor).ok().flatten();
    let answer = match (&journal, supervisor_pid) {
        (Ok(journal), _) if journal.phase.is_over() => Answer::Silence,
        (_, None) => Answer::Silence,
        (_, Some(pid)) if is_stopped(pid) => Answer::Silence,
        (journal, Some(_)) => ask(vm, journal.as_ref().ok()),
    };
    let (supervision, told) = match answer {
        Answer::Status(status) => (Supervision::Answers, Some(*status)),
        Answer::Starts => (Supervision::Answers, None),
        Answer::Silence if supervisor_pid.is_some() => (Supervision::Mute, None),
        Answer::Silence => (Supervision::Absent, None),
    };
    let why = why(vm, supervisor_pid, journal.as_ref().err());
    let journal = journal.ok();
    let hypervisor_lives = force::hypervisor_lives(vm, journal.as_ref());
    let name = vm.name().clone();
    Sight { name, journal, supervision, hypervisor_lives, told, why, supervisor_pid }
}

enum Answer {
    Status(Box<Status>),
    /// The supervisor does not accept requests yet.
    Starts,
    Silence,
}

/// Queries a supervisor, which may be about to open its socket.
fn ask(vm: &VmDir, journal: Option<&Journal>) -> Answer {
    let deadline = Instant::now() + ANSWER_WAIT;
    while Instant::now() < deadline {
        if let Some(status) = client::told_within(vm, deadline - Instant::now()) {
            return Answer::Status(Box::new(status));
        }
        if journal.is_some_and(|journal| journal.phase.is_starting()) {
            return Answer::Starts;
        }
        if matches!(lock::holder(vm.path(), Role::Supervisor), Ok(None)) {
            break;
        }
        thread::sleep(RETRY);
    }
    Answer::Silence
}

/// The reason why there is no answer, if there is none.
fn why(vm: &VmDir, supervisor_pid: Option<i32>, unreadable: Option<&Failure>) -> String {
    match (supervisor_pid, unreadable) {
        (Some(pid), _) if is_stopped(pid) => {
            format!("its supervisor (process {pid}) is stopped by a signal")
        }
        (Some(pid), _) => format!("its supervisor (process {pid}) does not answer"),
        (None, Some(failure)) => failure.to_string(),
        (None, None) => {
            format!("its supervisor dies repeatedly; see {}", vm.log().display())
        }
    }
}

/// A VM's status, whether or not its supervisor answers.
///
/// # Errors
/// If there is no VM of that name.
pub fn inspect(base: &RuntimeDir, vm: &VmDir) -> Result<Status, Failure> {
    examine(base, vm).map(Sight::status)
}

/// The status of all VMs, by name. All supervisors are queried at once, so that those that don't
/// answer delay none of the others, but only the whole list. A VM that ends meanwhile is left out.
///
/// # Errors
/// If the runtime directory can't be read.
pub fn survey(base: &RuntimeDir) -> Result<Vec<Status>, Failure> {
    let vms = base.vms().doing("listing the VMs")?;
    thread::scope(|scope| {
        let ask = |vm| {
            let asked = thread::Builder::new().name("survey".into());
            asked.spawn_scoped(scope, move || inspect(base, vm).ok()).ok()
        };
        let asked: Vec<_> = vms.iter().map(ask).collect();
        Ok(asked.into_iter().flatten().filter_map(|told| told.join().ok().flatten()).collect())
    })
}

/// Starts a supervisor for each VM that needs one and has none.
pub fn revive(base: &RuntimeDir) {
    for vm in base.vms().unwrap_or_default() {
        if matches!(guard::running(&vm), Ok(None)) {
            // If this fails, the next round tries again.
            let _ = client::look_after(base, &vm);
        }
    }
}
