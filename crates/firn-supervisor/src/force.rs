//! The forced stop of a VM, `firn stop --force`: it ends a VM whose supervisor is dead or does not
//! answer, by the identity of its processes.

use std::thread;
use std::time::{Duration, Instant};

use crate::client;
use crate::disks;
use crate::failure::{Context, Failure, FailureKind};
use crate::guard;
use crate::identity::{self, ProcessHandle, ProcessIdentity};
use crate::journal::{Journal, Machine, Phase};
use crate::name::VmName;
use crate::protocol::{Request, StopRequest};
use crate::qemu;
use crate::runtime::{RuntimeDir, VmDir};
use crate::survey;
use crate::ways::{Deed, forced_end};

/// The maximum time for a killed process to end, and for a successor to record that the VM has
/// ended.
const SETTLE_WAIT: Duration = Duration::from_secs(30);

/// The polling interval.
const STEP: Duration = Duration::from_millis(10);

/// Ends a VM and forgets it, with the help of its supervisor if that answers, else without.
pub fn stop_by_force(
    base: &RuntimeDir,
    name: &VmName,
    request: StopRequest,
) -> Result<(), Failure> {
    let vm = base.vm(name);
    let sight = survey::examine(base, &vm)?;
    let force = Force { base, vm: &vm, journal: sight.journal.clone(), request };
    for deed in forced_end(sight.remnant()) {
        match deed {
            Deed::Ask => match client::ask(base, name, &Request::Stop(request), &mut |_| ()) {
                Ok(_) => return Ok(()),
                Err(failure) if failure.kind == FailureKind::NoSuchVm => return Err(failure),
                Err(failure) => tracing::debug!("{failure}"),
            },
            Deed::EndHypervisor => force.end_hypervisor()?,
            Deed::EndSupervisor => force.end_supervisor()?,
            Deed::Settle => force.settle()?,
            Deed::Forget => force.forget()?,
        }
    }
    Ok(())
}

struct Force<'a> {
    base: &'a RuntimeDir,
    vm: &'a VmDir,
    /// `None` if the journal can't be read.
    journal: Option<Journal>,
    request: StopRequest,
}

impl Force<'_> {
    fn end_hypervisor(&self) -> Result<(), Failure> {
        const ENDING: &str = "ending QEMU";
        let Some(hypervisor) = self.hypervisor()? else { return Ok(()) };
        let quits = self.machine().is_some_and(|machine| {
            qemu::end(&machine, &hypervisor, StopRequest { force: true, ..self.request }).is_ok()
        });
        if !quits {
            hypervisor.kill().doing(ENDING)?;
        }
        match hypervisor.wait_gone(SETTLE_WAIT).doing(ENDING)? {
            true => Ok(()),
            false => {
                Err(Failure::new(FailureKind::Other, "QEMU was killed and does not end")
                    .hint(
                        "a process that is blocked on a disk ends when the disk answers",
                    ))
            }
        }
    }

    /// The record of the hypervisor, unless its disks wait for a supervisor that does not serve
    /// them: then QEMU can't quit.
    fn machine(&self) -> Option<Machine> {
        let machine = self.journal.as_ref()?.machine.clone()?;
        machine.served.is_empty().then_some(machine)
    }

    fn hypervisor(&self) -> Result<Option<ProcessHandle>, Failure> {
        const LOOKING: &str = "finding the hypervisor";
        if let Some(machine) = self.journal.as_ref().and_then(|journal| journal.machine.as_ref()) {
            return machine.process.open().doing(LOOKING);
        }
        let socket = self.vm.qmp();
        let found = identity::find_by_argument(&socket.to_string_lossy()).doing(LOOKING)?;
        found.first().map_or(Ok(None), ProcessIdentity::open).doing(LOOKING)
    }

    fn end_supervisor(&self) -> Result<(), Failure> {
        const ENDING: &str = "ending the supervisor";
        let Some(supervisor) = guard::running(self.vm).doing(ENDING)? else { return Ok(()) };
        // A supervisor that answers again by now ends by itself, because its hypervisor has ended.
        if !supervisor.wait_gone(STEP * 100).doing(ENDING)? {
            supervisor.kill().doing(ENDING)?;
            supervisor.wait_gone(SETTLE_WAIT).doing(ENDING)?;
        }
        Ok(())
    }

    /// Waits until the VM is over. The guards start a successor, or this function does, which finds
    /// that the VM has ended.
    fn settle(&self) -> Result<(), Failure> {
        let deadline = Instant::now() + SETTLE_WAIT;
        while Instant::now() < deadline {
            match Journal::load(&self.vm.journal()) {
                Ok(Some(journal)) if !journal.phase.is_over() => {}
                // No successor can read it either.
                Err(_) => return Ok(()),
                _ if guard::running(self.vm).doing("finding the supervisor")?.is_none() => {
                    return Ok(());
                }
                _ => {}
            }
            // It does not matter if a successor dies: there is nothing left to manage.
            let _ = client::look_after(self.base, self.vm);
            thread::sleep(STEP);
        }
        Ok(())
    }

    fn forget(&self) -> Result<(), Failure> {
        if let (true, Some(journal)) = (self.request.discard, self.last_journal()) {
            disks::discard(&journal);
        }
        self.vm.remove().doing("removing the VM's directory")
    }

    fn last_journal(&self) -> Option<Journal> {
        let now = Journal::load(&self.vm.journal()).ok().flatten();
        now.or_else(|| self.journal.clone())
    }
}

/// Whether the hypervisor process of a VM lives.
pub(crate) fn hypervisor_lives(vm: &VmDir, journal: Option<&Journal>) -> bool {
    let by_socket = || {
        let socket = vm.qmp();
        let found = identity::find_by_argument(&socket.to_string_lossy());
        found.is_ok_and(|found| !found.is_empty())
    };
    match journal {
        Some(Journal { machine: Some(machine), .. }) => machine.process.is_alive(),
        Some(Journal { phase: Phase::Starting { launching: None }, .. }) => false,
        _ => by_socket(),
    }
}
