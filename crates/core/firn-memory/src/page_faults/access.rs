//! How a process of this user gets a userfaultfd that works for a hypervisor.
//!
//! A hypervisor faults inside the kernel too, by `read(2)` into guest memory and in KVM. A
//! userfaultfd that reports such faults is for privileged processes: by the system call with
//! CAP_SYS_PTRACE or `vm.unprivileged_userfaultfd=1`, or by the device with the right to open it.

use std::os::fd::AsFd;

use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;

use super::error::PageFaultError;
use super::make::DEVICE;
use crate::sys::uffd;

/// The method by which a process gets a userfaultfd that reports all faults.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum UserfaultfdAccess {
    /// The system call userfaultfd(2).
    SystemCall,
    /// The device `/dev/userfaultfd` (Linux 6.1).
    Device,
}

impl UserfaultfdAccess {
    /// Tries both methods: makes a userfaultfd and closes it.
    ///
    /// # Errors
    /// If this user may use neither: the reason why the device cannot be used.
    pub fn of_this_user() -> Result<Self, PageFaultError> {
        if uffd::own_unrestricted().is_ok() {
            return Ok(Self::SystemCall);
        }
        probe_device()
            .map(|()| Self::Device)
            .map_err(|source| PageFaultError::Unavailable { source })
    }
}

fn probe_device() -> Result<(), Errno> {
    let device = rustix::fs::open(DEVICE, OFlags::RDWR | OFlags::CLOEXEC, Mode::empty())?;
    uffd::own_by_device(device.as_fd()).map(drop)
}
