//! The consequences for Firn of a host's facts. Pure.

use firn_memory::UserfaultfdAccess;
use serde::Serialize;

use super::facts::{HostFacts, UserfaultfdFacts};
use super::kernel_boot::KernelBoot;
use super::kvm::KvmState;

/// The grade of a finding.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum FindingGrade {
    /// As Firn needs it.
    Good,
    /// Firn is slower, or does not work in some cases.
    Lesser,
    /// Firn does not work without it.
    Missing,
}

/// The result of one check.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct HostFinding {
    /// The subject of the check.
    pub what: &'static str,
    /// Its grade.
    pub grade: FindingGrade,
    /// The state that was found.
    pub found: String,
    /// The consequence; empty if there is none.
    pub consequence: String,
}

/// The first Linux with everything that Firn needs.
const KERNEL_MIN: (u32, u32) = (6, 1);

/// The first Linux with everything that makes Firn faster.
const KERNEL_BEST: (u32, u32) = (6, 7);

/// The first QEMU that Firn is tested with; older ones may work.
const QEMU_MIN: (u32, u32) = (7, 2);

/// Judges a host.
pub fn judge_host(facts: &HostFacts) -> Vec<HostFinding> {
    vec![
        judge_kernel(facts),
        judge_userfaultfd(facts),
        judge_pagemap_scan(facts),
        judge_ptrace(facts),
        judge_kernel_faults(facts),
        judge_shared_memory(facts),
        judge_huge_pages(facts),
        judge_qemu(facts),
        judge_kvm(facts),
        judge_setsid(facts),
        judge_runtime_dir(facts),
    ]
}

fn new_finding(
    what: &'static str,
    grade: FindingGrade,
    found: impl Into<String>,
    consequence: &str,
) -> HostFinding {
    HostFinding { what, grade, found: found.into(), consequence: consequence.to_owned() }
}

/// The first two numbers in a text, such as those of `6.1.0-28-amd64` or `QEMU emulator version
/// 7.2.22`.
fn parse_version(text: &str) -> Option<(u32, u32)> {
    let start = text.find(|c: char| c.is_ascii_digit())?;
    let mut numbers = text[start..].split(|c: char| !c.is_ascii_digit());
    Some((numbers.next()?.parse().ok()?, numbers.next()?.parse().ok()?))
}

fn judge_kernel(facts: &HostFacts) -> HostFinding {
    let found = format!("Linux {}", facts.kernel);
    let (grade, consequence) = match parse_version(&facts.kernel) {
        Some(version) if version >= KERNEL_BEST => (FindingGrade::Good, ""),
        Some(version) if version >= KERNEL_MIN => (
            FindingGrade::Lesser,
            "before 6.7 write protection costs a fault per page: saves slow the guest more",
        ),
        _ => (FindingGrade::Missing, "Linux 6.1 or newer is needed"),
    };
    new_finding("kernel", grade, found, consequence)
}

fn judge_userfaultfd(facts: &HostFacts) -> HostFinding {
    match &facts.userfaultfd {
        Ok(UserfaultfdFacts { resume_protected: true, .. }) => new_finding(
            "userfaultfd",
            FindingGrade::Good,
            "missing, minor and write-protect faults",
            "",
        ),
        Ok(_) => {
            let less =
                "a page can't be mapped write-protected: some pages fault twice during a save";
            new_finding(
                "userfaultfd",
                FindingGrade::Lesser,
                "missing, minor and write-protect faults",
                less,
            )
        }
        Err(why) => {
            let none = "running VMs cannot be saved, and VMs cannot be restored lazily";
            new_finding("userfaultfd", FindingGrade::Missing, why.clone(), none)
        }
    }
}

fn judge_pagemap_scan(facts: &HostFacts) -> HostFinding {
    match matches!(facts.userfaultfd, Ok(UserfaultfdFacts { write_protect_async: true, .. })) {
        true => new_finding("PAGEMAP_SCAN", FindingGrade::Good, "available", ""),
        false => {
            let slower = "written pages are found by their faults: the beginning of a save slows the guest more";
            new_finding("PAGEMAP_SCAN", FindingGrade::Lesser, "not in this kernel", slower)
        }
    }
}

fn judge_ptrace(facts: &HostFacts) -> HostFinding {
    let scope = facts.ptrace_scope;
    let found = match (facts.cap_sys_ptrace, scope) {
        (true, _) => "CAP_SYS_PTRACE".to_owned(),
        (false, None) => "no CAP_SYS_PTRACE, no yama".to_owned(),
        (false, Some(scope)) => format!("no CAP_SYS_PTRACE, kernel.yama.ptrace_scope={scope}"),
    };
    match (facts.cap_sys_ptrace, scope) {
        (true, Some(3)) | (false, Some(2 | 3)) => {
            let none =
                "Firn can attach to no VM; set kernel.yama.ptrace_scope to 0, or run it as root";
            new_finding("ptrace", FindingGrade::Missing, found, none)
        }
        (true, _) | (false, None | Some(0)) => new_finding("ptrace", FindingGrade::Good, found, ""),
        (false, Some(_)) => {
            let less = "only VMs that `firn run` started can be saved, and only until their supervisor dies; set \
                        kernel.yama.ptrace_scope to 0, or run Firn as root";
            new_finding("ptrace", FindingGrade::Lesser, found, less)
        }
    }
}

/// Faults that happen inside the kernel, such as by `read(2)` into guest memory, must reach Firn as
/// well.
fn judge_kernel_faults(facts: &HostFacts) -> HostFinding {
    const WHAT: &str = "faults in the kernel";
    match &facts.kernel_faults {
        Ok(UserfaultfdAccess::SystemCall) => {
            new_finding(WHAT, FindingGrade::Good, "userfaultfd(2)", "")
        }
        Ok(UserfaultfdAccess::Device) => {
            new_finding(WHAT, FindingGrade::Good, "/dev/userfaultfd", "")
        }
        Err(why) => {
            let found =
                format!("this user may use neither userfaultfd(2) nor /dev/userfaultfd ({why})");
            let none = "VMs can be saved by --strategy stop and restored by --mode eager only; install \
                        packaging/udev/70-firn-userfaultfd.rules and join the group kvm, or set sysctl \
                        vm.unprivileged_userfaultfd=1";
            new_finding(WHAT, FindingGrade::Missing, found, none)
        }
    }
}

fn judge_shared_memory(facts: &HostFacts) -> HostFinding {
    match facts.shm {
        true => new_finding("/dev/shm", FindingGrade::Good, "writable", ""),
        false => {
            let less = "VMs that `firn run` starts do not need it; a VM to attach to may";
            new_finding("/dev/shm", FindingGrade::Lesser, "missing, or not writable", less)
        }
    }
}

/// Of RAM that is private memory of the hypervisor: shared memory has none by default.
fn judge_huge_pages(facts: &HostFacts) -> HostFinding {
    const WHAT: &str = "transparent huge pages";
    let setting = facts.huge_pages.as_deref().unwrap_or("not in this kernel");
    let is_off = facts.huge_pages.is_none() || setting.contains("[never]");
    match is_off || facts.cap_sys_nice {
        true => new_finding(WHAT, FindingGrade::Good, setting, ""),
        false => {
            let found = format!("{setting}, no CAP_SYS_NICE");
            let slower =
                "those that a save splits stay split until the kernel's khugepaged finds them";
            new_finding(WHAT, FindingGrade::Lesser, found, slower)
        }
    }
}

fn judge_qemu(facts: &HostFacts) -> HostFinding {
    match &facts.qemu {
        Err(why) => new_finding(
            "QEMU",
            FindingGrade::Missing,
            why.clone(),
            "there is no program to run VMs",
        ),
        Ok(line) if parse_version(line).is_some_and(|version| version >= QEMU_MIN) => {
            new_finding("QEMU", FindingGrade::Good, line.clone(), "")
        }
        Ok(line) => new_finding(
            "QEMU",
            FindingGrade::Lesser,
            line.clone(),
            "Firn is made for QEMU 7.2 and newer",
        ),
    }
}

fn judge_kvm(facts: &HostFacts) -> HostFinding {
    match &facts.kvm {
        KvmState::RunsFirmware(boot) => judge_kernel_boot(boot),
        KvmState::NoDevice => new_finding(
            "KVM",
            FindingGrade::Lesser,
            "no /dev/kvm",
            "guests run under TCG, much slower",
        ),
        KvmState::Fails(why) => {
            let found = format!("/dev/kvm exists but runs no guest ({why})");
            new_finding(
                "KVM",
                FindingGrade::Lesser,
                found,
                "use -accel tcg; guests run much slower",
            )
        }
        KvmState::Unknown(why) => {
            new_finding("KVM", FindingGrade::Lesser, format!("not tried: {why}"), "")
        }
    }
}

fn judge_kernel_boot(boot: &KernelBoot) -> HostFinding {
    match boot {
        KernelBoot::Boots(kernel) => {
            new_finding("KVM", FindingGrade::Good, format!("boots {}", kernel.display()), "")
        }
        KernelBoot::Fails(kernel) => {
            let found =
                format!("runs firmware, but does not boot {}, which TCG does", kernel.display());
            let less = "use -accel tcg; a VM with KVM would be shown as running, its console dead";
            new_finding("KVM", FindingGrade::Lesser, found, less)
        }
        KernelBoot::NotChecked(why) => {
            let found = format!("runs firmware; a kernel was not checked: {why}");
            new_finding(
                "KVM",
                FindingGrade::Lesser,
                found,
                "name one that can be read: firn doctor --kernel FILE",
            )
        }
    }
}

fn judge_setsid(facts: &HostFacts) -> HostFinding {
    match facts.setsid {
        true => new_finding("setsid", FindingGrade::Good, "installed", ""),
        false => new_finding(
            "setsid",
            FindingGrade::Missing,
            "not installed",
            "VMs can't be started (util-linux)",
        ),
    }
}

fn judge_runtime_dir(facts: &HostFacts) -> HostFinding {
    match &facts.runtime_dir {
        Ok(path) => new_finding("runtime directory", FindingGrade::Good, path.clone(), ""),
        Err(why) => {
            let none = "set FIRN_RUNTIME_DIR to a directory of your own";
            new_finding("runtime directory", FindingGrade::Missing, why.clone(), none)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn good() -> HostFacts {
        HostFacts {
            kernel: "6.12.9-amd64".into(),
            userfaultfd: Ok(UserfaultfdFacts { resume_protected: true, write_protect_async: true }),
            cap_sys_ptrace: true,
            ptrace_scope: Some(1),
            kernel_faults: Ok(UserfaultfdAccess::SystemCall),
            cap_sys_nice: true,
            huge_pages: Some("always [madvise] never".into()),
            shm: true,
            setsid: true,
            qemu: Ok("QEMU emulator version 10.0.2 (Debian 1:10.0.2)".into()),
            kvm: KvmState::RunsFirmware(KernelBoot::Boots("/boot/vmlinuz".into())),
            runtime_dir: Ok("/run/firn".into()),
        }
    }

    fn grade(facts: &HostFacts, what: &str) -> FindingGrade {
        judge_host(facts).into_iter().find(|finding| finding.what == what).unwrap().grade
    }

    #[test]
    fn a_good_host_lacks_nothing() {
        assert!(judge_host(&good()).iter().all(|finding| finding.grade == FindingGrade::Good));
    }

    #[test]
    fn kernel_versions_are_compared() {
        let kernel =
            |release: &str| grade(&HostFacts { kernel: release.into(), ..good() }, "kernel");
        assert_eq!(kernel("6.1.0-28-amd64"), FindingGrade::Lesser);
        assert_eq!(kernel("6.7.0"), FindingGrade::Good);
        assert_eq!(kernel("5.10.0"), FindingGrade::Missing);
        assert_eq!(kernel(""), FindingGrade::Missing);
    }

    #[test]
    fn an_ordinary_user_depends_on_settings() {
        let user = |scope, kernel_faults| HostFacts {
            cap_sys_ptrace: false,
            ptrace_scope: scope,
            kernel_faults,
            ..good()
        };
        let device = || Ok(UserfaultfdAccess::Device);
        assert_eq!(grade(&user(Some(0), device()), "ptrace"), FindingGrade::Good);
        assert_eq!(grade(&user(Some(1), device()), "ptrace"), FindingGrade::Lesser);
        assert_eq!(grade(&user(Some(2), device()), "ptrace"), FindingGrade::Missing);
        assert_eq!(grade(&user(None, device()), "faults in the kernel"), FindingGrade::Good);
        let none = Err("Permission denied".to_owned());
        assert_eq!(grade(&user(None, none), "faults in the kernel"), FindingGrade::Missing);
    }

    #[test]
    fn huge_pages_that_are_off_are_not_lost() {
        let user = |setting: Option<&str>| HostFacts {
            cap_sys_nice: false,
            huge_pages: setting.map(str::to_owned),
            ..good()
        };
        let grade = |setting| grade(&user(setting), "transparent huge pages");
        assert_eq!(grade(Some("always [madvise] never")), FindingGrade::Lesser);
        assert_eq!(grade(Some("always madvise [never]")), FindingGrade::Good);
        assert_eq!(grade(None), FindingGrade::Good);
    }

    #[test]
    fn firmware_alone_is_not_enough_of_kvm() {
        for boot in
            [KernelBoot::Fails("/boot/vmlinuz".into()), KernelBoot::NotChecked("none".into())]
        {
            let facts = HostFacts { kvm: KvmState::RunsFirmware(boot), ..good() };
            assert_eq!(grade(&facts, "KVM"), FindingGrade::Lesser);
        }
    }

    #[test]
    fn a_finding_names_its_consequence() {
        let bad = HostFacts {
            kernel: "4.19".into(),
            userfaultfd: Err("no".into()),
            kernel_faults: Err("no".into()),
            cap_sys_ptrace: false,
            ptrace_scope: Some(3),
            cap_sys_nice: false,
            huge_pages: Some("[always] madvise never".into()),
            shm: false,
            setsid: false,
            qemu: Err("none".into()),
            kvm: KvmState::NoDevice,
            runtime_dir: Err("none".into()),
        };
        for finding in judge_host(&bad) {
            assert_ne!(finding.grade, FindingGrade::Good, "{finding:?}");
            assert!(!finding.consequence.is_empty(), "{finding:?}");
        }
    }
}
