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

pub use command::Command;
pub use error::KvmHostError;
pub use payload::Payload;

use crate::guest::GuestImage;
use boot::Boot;

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
        Self::named("kvm-host")
    }

    /// Like [`Self::new`], with a kernel that can track the pages that a process writes (Linux
    /// 6.7).
    pub fn with_newer_kernel() -> Result<Self, KvmHostError> {
        Self::named("kvm-host-backports")
    }

    fn named(guest: &str) -> Result<Self, KvmHostError> {
        let image = GuestImage::named(guest)?;
        let disk = image.kernel.with_file_name("disk.img");
        if disk.exists() {
            Ok(Self { image, disk, cpus: 1 })
        } else {
            Err(KvmHostError::NoDisk(disk))
        }
    }

    /// The same with this number of processors.
    #[must_use]
    pub fn cpus(self, cpus: u32) -> Self {
        Self { cpus, ..self }
    }

    /// Runs the payload's command in a fresh first-level guest; returns its exit code.
    ///
    /// The command's output is passed on as it arrives.
    ///
    /// # Errors
    /// If the guest could not be started, or the command had not ended after `limit`. A command
    /// that fails is no error.
    pub fn run(
        &self,
        payload: &Payload,
        limit: Duration,
        stdout: &mut (dyn Write + Send),
        stderr: &mut (dyn Write + Send),
    ) -> Result<i32, KvmHostError> {
        let boot = Boot::new(self)?;
        let tar = payload.pack(&boot.place("payload.tar"))?;
        let state = boot.saved_state()?;
        let mut task = boot.restore(&tar.file, &state)?;
        task.run(tar.bytes, limit, stdout, stderr)
    }
}
