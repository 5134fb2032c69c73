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
//! Everything here is for one user: directories are 0700, sockets and files 0600, and logs contain
//! nothing of a guest.

#![forbid(unsafe_code)]

mod access_scan;
mod auxiliary;
mod calls;
mod client;
mod control_protocol;
mod control_server;
mod cpu;
mod decisions;
mod dirty_tracking;
mod disk_copies;
mod disk_kinds;
mod disk_layers;
mod disk_snapshots;
mod endpoints;
mod event_loop;
mod event_sources;
mod failure;
mod force;
mod guard;
mod host_check;
mod identity;
mod image_files;
mod inspection;
mod journal;
mod learned_blocks;
mod lock;
mod log;
mod meta;
mod monitor;
mod name;
mod network;
mod outage;
mod ownership;
mod percentiles;
mod processes;
mod programs;
mod protection;
mod protection_end;
mod qemu;
mod recovery_plan;
mod recovery_run;
mod relocation;
mod restarts;
mod restore;
mod restore_work;
mod runtime;
mod save_tries;
mod served_disks;
mod spawn;
mod standby;
mod standby_files;
mod status;
mod storage_latency;
mod store_plugin;
mod suggested_command;
mod supervisor_process;
#[cfg(test)]
mod testing;
mod unix_sockets;
mod vm_operations;
mod vm_start;
mod vm_survey;

pub use client::{
    OnProgress, SupervisorStart, absolute_path, ensure_supervisor, forget_vm, query_status,
    quick_status, quick_statuses, send_request, start_supervisor,
};
pub use control_protocol::{
    FailoverMember, FailoverRequest, MemberCard, MemberRequest, OperationProgress, ProtectRequest,
    RestoreDisks, RestoreOutage, RestoreProgress, SaveChoices, SaveDisks, SaveRequest, StopRequest,
    SupervisorPlan, SupervisorReply, SupervisorRequest,
};
pub use cpu::CpuFacts;
pub use disk_layers::{RemovedImage, note_copy, remove_images, resolve_current_disks};
pub use failure::{Failure, FailureContext, FailureKind, image_failure};
pub use firn_epochs::primary_end::PrimaryEnd;
pub use firn_vmm::command_line::CommandOverrides;
pub use force::stop_by_force;
pub use guard::{run_guard, run_watcher};
pub use host_check::{HostCheck, check_host};
pub use identity::{ProcessHandle, ProcessIdentity};
pub use journal::{Journal, JournalError, JournalNote, ProcessExit, VmPhase};
pub use meta::{FrozenDrive, HostMismatch, ImageMeta, QemuFacts};
pub use name::{NAME_BYTES_MAX, NetworkName, NetworkNameError, VmName, VmNameError};
pub use network::{CardStatus, NetworkCard};
pub use percentiles::Percentiles;
pub use protection::ProtectionStatus;
pub use restore::RestoreTimings;
pub use runtime::{RuntimeDir, RuntimeError, VmDir, make_private};
pub use spawn::{GUARD, RECOVER, SUPERVISE, WATCHER};
pub use standby::StandbyStatus;
pub use status::{UnattendedVm, VmStatus};
pub use suggested_command::{
    SuggestedCommand, SupervisorState, VmRemnant, suggest_command, suggest_command_after,
};
pub use supervisor_process::{run_successor, run_supervisor};
pub use vm_survey::{inspect_vm, list_statuses, restart_supervisors};
