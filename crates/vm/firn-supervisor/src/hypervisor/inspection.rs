//! The checks that a running VM passes before it is saved or protected.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use firn_vmm::restorable::{CommandLines, find_obstacles};
use firn_vmm::{AuxRam, MemoryLayout, QemuVm, RunState};

use crate::hypervisor::qemu;
use crate::records::failure::{Failure, FailureContext, FailureKind};
use crate::records::journal::HypervisorRecord;

/// The maximum time for the firmware of a running VM to map its video memory. It takes a second or
/// two, more on a busy host.
const FIRMWARE_WAIT: Duration = Duration::from_secs(30);

/// The interval at which that is checked.
const FIRMWARE_CHECK_INTERVAL: Duration = Duration::from_millis(100);

/// Refuses to save a VM that no restore could start again, unless the user has `accepted` that.
/// Returns the reasons.
pub(crate) fn check_restorable(
    vm: &mut QemuVm,
    hypervisor_record: &HypervisorRecord,
    accepted: bool,
) -> Result<Vec<String>, Failure> {
    let reasons = restore_obstacles(vm, hypervisor_record)?;
    if reasons.is_empty() || accepted {
        return Ok(reasons);
    }
    let hint = "change what is named here; `firn checkpoint --accept-unrestorable` makes an image anyway and marks it";
    Err(refuse_with(reasons, "a checkpoint of this VM could not be restored").with_hint(hint))
}

/// Refuses to protect a VM that no standby could run.
pub(crate) fn check_protectable(
    vm: &mut QemuVm,
    hypervisor_record: &HypervisorRecord,
) -> Result<(), Failure> {
    match restore_obstacles(vm, hypervisor_record)? {
        reasons if reasons.is_empty() => Ok(()),
        reasons => Err(refuse_with(reasons, "a standby could not run this VM")),
    }
}

/// The reasons why no QEMU could continue this VM.
fn restore_obstacles(
    vm: &mut QemuVm,
    hypervisor_record: &HypervisorRecord,
) -> Result<Vec<String>, Failure> {
    let facts = vm.machine_facts().while_doing("checking whether the VM could be restored")?;
    let qemu = &hypervisor_record.meta.qemu;
    let lines =
        CommandLines { user: &qemu.user_args, actual: &qemu.args, directory: &qemu.directory };
    Ok(find_obstacles(&lines, &facts).iter().map(ToString::to_string).collect())
}

fn refuse_with(reasons: Vec<String>, what: &str) -> Failure {
    Failure { kind: FailureKind::Refused, chain: reasons, hint: None }.while_doing(what)
}

/// QEMU's name for the run state of a VM that its user or an error has paused. A guest that sleeps
/// (S3) counts as running.
pub(crate) fn paused_state(state: &RunState) -> Option<String> {
    (!state.running && state.status != "suspended").then(|| state.status.clone())
}

/// Finds the VM's memory. Video memory can be read only while the guest maps it, so this waits for
/// firmware that has just started.
pub(crate) fn mapped_layout(
    vm: &mut QemuVm,
    hypervisor_record: &HypervisorRecord,
    is_running: bool,
    cancel: &AtomicBool,
) -> Result<MemoryLayout, Failure> {
    let wait = if is_running { FIRMWARE_WAIT } else { Duration::ZERO };
    let deadline = Instant::now() + wait;
    loop {
        let layout = qemu::find_layout(vm, &hypervisor_record.meta.qemu.user_args)?;
        let Some(block) = unmapped_block(&layout) else { return Ok(layout) };
        if cancel.load(Ordering::Relaxed) {
            return Err(Failure::new(FailureKind::Interrupted, "the save was cancelled"));
        }
        if Instant::now() >= deadline {
            return Err(not_mapped(block, is_running));
        }
        std::thread::sleep(FIRMWARE_CHECK_INTERVAL);
    }
}

/// A block that has to be saved, and whose address QEMU does not report.
fn unmapped_block(layout: &MemoryLayout) -> Option<&AuxRam> {
    layout.aux.iter().find(|block| !block.rom && block.hva.is_none())
}

fn not_mapped(block: &AuxRam, is_running: bool) -> Failure {
    let text =
        format!("the guest has not mapped {} ({} KiB of its memory)", block.id, block.bytes >> 10);
    let hint = match is_running {
        true => "save the VM when its guest uses the device, or start it without the device",
        false => "the VM is paused before its firmware has started: continue it first",
    };
    Failure::new(FailureKind::Other, text).with_hint(hint)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_vm_paused_by_its_user_is_restored_paused() {
        let state = |running, status: &str| RunState { running, status: status.to_owned() };
        assert_eq!(paused_state(&state(true, "running")), None);
        assert_eq!(paused_state(&state(false, "suspended")), None);
        assert_eq!(paused_state(&state(false, "paused")).as_deref(), Some("paused"));
        assert_eq!(paused_state(&state(false, "io-error")).as_deref(), Some("io-error"));
    }
}
