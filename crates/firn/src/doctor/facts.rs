//! Collection of facts about a host. [`super::findings`] judges them.

use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};

use firn_memory::{Features, UserfaultfdAccess};
use firn_supervisor::RuntimeDir;

use super::kvm::{self, Kvm};

/// Facts about a host.
#[derive(Clone, Debug)]
pub struct Facts {
    /// `uname -r`.
    pub kernel: String,
    /// The features of userfaultfd, or why it cannot be used.
    pub userfaultfd: Result<Userfaultfd, String>,
    /// Whether this user may trace any process (`CAP_SYS_PTRACE`).
    pub cap_sys_ptrace: bool,
    /// `kernel.yama.ptrace_scope`; `None` without yama.
    pub ptrace_scope: Option<u8>,
    /// The method by which this user gets a userfaultfd that reports faults inside the kernel, or
    /// why there is none.
    pub kernel_faults: Result<UserfaultfdAccess, String>,
    /// Whether `/dev/shm` is a directory that this user can write to.
    pub shm: bool,
    /// Whether the program `setsid` is installed.
    pub setsid: bool,
    /// The first line of `qemu --version`, or why there is none.
    pub qemu: Result<String, String>,
    /// Whether KVM runs a guest.
    pub kvm: Kvm,
    /// The runtime directory, or why there is none.
    pub runtime_dir: Result<String, String>,
}

/// The features of userfaultfd beyond those that Firn needs everywhere.
#[derive(Clone, Copy, Debug)]
pub struct Userfaultfd {
    /// A minor fault can be answered with a page that stays write-protected.
    pub resume_protected: bool,
    /// The kernel can remember writes, and `PAGEMAP_SCAN` finds them.
    pub write_protect_async: bool,
}

/// Collects the facts about this host. KVM is tried with `kernel`, or the host's own.
pub fn collect(qemu: &str, kernel: Option<&Path>) -> Facts {
    Facts {
        kernel: read("/proc/sys/kernel/osrelease").unwrap_or_default(),
        userfaultfd: userfaultfd(),
        cap_sys_ptrace: capabilities().is_some_and(|set| set >> CAP_SYS_PTRACE & 1 == 1),
        ptrace_scope: number("/proc/sys/kernel/yama/ptrace_scope"),
        kernel_faults: UserfaultfdAccess::of_this_user().map_err(|error| chain(&error)),
        shm: is_writable(Path::new("/dev/shm")),
        setsid: version("setsid").is_ok(),
        qemu: version(qemu),
        kvm: kvm::probe(qemu, kernel),
        runtime_dir: runtime_dir(),
    }
}

fn userfaultfd() -> Result<Userfaultfd, String> {
    let features = Features::of_kernel().map_err(|error| chain(&error))?;
    let Features { resume_protected, write_protect_async, .. } = features;
    Ok(Userfaultfd { resume_protected, write_protect_async })
}

/// The bit of `CAP_SYS_PTRACE`: `linux/capability.h`.
const CAP_SYS_PTRACE: u32 = 19;

fn capabilities() -> Option<u64> {
    let status = read("/proc/self/status")?;
    let line = status.lines().find_map(|line| line.strip_prefix("CapEff:"))?;
    u64::from_str_radix(line.trim(), 16).ok()
}

fn read(path: &str) -> Option<String> {
    Some(fs::read_to_string(path).ok()?.trim().to_owned())
}

fn number(path: &str) -> Option<u8> {
    read(path)?.parse().ok()
}

fn is_writable(directory: &Path) -> bool {
    rustix::fs::access(directory, rustix::fs::Access::WRITE_OK).is_ok()
}

/// The first line of a program's version output.
fn version(program: &str) -> Result<String, String> {
    let said = Command::new(program)
        .arg("--version")
        .stdin(Stdio::null())
        .output()
        .map_err(|error| format!("{program}: {error}"))?;
    let text = String::from_utf8_lossy(&said.stdout);
    match text.lines().next() {
        Some(line) if said.status.success() => Ok(line.to_owned()),
        _ => Err(format!("{program} --version prints nothing ({})", said.status)),
    }
}

fn runtime_dir() -> Result<String, String> {
    let base = RuntimeDir::from_env().map_err(|error| chain(&error))?;
    base.vms().map_err(|error| chain(&error))?;
    Ok(base.path().display().to_string())
}

fn chain(error: &dyn std::error::Error) -> String {
    let errors = std::iter::successors(Some(error), |error| (*error).source());
    errors.map(ToString::to_string).collect::<Vec<_>>().join(": ")
}
