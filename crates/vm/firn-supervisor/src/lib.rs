//! The supervisor: one small process for each VM, and two that restart it.
//!
//! ```text
//!    firn checkpoint web -o web.firn                     firn ls, firn status, firn stop, ...
//!          |  control.sock (JSON lines)                        |
//!          v                                                   v
//!    supervisor "web" <----- pidfd, restart -----> guard, watcher        no central daemon
//!          |  journal.json                               |  reads journal.json
//!          |  QMP, userfaultfd, pidfd                     '- runs `firn __supervise web --recover`
//!          v
//!    qemu-system-x86_64 ...
//! ```
//!
//! A supervisor starts a hypervisor (or attaches to one), saves and restores its VM, serves the
//! page faults of a restore, and notices when the hypervisor ends. It may be killed at any moment:
//! the journal records each important step before it is done, the hypervisor keeps the userfaultfd,
//! and a successor reads the one and adopts the other, within milliseconds. `recovery_plan` decides
//! what a successor does, `decisions` what a living supervisor does; both are pure cores. The other
//! modules are threads, sockets and files.
//!
//! | room | holds | uses |
//! |---|---|---|
//! | `records` | plain data: journal, image description, requests, failures, names | |
//! | `processes` | process identity, ownership, locks, the start of Firn's own processes | `records` |
//! | `hypervisor` | QEMU: monitor, queries, its command line | the two above |
//! | `devices` | disks, their snapshots and layers; network cards | the three above |
//! | `operations` | start, checkpoint, restore, protect | the four above |
//! | `daemon` | the supervisor process: event loop and decisions | all above |
//! | `recovery` | guards, successors, VMs without a supervisor | all above |
//! | `client`, `families` | what commands ask of a supervisor, and of a template's holder | `records`, `processes`, `recovery` |
//!
//! Everything here is for one user: directories are 0700, sockets and files 0600, and logs contain
//! nothing of a guest.

#![forbid(unsafe_code)]

mod client;
mod daemon;
mod devices;
mod families;
mod hypervisor;
mod operations;
mod processes;
mod records;
mod recovery;
#[cfg(test)]
mod testing;

pub use client::{
    OnProgress, SupervisorStart, absolute_path, ensure_supervisor, forget_vm, query_status,
    quick_status, quick_statuses, send_request, start_supervisor,
};
pub use daemon::status::{UnattendedVm, VmStatus};
pub use daemon::supervisor_process::{run_successor, run_supervisor};
pub use daemon::template_holder::run_template_holder;
pub use devices::disk_layers::{RemovedImage, record_copy, remove_images, resolve_current_disks};
pub use devices::network::CardStatus;
pub use families::{NewFamily, check_clones};
pub use firn_epochs::protection_end::ProtectionEnd;
pub use firn_vmm::command_line::{CommandOverrides, GuestConsole};
pub use firn_vmm::{GuestProgramEnd, StorageCommand};
pub use hypervisor::consoles::find_vm_consoles;
pub use hypervisor::host_check::{HostCheck, check_host};
pub use hypervisor::libvirt::{find_libvirt_vm, restore_target};
pub use hypervisor::memory_use::MemoryUse;
pub use operations::guest_program::run_in_guest;
pub use operations::image_origin::{ImageOrigin, OriginReport, report_origin};
pub use operations::learned_blocks::blocks_needed_first;
pub use operations::process_check::check_process;
pub use operations::protection::ProtectionStatus;
pub use operations::restore::RestoreTimings;
pub use operations::standby::takeover::StandbyStatus;
pub use operations::vm_checks::{OperationCheck, OperationVerdict};
pub use processes::identity::{ProcessHandle, ProcessIdentity};
pub use processes::runtime::{RuntimeDir, RuntimeError, VmDir, make_private};
pub use processes::spawn::{GUARD, HOLD_TEMPLATE, RECOVER, SUPERVISE, WATCHER};
pub use processes::state_dir::spool_dir;
pub use processes::store_program::StoreProgram;
pub use records::checkpoint_tally::{CheckpointFailure, CheckpointNote, CheckpointTally};
pub use records::control_protocol::{
    FailoverMember, FailoverRequest, MemberCard, MemberRequest, OperationProgress, ProtectRequest,
    RestoreDisks, RestoreOutage, RestoreProgress, SaveChoices, SaveDisks, SaveRequest, StopRequest,
    SupervisorPlan, SupervisorReply, SupervisorRequest,
};
pub use records::cpu::CpuFacts;
pub use records::device_records::{DriveSnapshot, NetworkCard, ServedDisk, SnapshotFile};
pub use records::failure::{Failure, FailureContext, FailureKind, image_failure};
pub use records::family::FamilyRecord;
pub use records::journal::{Journal, JournalError, JournalResult, VmPhase};
pub use records::meta::{FrozenDrive, HostMismatch, ImageMeta, QemuFacts};
pub use records::monitor_address::MonitorAddress;
pub use records::name::{NAME_BYTES_MAX, NetworkName, NetworkNameError, VmName, VmNameError};
pub use records::percentiles::Percentiles;
pub use records::process_exit::ProcessExit;
pub use records::restored_domain::{LibvirtTarget, RestoredDomain};
pub use records::store_target::{StoreCredentials, StoreTarget};
pub use recovery::force::stop_by_force;
pub use recovery::guard::{run_guard, run_watcher};
pub use recovery::suggested_command::{
    SuggestedCommand, SupervisorState, VmState, suggest_command, suggest_command_after,
};
pub use recovery::vm_survey::{inspect_vm, list_statuses, restart_supervisors};
