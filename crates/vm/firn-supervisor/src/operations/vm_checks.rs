//! What could be done to a running VM: each operation is checked as its command checks it, and
//! nothing is changed.
//!
//! ```text
//!   for all saves     served disks, migration blockers, obstacles to a restore, memory, drives
//!   by strategy       trace: shared memory that only this hypervisor maps; pre-copy: the kernel tracks writes
//!   protection        guest calls, blocked output, obstacles to a standby, disks, balloon, kernel
//! ```

use std::path::PathBuf;

use firn_checkpoint::{SaveError, check_discards};
use firn_epochs::guest;
use firn_vmm::QemuVm;
use serde::{Deserialize, Serialize};

use crate::devices::card_filters;
use crate::devices::disk_copies::DiskPolicy;
use crate::devices::disk_snapshots::DiskSnapshots;
use crate::devices::mirrored_disks::EpochDiskPlan;
use crate::devices::served_disks::ServedDisks;
use crate::hypervisor::qemu::VmMemory;
use crate::hypervisor::{inspection, qemu};
use crate::operations::dirty_tracking;
use crate::operations::save_checks::{refuse_blocked, refuse_filtered_output, refuse_served_disks};
use crate::records::control_protocol::{SaveChoices, SaveRequest};
use crate::records::failure::{Failure, FailureContext, FailureKind};
use crate::records::journal::{HypervisorRecord, Journal};

/// The verdict on one operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum OperationVerdict {
    /// The operation works.
    Works,
    /// It works, with a limit.
    Limited,
    /// Its command would refuse this VM.
    Refused,
}

/// Whether an operation on a VM works.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct OperationCheck {
    /// The command, without the VM's name: `checkpoint --strategy cow`.
    pub operation: String,
    /// Whether it works.
    pub verdict: OperationVerdict,
    /// The limit, or the reasons for the refusal.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub reasons: Vec<String>,
    /// What changes the verdict.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub hint: Option<String>,
}

/// What limits an operation that works; `None` if nothing does.
type OperationLimit = Option<String>;

impl OperationCheck {
    fn new(operation: &str, checked: Result<OperationLimit, Failure>) -> Self {
        let operation = operation.to_owned();
        let (verdict, reasons, hint) = match checked {
            Ok(None) => (OperationVerdict::Works, Vec::new(), None),
            Ok(Some(limit)) => (OperationVerdict::Limited, vec![limit], None),
            Err(failure) => (OperationVerdict::Refused, failure.chain, failure.hint),
        };
        Self { operation, verdict, reasons, hint }
    }
}

/// A VM that is checked, and the context that its commands have.
pub(crate) struct CheckedVm<'a> {
    pub(crate) hypervisor_record: &'a HypervisorRecord,
    pub(crate) journal: &'a Journal,
    pub(crate) served: &'a ServedDisks,
}

impl CheckedVm<'_> {
    /// Checks all operations. `protectable` is the verdict of the checks that need no monitor.
    pub(crate) fn check_operations(
        &self,
        vm: &mut QemuVm,
        protectable: Result<(), Failure>,
    ) -> Result<Vec<OperationCheck>, Failure> {
        let layout = qemu::find_layout(vm, &self.hypervisor_record.meta.qemu.user_args)?;
        let memory = qemu::open_memory(self.hypervisor_record.process.pid, &layout)?;
        let save = self.check_save(vm, false);
        let live = save.clone().and_then(|()| check_live(vm, &memory));
        let trace = live.clone().and_then(|limit| check_trace(&memory).map(|()| limit));
        let fitting = if memory.guest.is_shared() { &trace } else { &live };
        let rows = [
            ("checkpoint", fitting.clone()),
            ("checkpoint --strategy trace", trace.clone()),
            ("checkpoint --strategy cow", live.clone()),
            (
                "checkpoint --strategy pre-copy",
                live.clone().and_then(|limit| check_pre_copy(&limit, &memory)),
            ),
            ("checkpoint --strategy stop", save.clone().map(|()| None)),
            (
                "checkpoint --parent IMAGE",
                live.clone().and_then(|limit| check_increment(&limit, &memory)),
            ),
            ("suspend", self.check_save(vm, true).map(|()| None)),
            ("restore", self.check_restore(vm, &memory)),
            ("protect", protectable.and_then(|()| self.check_protect(vm, &memory))),
        ];
        Ok(rows.into_iter().map(|(name, checked)| OperationCheck::new(name, checked)).collect())
    }

    fn check_save(&self, vm: &mut QemuVm, then_stop: bool) -> Result<(), Failure> {
        refuse_served_disks(self.hypervisor_record)?;
        refuse_filtered_output(self.journal)?;
        refuse_blocked(vm.migration_blockers().while_doing("querying migration blockers")?)?;
        inspection::check_restorable(vm, self.hypervisor_record, false)?;
        let (image, choices) = (PathBuf::from("/image.firn"), SaveChoices::default());
        let request = SaveRequest {
            image,
            choices,
            keys: Vec::new(),
            store: None,
            cancel_with_client: false,
        };
        let policy = DiskPolicy::new(self.hypervisor_record, self.journal, &request, None);
        DiskSnapshots::plan_drives(vm, &self.hypervisor_record.meta, policy, then_stop).map(drop)
    }

    fn check_restore(&self, vm: &mut QemuVm, memory: &VmMemory) -> Result<OperationLimit, Failure> {
        inspection::check_restorable(vm, self.hypervisor_record, false)?;
        let state = vm.status().while_doing("querying whether the VM runs")?;
        let paused = inspection::paused_state(&state)
            .map(|state| format!("the VM is paused ({state}) and comes back paused"));
        let is_huge = memory.guest.has_huge_pages();
        let ordinary =
            is_huge.then(|| "its RAM comes back in ordinary pages, not in huge pages".to_owned());
        let limits: Vec<String> = paused.into_iter().chain(ordinary).collect();
        Ok((!limits.is_empty()).then(|| limits.join("; ")))
    }

    fn check_protect(&self, vm: &mut QemuVm, memory: &VmMemory) -> Result<OperationLimit, Failure> {
        inspection::check_protectable(vm, self.hypervisor_record)?;
        let disks = EpochDiskPlan::plan_drives(vm, self.hypervisor_record, self.served)?;
        guest::check_protectable(vm, &memory.guest, &disks.epoch_disks(self.served))
            .map_err(|error| Failure::from_error(FailureKind::Refused, &error))?;
        let unfiltered = card_filters::predict_unfiltered(vm, self.hypervisor_record)?;
        let limit = format!("output is not buffered through {}", unfiltered.join(", "));
        Ok((!unfiltered.is_empty()).then_some(limit))
    }
}

/// Checks what all strategies need that copy memory while the guest runs.
fn check_live(vm: &mut QemuVm, memory: &VmMemory) -> Result<OperationLimit, Failure> {
    dirty_tracking::refuse_other_writers(&memory.guest)?;
    match vm.balloon().while_doing("querying the balloon")? {
        None => Ok(None),
        Some(_) => {
            check_discards(&memory.guest)
                .map_err(|error| Failure::from_error(FailureKind::Refused, &error))?;
            Ok(Some(
                "if its balloon grows during the save, or it reports free pages, the save may be tried again"
                    .to_owned(),
            ))
        }
    }
}

fn check_trace(memory: &VmMemory) -> Result<(), Failure> {
    if memory.guest.is_shared() {
        return Ok(());
    }
    let text =
        "the guest's RAM is private memory of the hypervisor, of which only writes can be traced";
    let hint = "start the VM with shared RAM (memory-backend-memfd with share=on; `firn run` does that), or use `--strategy cow`";
    Err(Failure::new(FailureKind::Refused, text).with_hint(hint))
}

/// Of a guest with a balloon, `live` is the limit of its saves.
fn check_pre_copy(live: &OperationLimit, memory: &VmMemory) -> Result<OperationLimit, Failure> {
    if live.is_some() && memory.guest.has_huge_pages() {
        let error = SaveError::huge_pages_in_pre_copy();
        return Err(Failure::from_error(FailureKind::Refused, &error));
    }
    match dirty_tracking::can_track_writes() {
        true => Ok(None),
        false => {
            let text = "this kernel can't track writes (Linux 6.7 can)";
            Err(Failure::new(FailureKind::Refused, text).with_hint("`firn doctor` shows more"))
        }
    }
}

/// A checkpoint with a parent is by pre-copy where writes can be tracked. Of a guest with a balloon,
/// `live` is the limit of its saves.
fn check_increment(live: &OperationLimit, memory: &VmMemory) -> Result<OperationLimit, Failure> {
    if dirty_tracking::can_track_writes() {
        check_pre_copy(live, memory)?;
    }
    let why = match live {
        _ if !dirty_tracking::can_track_writes() => {
            "this kernel can't track writes between checkpoints"
        }
        Some(_) if memory.guest.is_shared() => {
            "in shared memory, what a balloon takes between checkpoints is not reported"
        }
        _ => return Ok(None),
    };
    Ok(Some(format!("{why}, so all memory is read and compared")))
}
