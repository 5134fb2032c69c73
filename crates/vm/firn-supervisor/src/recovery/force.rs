//! The forced stop of a VM, `firn stop --force`: it ends a VM whose supervisor is dead or does not
//! answer, by the identity of its processes.

use std::thread;
use std::time::{Duration, Instant};

use crate::client;
use crate::devices::disk_snapshots;
use crate::hypervisor::qemu;
use crate::processes::identity::{self, ProcessHandle, ProcessIdentity};
use crate::processes::runtime::{RuntimeDir, VmDir};
use crate::records::control_protocol::{StopRequest, SupervisorRequest};
use crate::records::failure::{Failure, FailureContext, FailureKind};
use crate::records::journal::{HypervisorRecord, Journal, VmPhase};
use crate::records::name::VmName;
use crate::recovery::guard;
use crate::recovery::suggested_command::{ForcedStopStep, forced_stop_steps};
use crate::recovery::vm_survey;

/// The maximum time for a killed process to end, and for a successor to record that the VM has
/// ended.
const END_WAIT: Duration = Duration::from_secs(30);

/// The polling interval.
const POLL_INTERVAL: Duration = Duration::from_millis(10);

/// Ends a VM and forgets it, with the help of its supervisor if that answers, else without.
pub fn stop_by_force(
    base: &RuntimeDir,
    name: &VmName,
    request: StopRequest,
) -> Result<(), Failure> {
    let vm = base.vm_dir(name);
    let sight = vm_survey::examine_vm(base, &vm)?;
    let force = ForcedStop { base, vm: &vm, journal: sight.journal.clone(), request };
    for deed in forced_stop_steps(sight.vm_remnant()) {
        match deed {
            ForcedStopStep::Ask => match client::send_request(
                base,
                name,
                &SupervisorRequest::Stop(request),
                &mut |_| (),
            ) {
                Ok(_) => return Ok(()),
                Err(failure) if failure.kind == FailureKind::NoSuchVm => return Err(failure),
                Err(failure) => tracing::debug!("{failure}"),
            },
            ForcedStopStep::EndHypervisor => force.end_hypervisor()?,
            ForcedStopStep::EndSupervisor => force.end_supervisor()?,
            ForcedStopStep::Settle => force.wait_until_over()?,
            ForcedStopStep::Forget => force.forget_vm()?,
        }
    }
    Ok(())
}

struct ForcedStop<'a> {
    base: &'a RuntimeDir,
    vm: &'a VmDir,
    /// `None` if the journal can't be read.
    journal: Option<Journal>,
    request: StopRequest,
}

impl ForcedStop<'_> {
    fn end_hypervisor(&self) -> Result<(), Failure> {
        const ENDING: &str = "ending QEMU";
        let Some(hypervisor) = self.find_hypervisor()? else { return Ok(()) };
        let quits = self.quittable_hypervisor().is_some_and(|hypervisor_record| {
            qemu::end_hypervisor(
                &hypervisor_record,
                &hypervisor,
                StopRequest { force: true, ..self.request },
            )
            .is_ok()
        });
        if !quits {
            hypervisor.send_kill().while_doing(ENDING)?;
        }
        match hypervisor.wait_gone(END_WAIT).while_doing(ENDING)? {
            true => Ok(()),
            false => Err(Failure::new(FailureKind::Other, "QEMU was killed and does not end")
                .with_hint("a process that is blocked on a disk ends when the disk answers")),
        }
    }

    /// The record of the hypervisor, unless its disks wait for a supervisor that does not serve
    /// them: then QEMU can't quit.
    fn quittable_hypervisor(&self) -> Option<HypervisorRecord> {
        let hypervisor_record = self.journal.as_ref()?.hypervisor_record.clone()?;
        hypervisor_record.served.is_empty().then_some(hypervisor_record)
    }

    fn find_hypervisor(&self) -> Result<Option<ProcessHandle>, Failure> {
        const FINDING: &str = "finding the hypervisor";
        if let Some(hypervisor_record) =
            self.journal.as_ref().and_then(|journal| journal.hypervisor_record.as_ref())
        {
            return hypervisor_record.process.open_handle().while_doing(FINDING);
        }
        let socket = self.vm.qmp_socket();
        let found = identity::find_by_argument(&socket.to_string_lossy()).while_doing(FINDING)?;
        found.first().map_or(Ok(None), ProcessIdentity::open_handle).while_doing(FINDING)
    }

    fn end_supervisor(&self) -> Result<(), Failure> {
        const ENDING: &str = "ending the supervisor";
        let Some(supervisor) = guard::find_supervisor(self.vm).while_doing(ENDING)? else {
            return Ok(());
        };
        // A supervisor that answers again by now ends by itself, because its hypervisor has ended.
        if !supervisor.wait_gone(POLL_INTERVAL * 100).while_doing(ENDING)? {
            supervisor.send_kill().while_doing(ENDING)?;
            supervisor.wait_gone(END_WAIT).while_doing(ENDING)?;
        }
        Ok(())
    }

    /// Waits until the VM is over. The guards start a successor, or this function does, which finds
    /// that the VM has ended.
    fn wait_until_over(&self) -> Result<(), Failure> {
        let deadline = Instant::now() + END_WAIT;
        while Instant::now() < deadline {
            match Journal::load(&self.vm.journal_file()) {
                Ok(Some(journal)) if !journal.phase.is_over() => {}
                // No successor can read it either.
                Err(_) => return Ok(()),
                _ if guard::find_supervisor(self.vm)
                    .while_doing("finding the supervisor")?
                    .is_none() =>
                {
                    return Ok(());
                }
                _ => {}
            }
            // It does not matter if a successor dies: there is nothing left to manage.
            let _ = client::ensure_supervisor(self.base, self.vm);
            thread::sleep(POLL_INTERVAL);
        }
        Ok(())
    }

    fn forget_vm(&self) -> Result<(), Failure> {
        if let (true, Some(journal)) = (self.request.discard, self.last_journal()) {
            disk_snapshots::discard_overlays(&journal);
        }
        self.vm.remove_dir().while_doing("removing the VM's directory")
    }

    fn last_journal(&self) -> Option<Journal> {
        let now = Journal::load(&self.vm.journal_file()).ok().flatten();
        now.or_else(|| self.journal.clone())
    }
}

/// Whether the hypervisor process of a VM lives.
pub(crate) fn is_hypervisor_alive(vm: &VmDir, journal: Option<&Journal>) -> bool {
    let by_socket = || {
        let socket = vm.qmp_socket();
        let found = identity::find_by_argument(&socket.to_string_lossy());
        found.is_ok_and(|found| !found.is_empty())
    };
    match journal {
        Some(Journal { hypervisor_record: Some(hypervisor_record), .. }) => {
            hypervisor_record.process.is_alive()
        }
        Some(Journal { phase: VmPhase::Starting { launching: None }, .. }) => false,
        _ => by_socket(),
    }
}
