//! KVM host: a machine in which KVM works, on any host: Linux under QEMU's TCG, which emulates
//! AMD's virtualization.
//!
//! ```text
//!   host, its own kernel          KvmHost::new(), run()
//!     first-level guest           Debian's kernel, /dev/kvm, stock QEMU; built by `guests/build kvm-host`
//!       command                   firn, firn-lab, a test: what the GuestPayload contains
//!         second-level guest      under `-accel kvm`, its page faults taken by KVM
//! ```
//!
//! KVM behaves there as on hardware, but times there mean nothing. The machine has one processor by
//! default: with two, each emulated by its own thread, busy second-level guests end by a triple
//! fault every few minutes, with Firn or without, and at times the first-level kernel with them
//! (seen with QEMU 7.2 and 10, and not with one processor). The first boot is saved to a file
//! beside the guest image; later runs start from that file. A run gets its files as a tar on a disk
//! and leaves nothing behind.

mod boot;
mod command;
mod error;
mod payload;
mod task;

use std::io::Write;
use std::path::PathBuf;
use std::time::Duration;

pub use command::KvmHostArgs;
pub use error::KvmHostError;
pub use payload::GuestPayload;

use crate::guest::GuestImage;
use boot::FirstLevelLauncher;

/// A first-level guest that can be started.
#[derive(Clone, Debug)]
pub struct KvmHost {
    image: GuestImage,
    disk: PathBuf,
    cpus: u32,
}

impl KvmHost {
    /// Builds the guest if it is not cached, which takes half a minute.
    pub fn new() -> Result<Self, KvmHostError> {
        Self::from_guest("kvm-host")
    }

    /// Like [`Self::new`], with a kernel that can track the pages that a process writes (Linux
    /// 6.7).
    pub fn with_newer_kernel() -> Result<Self, KvmHostError> {
        Self::from_guest("kvm-host-backports")
    }

    fn from_guest(guest: &str) -> Result<Self, KvmHostError> {
        let image = GuestImage::find_guest(guest)?;
        let disk = image.kernel.with_file_name("disk.img");
        if disk.exists() {
            Ok(Self { image, disk, cpus: 1 })
        } else {
            Err(KvmHostError::NoDisk(disk))
        }
    }

    /// The same with this number of processors.
    #[must_use]
    pub fn with_cpus(self, cpus: u32) -> Self {
        Self { cpus, ..self }
    }

    /// Runs the payload's command in a fresh first-level guest; returns its exit code.
    ///
    /// The command's output is passed on as it arrives.
    ///
    /// # Errors
    /// If the guest could not be started, or the command had not ended after `limit`. A command
    /// that fails is no error.
    pub fn run_payload(
        &self,
        payload: &GuestPayload,
        limit: Duration,
        stdout: &mut (dyn Write + Send),
        stderr: &mut (dyn Write + Send),
    ) -> Result<i32, KvmHostError> {
        let boot = FirstLevelLauncher::new(self)?;
        let tar = payload.write_tar(&boot.file_path("payload.tar"))?;
        let state = boot.ensure_saved_state()?;
        let mut task = boot.restore_guest(&tar.file, &state)?;
        task.run_command(tar.bytes, limit, stdout, stderr)
    }
}
