//! The status of a VM, for `firn ls` and `firn status`.

use std::path::PathBuf;

use firn_epochs::protection_end::ProtectionEnd;
use firn_vmm::command_line::list_forwards;
use serde::{Deserialize, Serialize};

use crate::devices::disk_snapshots::overlays_left;
use crate::devices::network::CardStatus;
use crate::hypervisor::memory_use::MemoryUse;
use crate::operations::protection::ProtectionStatus;
use crate::operations::standby::takeover::StandbyStatus;
use crate::records::checkpoint_tally::CheckpointTally;
use crate::records::control_protocol::{OperationProgress, RestoreOutage};
use crate::records::family::FamilyRecord;
use crate::records::journal::{Journal, JournalResult, VmPhase};
use crate::records::monitor_address::MonitorAddress;
use crate::records::name::VmName;
use crate::records::process_exit::ProcessExit;

/// The status of a VM, as a user sees it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct VmStatus {
    /// Its name.
    pub name: VmName,
    /// `starting`, `running`, `paused`, `saving`, `suspending`, `restoring`, `waiting`,
    /// `protected`, `standby`, `hung`, `ended`, `detached` or, if its journal can't be read,
    /// `unknown`.
    pub state: String,
    /// How it ended, if it has.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub exit: Option<ProcessExit>,
    /// The hypervisor's process.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pid: Option<i32>,
    /// Whether Firn started the hypervisor (`false`: Firn attached to it).
    pub launched: bool,
    /// Guest RAM, in bytes.
    pub memory_bytes: u64,
    /// Virtual CPUs.
    pub vcpus: u32,
    /// The hypervisor's version.
    pub qemu: String,
    /// `kvm` or `tcg`.
    pub accel: String,
    /// When Firn began to manage it, in seconds since 1970.
    pub since: u64,
    /// The hypervisor's monitor: a socket, or a domain of libvirt.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub qmp: Option<MonitorAddress>,
    /// The image that is being written or restored from.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub image: Option<PathBuf>,
    /// The progress of that.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub progress: Option<OperationProgress>,
    /// Files that its drives write to, or are about to write to, and that no image refers to.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub overlays: Vec<PathBuf>,
    /// The last event.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last: Option<JournalResult>,
    /// How often a successor has taken over from a dead supervisor.
    pub recoveries: u32,
    /// Its checkpoints, if there are any.
    #[serde(default, skip_serializing_if = "CheckpointTally::is_empty")]
    pub checkpoints: CheckpointTally,
    /// The state of its protection, if it is protected.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub protection: Option<ProtectionStatus>,
    /// The state of the standby, if it is one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub standby: Option<StandbyStatus>,
    /// How its protection ended, if it was protected.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub protection_end: Option<ProtectionEnd>,
    /// The generation whose lease its output needs, if it needs one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub lease: Option<u32>,
    /// Its network cards whose frames pass through Firn.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub network: Vec<CardStatus>,
    /// The memory that can't be read or installed at present, if the VM is being restored.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub waiting: Option<RestoreOutage>,
    /// The family of clones that it belongs to.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub family: Option<FamilyRecord>,
    /// What its memory uses of the host's, if it belongs to a family.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory_use: Option<MemoryUse>,
    /// The ports of the host that lead to its guest, as QEMU's rules `hostfwd` have them.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub forwards: Vec<String>,
    /// The guest's file systems are frozen for a checkpoint, or could not be thawed yet.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub frozen: bool,
    /// The reason why no supervisor answers for it, and what helps.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub unattended: Option<UnattendedVm>,
    /// The supervisor's process id.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub supervisor_pid: Option<i32>,
    /// The guard's process id.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub guard_pid: Option<i32>,
    /// The watcher's process id.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub watcher_pid: Option<i32>,
}

/// The reason why a VM has no supervisor that answers.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct UnattendedVm {
    /// What is wrong.
    pub why: String,
    /// The command that helps.
    pub hint: String,
    /// The supervisor, if there is one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub supervisor_pid: Option<i32>,
}

impl VmStatus {
    /// The status of a VM whose journal can't be read.
    pub(crate) fn for_unreadable_journal(name: VmName) -> Self {
        let status = Self::from_journal(&Journal::new(name, None));
        Self { state: "unknown".to_owned(), ..status }
    }

    /// Adds the progress of the running operation.
    pub(crate) fn with_progress(mut self, progress: Option<OperationProgress>) -> Self {
        self.waiting = progress.as_ref().and_then(|progress| progress.waiting.clone());
        if self.waiting.as_ref().is_some_and(|waiting| waiting.guest_waits) {
            self.state = "waiting".to_owned();
        }
        self.progress = progress;
        self
    }

    /// The status as the journal alone describes it.
    pub fn from_journal(journal: &Journal) -> Self {
        let hypervisor_record = journal.hypervisor_record.as_ref();
        let meta = hypervisor_record
            .map(|hypervisor_record| hypervisor_record.meta.clone())
            .unwrap_or_default();
        let (image, exit) = match &journal.phase {
            VmPhase::Saving { image, .. } | VmPhase::Restoring { image, .. } => {
                (Some(image.clone()), None)
            }
            VmPhase::Ended { exit, .. } => (None, Some(*exit)),
            _ => (None, None),
        };
        Self {
            name: journal.name.clone(),
            state: journal.phase.state_word().to_owned(),
            exit,
            pid: hypervisor_record.map(|hypervisor_record| hypervisor_record.process.pid),
            launched: hypervisor_record.is_none_or(|hypervisor_record| hypervisor_record.launched),
            memory_bytes: meta.memory_bytes,
            vcpus: meta.vcpus,
            qemu: meta.qemu.version,
            accel: meta.qemu.accel,
            since: hypervisor_record
                .map(|hypervisor_record| hypervisor_record.since)
                .unwrap_or_default(),
            qmp: hypervisor_record.map(|hypervisor_record| hypervisor_record.qmp.clone()),
            image,
            progress: None,
            overlays: overlays_left(journal),
            last: journal.last.clone(),
            recoveries: journal.recoveries,
            checkpoints: journal.checkpoints.clone(),
            protection: None,
            standby: None,
            protection_end: journal.protection_end.clone(),
            lease: journal.lease,
            network: Vec::new(),
            waiting: None,
            family: journal.family.clone(),
            memory_use: None,
            forwards: if exit.is_none() { list_forwards(&meta.qemu.args) } else { Vec::new() },
            frozen: journal.frozen && exit.is_none(),
            unattended: None,
            supervisor_pid: None,
            guard_pid: None,
            watcher_pid: None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::hypervisor_record;

    #[test]
    fn the_status_of_an_ended_vm_has_its_end() {
        let mut journal = Journal::new(VmName::new("web").unwrap(), None);
        journal.hypervisor_record = Some(hypervisor_record(true));
        journal.phase = VmPhase::Ended { exit: ProcessExit::Signal(11), at: 5 };
        let status = VmStatus::from_journal(&journal);
        assert_eq!((status.state.as_str(), status.exit), ("ended", Some(ProcessExit::Signal(11))));
    }
}
