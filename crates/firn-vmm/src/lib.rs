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
//!   devices        the devices that a user added, at the start or later
//!   drives         the disks that the guest writes to, and how their contents are preserved
//!   restorable     whether the command line still describes the VM, so that it can be restored
//!   backup         point-in-time copies of disks, by jobs of the hypervisor
//!   flush          writes files back before a pause
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
mod device_state;
mod devices;
mod disks;
mod drives;
mod flush;
pub mod hmp;
mod hold;
mod launch;
pub mod layout;
mod openings;
mod qcow2;
pub mod qmp;
pub mod restorable;
mod version;
mod vm;
mod wait;

pub use backup::{
    BaseFile, COPIES_MAX, CopyError, CopyExtent, DriveCopy, allocated_bytes, files_below,
};
pub use commit::{Commit, JOB_PREFIX, JobState};
pub use device_state::{DeviceStateError, STATE_BYTES_MAX};
pub use devices::DevicePath;
pub use disks::{Disk, FileIdentity};
pub use drives::{
    Below, CHAIN_MAX, CutError, Drive, DriveCut, DriveError, Expected, Overlay, can_clone,
    create_overlay,
};
pub use hold::{Held, Look, Released};
pub use launch::{LaunchError, Launched, find_program, launch, log_tail};
pub use layout::{AuxRam, Layout, LayoutError, Location};
pub use qcow2::file_below;
pub use qmp::{Qmp, QmpError};
pub use version::{Number, Version};
pub use vm::{Accel, Balloon, PageTableRoot, RunState, TIMEOUT, Vcpu, Vm};
