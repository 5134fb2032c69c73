//! KVM host command: `firn-lab kvm-host`.

use std::io;
use std::path::PathBuf;
use std::time::Duration;

use super::{GuestPayload, KvmHost, KvmHostError};
use crate::guest::GuestImage;

/// Runs a command in a machine in which KVM works: Linux under QEMU, which emulates AMD's
/// virtualization.
///
/// The command finds the given programs in its directory, and the small guest where the lab expects
/// it.
///
/// Example: firn-lab kvm-host --program target/release/firn -- './firn doctor'
#[derive(clap::Args, Debug)]
#[command(verbatim_doc_comment)]
pub struct KvmHostArgs {
    /// A program of this host to copy into the guest, with the libraries it loads.
    #[arg(long = "program", value_name = "PATH")]
    programs: Vec<PathBuf>,
    /// A file to copy into the guest.
    #[arg(long = "file", value_name = "PATH")]
    files: Vec<PathBuf>,
    /// Time limit, in seconds.
    #[arg(long, default_value_t = 600)]
    limit_s: u64,
    /// Processors of the first-level guest. Several are faster, and not reliable: with them, the
    /// emulation is at fault when a busy second-level guest ends by itself.
    #[arg(long, default_value_t = 1)]
    cpus: u32,
    /// Use the kernel of Debian's backports, which can track the pages that a process writes.
    #[arg(long)]
    newer_kernel: bool,
    /// A shell command line.
    #[arg(last = true, required = true)]
    command: Vec<String>,
}

impl KvmHostArgs {
    /// Runs the command; returns its exit code.
    pub fn run(&self) -> Result<i32, KvmHostError> {
        let payload = self.build_payload(&GuestImage::small()?);
        let limit = Duration::from_secs(self.limit_s);
        let host = match self.newer_kernel {
            true => KvmHost::with_newer_kernel()?,
            false => KvmHost::new()?,
        };
        host.with_cpus(self.cpus).run_payload(&payload, limit, &mut io::stdout(), &mut io::stderr())
    }

    fn build_payload(&self, small: &GuestImage) -> GuestPayload {
        let mut payload = GuestPayload::new(&self.command.join(" ")).add_small_guest(small);
        for path in &self.programs {
            payload = payload.add_program(&file_name(path), path);
        }
        for path in &self.files {
            payload = payload.add_file(&file_name(path), path);
        }
        payload
    }
}

fn file_name(path: &std::path::Path) -> String {
    path.file_name().unwrap_or_default().to_string_lossy().into_owned()
}
