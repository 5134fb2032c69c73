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

mod auxiliary;
mod calls;
mod changes;
mod client;
mod cpu;
mod decisions;
mod disk_copies;
mod disk_layers;
mod disks;
mod endpoints;
mod failure;
mod force;
mod guard;
mod held;
mod host_check;
mod identity;
mod inspection;
mod journal;
mod keep;
mod learned;
mod lock;
mod log;
mod meta;
mod monitor;
mod name;
mod network;
mod operations;
mod outage;
mod ownership;
mod percentiles;
mod processes;
mod programs;
mod protection;
mod protection_end;
mod protocol;
mod qemu;
mod recover;
mod recovery;
mod relocation;
mod restarts;
mod restore;
mod runtime;
mod served;
mod server;
mod serving;
mod spawn;
mod standby;
mod standby_files;
mod start;
mod status;
mod storage;
mod stores;
mod supervise;
mod survey;
#[cfg(test)]
mod testing;
mod unix_sockets;
mod usage;
mod watch;
mod ways;

pub use client::{
    OnProgress, Starting, absolute, ask, forget, glance, glances, look_after, start, status,
};
pub use cpu::CpuFacts;
pub use disk_layers::{Removed, disks_now, note_copy, remove_images};
pub use failure::{Context, Failure, FailureKind, image_failure};
pub use firn_epochs::primary_end::PrimaryEnd;
pub use firn_vmm::command_line::Overrides;
pub use force::stop_by_force;
pub use guard::{guard, watcher};
pub use host_check::{HostCheck, check_host};
pub use identity::{ProcessHandle, ProcessIdentity};
pub use journal::{Exit, Journal, JournalError, Note, Phase};
pub use meta::{FrozenDrive, Meta, Mismatch, Qemu};
pub use name::{NAME_BYTES_MAX, NetworkName, NetworkNameError, VmName, VmNameError};
pub use network::{Card, CardStatus};
pub use percentiles::Percentiles;
pub use protection::Protection;
pub use protocol::{
    FailoverMember, FailoverRequest, MemberCard, MemberRequest, Plan, Progress, ProtectRequest,
    Reply, Request, RestoreDisks, RestoreNow, SaveChoices, SaveDisks, SaveRequest, StopRequest,
    Waiting,
};
pub use restore::Timings;
pub use runtime::{RuntimeDir, RuntimeError, VmDir, make_private};
pub use spawn::{GUARD, RECOVER, SUPERVISE, WATCHER};
pub use standby::Readiness;
pub use status::{Status, Unattended};
pub use supervise::{recover, supervise};
pub use survey::{inspect, revive, survey};
pub use ways::{Command, Remnant, Supervision, way_out, way_out_after};
