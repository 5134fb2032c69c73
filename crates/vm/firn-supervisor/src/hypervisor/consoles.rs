//! Consoles of a VM: the sockets at which QEMU serves the guest's serial ports.
//!
//! They are read from the command line of the QEMU that runs: a restore may have moved a socket.

use firn_vmm::command_line::{GuestConsole, find_consoles};

use crate::hypervisor::qemu::command_line;
use crate::processes::runtime::RuntimeDir;
use crate::records::failure::{Failure, FailureContext, FailureKind};
use crate::records::name::VmName;
use crate::recovery::vm_survey::inspect_vm;

/// The consoles of a VM, with absolute paths.
pub fn find_vm_consoles(base: &RuntimeDir, name: &VmName) -> Result<Vec<GuestConsole>, Failure> {
    let status = inspect_vm(base, &base.vm_dir(name))?;
    let Some(pid) = status.pid.filter(|_| status.exit.is_none()) else {
        let text = format!("VM {name} does not run");
        return Err(Failure::new(FailureKind::NoSuchVm, text));
    };
    let (words, directory) =
        command_line(pid).while_doing("reading the command line of its QEMU")?;
    let mut consoles = find_consoles(&words);
    consoles.iter_mut().for_each(|console| console.socket = directory.join(&console.socket));
    Ok(consoles)
}
