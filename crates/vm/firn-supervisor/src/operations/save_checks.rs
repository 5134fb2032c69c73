//! Why a VM can't be saved, whichever strategy is chosen.

use crate::records::failure::{Failure, FailureKind};
use crate::records::journal::{HypervisorRecord, Journal};

/// Refuses a VM with disks that images can't contain yet.
pub(crate) fn refuse_served_disks(hypervisor_record: &HypervisorRecord) -> Result<(), Failure> {
    let Some(disk) = hypervisor_record.served.first() else { return Ok(()) };
    let text = format!(
        "the disk {} is served by Firn (firn=on), and images can't keep such disks",
        disk.id
    );
    let failure = Failure::new(FailureKind::Refused, text);
    Err(failure.with_hint("start the VM without firn=on to save it, or protect it instead"))
}

/// Refuses a VM whose output is blocked by filters: a restored VM has none, and would send.
pub(crate) fn refuse_filtered_output(journal: &Journal) -> Result<(), Failure> {
    if !journal.shut || journal.filters.is_empty() {
        return Ok(());
    }
    let text =
        "the VM's output is blocked, because its standby may run, and a restored VM would send";
    let failure = Failure::new(FailureKind::Refused, text);
    Err(failure.with_hint("`firn release` releases the output, if the standby never runs the VM"))
}

/// Refuses a VM whose state QEMU can't save.
pub(crate) fn refuse_blocked(blockers: Vec<String>) -> Result<(), Failure> {
    if blockers.is_empty() {
        return Ok(());
    }
    let mut failure = Failure::new(FailureKind::Refused, "QEMU can't save the state of this VM");
    failure.chain.extend(blockers);
    Err(failure.with_hint("start the VM without the device or CPU feature named here"))
}
