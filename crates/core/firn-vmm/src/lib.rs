//! Control of an unmodified QEMU over its monitor.
//!
//! ```text
//!   command_line   the user's QEMU arguments, plus shared RAM and a monitor
//!   launch         starts QEMU, in a session of its own
//!   qmp            the QMP client       hmp   parsers of output that only the human monitor prints
//!   layout         the addresses of guest RAM: guest-physical, and in QEMU's address space
//!   device_state   saves devices and vCPUs from one QEMU, loads them into another
//!   pause_pipe     the shortest pause in which devices are saved
//!   open_watch     reports when QEMU opens the pipe that blocks it
//!   disks          the files of the VM's disks, and whether they are still the same
//!   connection_probe  has a guest find out which of its connections have ended
//!   devices        the devices that a user added, at the start or later
//!   drives         the disks that the guest writes to, and how their contents are preserved
//!   storage_snapshot  snapshots of disks that their storage makes, by a command of the user's
//!   guest_agent    the agent in the guest: sets its clock, freezes it, runs a program
//!   restorable     whether the command line still describes the VM, so that it can be restored
//!   backup         point-in-time copies of disks, by jobs of the hypervisor
//!   flush          writes files back before a pause
//!   mirror         jobs that send a drive, and each write of the guest, to an NBD server
//!   commit         merges layers of drives into those below them
//!   vm             all of it for one VM
//! ```
//!
//! QEMU's output is untrusted input: lines have a maximum length, waits have a deadline, numbers
//! are checked, and an error names the command that it belongs to. Page faults and guest memory are
//! handled by other crates.

#![forbid(unsafe_code)]

mod backup;
pub mod command_line;
mod commit;
mod connection_probe;
mod device_state;
mod devices;
mod disks;
mod drives;
mod filters;
mod flush;
mod guest_agent;
pub mod hmp;
mod launch;
pub mod layout;
mod mirror;
mod namespace_threads;
mod network_disks;
mod open_watch;
mod pause_pipe;
mod qcow2;
pub mod qmp;
pub mod restorable;
mod storage_snapshot;
mod version;
mod vm;
mod wait;

pub use backup::{
    BaseFile, COPIES_MAX, CopyError, CopyExtent, DriveCopy, allocated_bytes, list_backing_files,
};
pub use commit::{BlockCommit, JOB_PREFIX, JobState};
pub use device_state::{DeviceStateError, STATE_BYTES_MAX};
pub use devices::DevicePath;
pub use disks::{DiskImage, FileIdentity};
pub use drives::{
    CHAIN_MAX, CutError, Drive, DriveCut, DriveError, ExpectedDrive, Overlay, OverlayBase,
    can_clone, create_overlay,
};
pub use filters::FilterSide;
pub use guest_agent::{GuestAgent, GuestAgentError, GuestProgramEnd};
pub use hmp::{ConnectedCard, UserConnection};
pub use launch::{LaunchError, LaunchedProcess, find_program, launch_hypervisor, read_log_tail};
pub use layout::{AuxRam, LayoutError, MemoryLayout, RegionMapping};
pub use mirror::{MirrorExtent, MirrorProgress, MirrorState, mirror_name};
pub use namespace_threads::find_namespaced_process;
pub use pause_pipe::{PauseOutcome, PausedVm, WaitMode};
pub use qcow2::read_backing_file;
pub use qmp::{QmpClient, QmpError};
pub use storage_snapshot::{StorageCommand, StorageSnapshot, StorageSnapshotError};
pub use version::{QemuVersion, VersionNumber};
pub use vm::{AcceleratorKind, BalloonInfo, PageTableRoot, QemuVm, RunState, TIMEOUT, Vcpu};
