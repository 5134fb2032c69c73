//! Collection of facts about a host. [`super::findings`] judges them.

use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};

use firn_memory::{KernelFeatures, UserfaultfdAccess};
use firn_supervisor::RuntimeDir;

use super::kvm::{self, KvmState};

/// Facts about a host.
#[derive(Clone, Debug)]
pub struct HostFacts {
    /// `uname -r`.
    pub kernel: String,
    /// The features of userfaultfd, or why it cannot be used.
    pub userfaultfd: Result<UserfaultfdFacts, String>,
    /// Whether this user may trace any process (`CAP_SYS_PTRACE`).
    pub cap_sys_ptrace: bool,
    /// `kernel.yama.ptrace_scope`; `None` without yama.
    pub ptrace_scope: Option<u8>,
    /// The method by which this user gets a userfaultfd that reports faults inside the kernel, or
    /// why there is none.
    pub kernel_faults: Result<UserfaultfdAccess, String>,
    /// Whether this user may change another process's priorities and memory layout
    /// (`CAP_SYS_NICE`).
    pub cap_sys_nice: bool,
    /// The host's setting of transparent huge pages; `None` if its kernel has none.
    pub huge_pages: Option<String>,
    /// Whether `/dev/shm` is a directory that this user can write to.
    pub shm: bool,
    /// Whether the program `setsid` is installed.
    pub setsid: bool,
    /// The first line of `qemu --version`, or why there is none.
    pub qemu: Result<String, String>,
    /// Whether KVM runs a guest.
    pub kvm: KvmState,
    /// The runtime directory, or why there is none.
    pub runtime_dir: Result<String, String>,
}

/// The features of userfaultfd beyond those that Firn needs everywhere.
#[derive(Clone, Copy, Debug)]
pub struct UserfaultfdFacts {
    /// A minor fault can be answered with a page that stays write-protected.
    pub resume_protected: bool,
    /// The kernel can remember writes, and `PAGEMAP_SCAN` finds them.
    pub write_protect_async: bool,
}

/// Collects the facts about this host. KVM is tried with `kernel`, or the host's own.
pub fn collect_facts(qemu: &str, kernel: Option<&Path>) -> HostFacts {
    HostFacts {
        kernel: read_trimmed("/proc/sys/kernel/osrelease").unwrap_or_default(),
        userfaultfd: query_userfaultfd(),
        cap_sys_ptrace: has_capability(CAP_SYS_PTRACE),
        ptrace_scope: read_number("/proc/sys/kernel/yama/ptrace_scope"),
        kernel_faults: UserfaultfdAccess::of_this_user().map_err(|error| error_chain(&error)),
        cap_sys_nice: has_capability(CAP_SYS_NICE),
        huge_pages: read_trimmed("/sys/kernel/mm/transparent_hugepage/enabled"),
        shm: is_writable(Path::new("/dev/shm")),
        setsid: version_line("setsid").is_ok(),
        qemu: version_line(qemu),
        kvm: kvm::probe_kvm(qemu, kernel),
        runtime_dir: runtime_dir(),
    }
}

fn query_userfaultfd() -> Result<UserfaultfdFacts, String> {
    let features = KernelFeatures::of_kernel().map_err(|error| error_chain(&error))?;
    let KernelFeatures { resume_protected, write_protect_async, .. } = features;
    Ok(UserfaultfdFacts { resume_protected, write_protect_async })
}

/// The bits of capabilities: `linux/capability.h`.
const CAP_SYS_PTRACE: u32 = 19;
const CAP_SYS_NICE: u32 = 23;

fn has_capability(bit: u32) -> bool {
    effective_capabilities().is_some_and(|set| set >> bit & 1 == 1)
}

fn effective_capabilities() -> Option<u64> {
    let status = read_trimmed("/proc/self/status")?;
    let line = status.lines().find_map(|line| line.strip_prefix("CapEff:"))?;
    u64::from_str_radix(line.trim(), 16).ok()
}

fn read_trimmed(path: &str) -> Option<String> {
    Some(fs::read_to_string(path).ok()?.trim().to_owned())
}

fn read_number(path: &str) -> Option<u8> {
    read_trimmed(path)?.parse().ok()
}

fn is_writable(directory: &Path) -> bool {
    rustix::fs::access(directory, rustix::fs::Access::WRITE_OK).is_ok()
}

/// The first line of a program's version output.
fn version_line(program: &str) -> Result<String, String> {
    let result = Command::new(program)
        .arg("--version")
        .stdin(Stdio::null())
        .output()
        .map_err(|error| format!("{program}: {error}"))?;
    let text = String::from_utf8_lossy(&result.stdout);
    match text.lines().next() {
        Some(line) if result.status.success() => Ok(line.to_owned()),
        _ => Err(format!("{program} --version prints nothing ({})", result.status)),
    }
}

fn runtime_dir() -> Result<String, String> {
    let base = RuntimeDir::from_env().map_err(|error| error_chain(&error))?;
    base.list_vms().map_err(|error| error_chain(&error))?;
    Ok(base.path().display().to_string())
}

fn error_chain(error: &dyn std::error::Error) -> String {
    let errors = std::iter::successors(Some(error), |error| (*error).source());
    errors.map(ToString::to_string).collect::<Vec<_>>().join(": ")
}
