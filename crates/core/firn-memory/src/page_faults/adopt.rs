//! Adoption of a userfaultfd that a dead Firn left behind.
//!
//! ```text
//!   hypervisor's table   fd 3  /dev/kvm
//!                        fd 9  anon_inode:[userfaultfd]    fdinfo: API: aa:80001523:...   <- features: Firn's, of a save
//! ```
//!
//! A descriptor is Firn's if it was made with exactly the features that Firn asks for. The
//! descriptor with which RAM is registered is found by registering RAM again, which the kernel
//! allows to that descriptor only.

use std::sync::Arc;

use super::{KernelFeatures, PageFaultError, PageFaults, TraceMode, make};
use crate::guest_memory::GuestMemory;
use crate::process::Process;
use crate::sys::uffd::Uffd;
use crate::tracee::Tracee;

const USERFAULTFD: &str = "anon_inode:[userfaultfd]";

impl PageFaults {
    /// Adopts what a dead Firn left in the hypervisor, and wakes all threads that wait: they fault
    /// again, as the dead Firn may have read some faults without answering them. `None` if nothing
    /// was left.
    ///
    /// The caller makes sure that the other Firn is dead.
    ///
    /// # Errors
    /// If the hypervisor is gone or cannot be accessed.
    /// If the hypervisor is gone or out of reach.
    pub fn adopt(
        process: &Process,
        memory: Arc<GuestMemory>,
    ) -> Result<Option<Self>, PageFaultError> {
        for (remote, trace) in stale_descriptors(process)? {
            let uffd = Uffd::new(process.copy_descriptor(remote)?);
            let found =
                Self::from_parts(memory.clone(), uffd, remote, trace, KernelFeatures::of_kernel()?);
            if found.holds_memory()? {
                found.wake_waiters(found.memory.all_pages())?;
                return Ok(Some(found));
            }
        }
        Ok(None)
    }

    /// Closes every userfaultfd of a dead Firn in the hypervisor, with all that is registered with
    /// it. Returns their number. Missing pages read as zeros afterwards: only for a save, or when
    /// all of RAM is present.
    ///
    /// # Errors
    /// If the hypervisor is gone or cannot be accessed.
    pub fn close_stale(tracee: &mut Tracee<'_>) -> Result<usize, PageFaultError> {
        let stale = stale_descriptors(tracee.process())?;
        for &(remote, _) in &stale {
            make::close_descriptor(tracee, remote)?;
        }
        Ok(stale.len())
    }

    /// Whether RAM is registered with this descriptor. If it was registered with none, it is
    /// registered with this one now.
    fn holds_memory(&self) -> Result<bool, PageFaultError> {
        match self.register_range(self.memory.all_pages()) {
            Ok(()) => Ok(true),
            Err(PageFaultError::Taken { .. }) => Ok(false),
            Err(error) => Err(error),
        }
    }
}

/// The descriptors in the process's table that Firn made.
fn stale_descriptors(process: &Process) -> Result<Vec<(i32, TraceMode)>, PageFaultError> {
    let descriptors = process.list_descriptors()?;
    let userfaultfds = descriptors.iter().filter(|descriptor| descriptor.target == USERFAULTFD);
    Ok(userfaultfds
        .filter_map(|descriptor| {
            let info = process.read_proc_file(&format!("fdinfo/{}", descriptor.number)).ok()?;
            Some((descriptor.number, TraceMode::of_features(parse_features(&info)?)?))
        })
        .collect())
}

/// Reads the features of a descriptor from its line `API: aa:FEATURES:...` (hexadecimal).
fn parse_features(info: &str) -> Option<u64> {
    let line = info.lines().find_map(|line| line.strip_prefix("API:"))?;
    u64::from_str_radix(line.trim().split(':').nth(1)?, 16).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn features_are_read_from_the_kernels_line() {
        let info = "pos:\t0\nflags:\t02004002\npending:\t0\ntotal:\t0\nAPI:\taa:80001521:1ffff\n";
        assert_eq!(parse_features(info), Some(0x8000_1521));
        assert_eq!(parse_features("pos:\t0\n"), None);
        assert_eq!(parse_features("API:\taa\n"), None);
    }
}
