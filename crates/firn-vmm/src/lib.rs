//! The hypervisor, controlled from outside: QEMU, unmodified, over its monitor.
//!
//! ```text
//!   command_line   a user's own QEMU arguments, plus shared RAM and a monitor
//!   launch         starts it, in a session of its own
//!   qmp            talks to it          hmp   reads what only the human monitor prints
//!   layout         where guest RAM lies: guest-physical, and in QEMU's address space
//!   device_state   devices and vCPUs, out of one QEMU and into another
//!   hold           the shortest pause in which devices are saved
//!   openings       when the hypervisor opens the pipe it is held by
//!   disks          which files its disks are, and whether they still are the same
//!   devices        the devices that a user gave it, and when
//!   drives         which of them the guest writes to, and how they are kept as they are
//!   restorable     whether the command line still describes the VM, so that it can be restored
//!   backup         copies of their contents at one instant, by jobs of the hypervisor
//!   flush          writing their files back before a pause
//!   commit         layers of drives merged into those below them
//!   vm             all of it as one VM
//! ```
//!
//! Whatever QEMU says is input from outside: lines have a longest length, waits have an end, numbers are checked, and
//! an error names the command it belongs to. Page faults and guest memory itself are other crates' concern.

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
