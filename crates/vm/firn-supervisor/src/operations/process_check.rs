//! The checks of a QEMU that Firn does not manage: nothing is attached, and nothing is changed.

use crate::devices::served_disks::ServedDisks;
use crate::hypervisor::monitor;
use crate::hypervisor::qemu::{self, KnownHypervisor};
use crate::operations::vm_checks::{CheckedVm, OperationCheck};
use crate::processes::identity::ProcessIdentity;
use crate::records::failure::{Failure, FailureContext, FailureKind};
use crate::records::journal::Journal;
use crate::records::monitor_address::MonitorAddress;
use crate::records::name::VmName;

/// Checks which operations would work on the QEMU of that process, once it is attached.
///
/// # Errors
/// If there is no such process, or its monitor does not answer.
pub fn check_process(pid: i32, qmp: &MonitorAddress) -> Result<Vec<OperationCheck>, Failure> {
    let no_process = |_| no_process(pid);
    let process = ProcessIdentity::from_pid(pid).map_err(no_process)?;
    let mut vm = monitor::connect_checked(pid, qmp, qemu::ANSWER_WAIT)?;
    let (args, directory) = qemu::command_line(pid).while_doing("reading QEMU's command line")?;
    let user_args = qemu::restorable_command(qmp, pid, &args).args;
    let layout = qemu::find_layout(&mut vm, &user_args)?;
    let name = VmName::new("unnamed").while_doing("naming the VM")?;
    let known = KnownHypervisor {
        process,
        qmp: qmp.clone(),
        launched: false,
        user_args,
        args,
        directory,
        drives: Vec::new(),
        cards: Vec::new(),
        served: Vec::new(),
    };
    let hypervisor_record = qemu::describe_hypervisor(&mut vm, known, &layout, name.as_str())?;
    let (journal, served) = (&Journal::new(name, None), &ServedDisks::default());
    CheckedVm { hypervisor_record: &hypervisor_record, journal, served }
        .check_operations(&mut vm, Ok(()))
}

/// The failure for a process that does not exist.
pub(crate) fn no_process(pid: i32) -> Failure {
    let text = format!("there is no process {pid}");
    Failure::new(FailureKind::NoSuchVm, text).with_hint("give the process id of the hypervisor")
}
