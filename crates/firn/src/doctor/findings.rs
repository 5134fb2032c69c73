//! The consequences for Firn of a host's facts. Pure.

use firn_memory::UserfaultfdAccess;
use serde::Serialize;

use super::facts::{Facts, Userfaultfd};
use super::kernel_boot::KernelBoot;
use super::kvm::Kvm;

/// The grade of a finding.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Grade {
    /// As Firn needs it.
    Good,
    /// Firn is slower, or does not work in some cases.
    Lesser,
    /// Firn does not work without it.
    Missing,
}

/// The result of one check.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Finding {
    /// The subject of the check.
    pub what: &'static str,
    /// Its grade.
    pub grade: Grade,
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
pub fn judge(facts: &Facts) -> Vec<Finding> {
    vec![
        kernel(facts),
        userfaultfd(facts),
        pagemap_scan(facts),
        ptrace(facts),
        kernel_faults(facts),
        shared_memory(facts),
        qemu(facts),
        kvm(facts),
        setsid(facts),
        runtime_dir(facts),
    ]
}

fn finding(
    what: &'static str,
    grade: Grade,
    found: impl Into<String>,
    consequence: &str,
) -> Finding {
    Finding { what, grade, found: found.into(), consequence: consequence.to_owned() }
}

/// The first two numbers in a text, such as those of `6.1.0-28-amd64` or `QEMU emulator version
/// 7.2.22`.
fn version(text: &str) -> Option<(u32, u32)> {
    let start = text.find(|c: char| c.is_ascii_digit())?;
    let mut numbers = text[start..].split(|c: char| !c.is_ascii_digit());
    Some((numbers.next()?.parse().ok()?, numbers.next()?.parse().ok()?))
}

fn kernel(facts: &Facts) -> Finding {
    let found = format!("Linux {}", facts.kernel);
    let (grade, consequence) = match version(&facts.kernel) {
        Some(version) if version >= KERNEL_BEST => (Grade::Good, ""),
        Some(version) if version >= KERNEL_MIN => (
            Grade::Lesser,
            "before 6.7 write protection costs a fault per page: saves slow the guest more",
        ),
        _ => (Grade::Missing, "Linux 6.1 or newer is needed"),
    };
    finding("kernel", grade, found, consequence)
}

fn userfaultfd(facts: &Facts) -> Finding {
    match &facts.userfaultfd {
        Ok(Userfaultfd { resume_protected: true, .. }) => {
            finding("userfaultfd", Grade::Good, "missing, minor and write-protect faults", "")
        }
        Ok(_) => {
            let less =
                "a page can't be mapped write-protected: some pages fault twice during a save";
            finding("userfaultfd", Grade::Lesser, "missing, minor and write-protect faults", less)
        }
        Err(why) => {
            let none = "running VMs cannot be saved, and VMs cannot be restored lazily";
            finding("userfaultfd", Grade::Missing, why.clone(), none)
        }
    }
}

fn pagemap_scan(facts: &Facts) -> Finding {
    match matches!(facts.userfaultfd, Ok(Userfaultfd { write_protect_async: true, .. })) {
        true => finding("PAGEMAP_SCAN", Grade::Good, "available", ""),
        false => {
            let slower = "written pages are found by their faults: the beginning of a save slows the guest more";
            finding("PAGEMAP_SCAN", Grade::Lesser, "not in this kernel", slower)
        }
    }
}

fn ptrace(facts: &Facts) -> Finding {
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
            finding("ptrace", Grade::Missing, found, none)
        }
        (true, _) | (false, None | Some(0)) => finding("ptrace", Grade::Good, found, ""),
        (false, Some(_)) => {
            let less = "only VMs that `firn run` started can be saved, and only until their supervisor dies; set \
                        kernel.yama.ptrace_scope to 0, or run Firn as root";
            finding("ptrace", Grade::Lesser, found, less)
        }
    }
}

/// Faults that happen inside the kernel, such as by `read(2)` into guest memory, must reach Firn as
/// well.
fn kernel_faults(facts: &Facts) -> Finding {
    const WHAT: &str = "faults in the kernel";
    match &facts.kernel_faults {
        Ok(UserfaultfdAccess::SystemCall) => finding(WHAT, Grade::Good, "userfaultfd(2)", ""),
        Ok(UserfaultfdAccess::Device) => finding(WHAT, Grade::Good, "/dev/userfaultfd", ""),
        Err(why) => {
            let found =
                format!("this user may use neither userfaultfd(2) nor /dev/userfaultfd ({why})");
            let none = "VMs can be saved by --strategy stop and restored by --mode eager only; install \
                        packaging/udev/70-firn-userfaultfd.rules and join the group kvm, or set sysctl \
                        vm.unprivileged_userfaultfd=1";
            finding(WHAT, Grade::Missing, found, none)
        }
    }
}

fn shared_memory(facts: &Facts) -> Finding {
    match facts.shm {
        true => finding("/dev/shm", Grade::Good, "writable", ""),
        false => {
            let less = "VMs that `firn run` starts do not need it; a VM to attach to may";
            finding("/dev/shm", Grade::Lesser, "missing, or not writable", less)
        }
    }
}

fn qemu(facts: &Facts) -> Finding {
    match &facts.qemu {
        Err(why) => {
            finding("QEMU", Grade::Missing, why.clone(), "there is no program to run VMs")
        }
        Ok(line) if version(line).is_some_and(|version| version >= QEMU_MIN) => {
            finding("QEMU", Grade::Good, line.clone(), "")
        }
        Ok(line) => {
            finding("QEMU", Grade::Lesser, line.clone(), "Firn is made for QEMU 7.2 and newer")
        }
    }
}

fn kvm(facts: &Facts) -> Finding {
    match &facts.kvm {
        Kvm::RunsFirmware(boot) => kernel_boot(boot),
        Kvm::NoDevice => {
            finding("KVM", Grade::Lesser, "no /dev/kvm", "guests run under TCG, much slower")
        }
        Kvm::Fails(why) => {
            let found = format!("/dev/kvm exists but runs no guest ({why})");
            finding("KVM", Grade::Lesser, found, "use -accel tcg; guests run much slower")
        }
        Kvm::Unknown(why) => finding("KVM", Grade::Lesser, format!("not tried: {why}"), ""),
    }
}

fn kernel_boot(boot: &KernelBoot) -> Finding {
    match boot {
        KernelBoot::Boots(kernel) => {
            finding("KVM", Grade::Good, format!("boots {}", kernel.display()), "")
        }
        KernelBoot::Fails(kernel) => {
            let found =
                format!("runs firmware, but does not boot {}, which TCG does", kernel.display());
            let less = "use -accel tcg; a VM with KVM would be shown as running, its console dead";
            finding("KVM", Grade::Lesser, found, less)
        }
        KernelBoot::NotChecked(why) => {
            let found = format!("runs firmware; a kernel was not checked: {why}");
            finding(
                "KVM",
                Grade::Lesser,
                found,
                "name one that can be read: firn doctor --kernel FILE",
            )
        }
    }
}

fn setsid(facts: &Facts) -> Finding {
    match facts.setsid {
        true => finding("setsid", Grade::Good, "installed", ""),
        false => {
            finding("setsid", Grade::Missing, "not installed", "VMs can't be started (util-linux)")
        }
    }
}

fn runtime_dir(facts: &Facts) -> Finding {
    match &facts.runtime_dir {
        Ok(path) => finding("runtime directory", Grade::Good, path.clone(), ""),
        Err(why) => {
            let none = "set FIRN_RUNTIME_DIR to a directory of your own";
            finding("runtime directory", Grade::Missing, why.clone(), none)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn good() -> Facts {
        Facts {
            kernel: "6.12.9-amd64".into(),
            userfaultfd: Ok(Userfaultfd { resume_protected: true, write_protect_async: true }),
            cap_sys_ptrace: true,
            ptrace_scope: Some(1),
            kernel_faults: Ok(UserfaultfdAccess::SystemCall),
            shm: true,
            setsid: true,
            qemu: Ok("QEMU emulator version 10.0.2 (Debian 1:10.0.2)".into()),
            kvm: Kvm::RunsFirmware(KernelBoot::Boots("/boot/vmlinuz".into())),
            runtime_dir: Ok("/run/firn".into()),
        }
    }

    fn grade(facts: &Facts, what: &str) -> Grade {
        judge(facts).into_iter().find(|finding| finding.what == what).unwrap().grade
    }

    #[test]
    fn a_good_host_lacks_nothing() {
        assert!(judge(&good()).iter().all(|finding| finding.grade == Grade::Good));
    }

    #[test]
    fn kernels_are_told_apart() {
        let kernel = |release: &str| grade(&Facts { kernel: release.into(), ..good() }, "kernel");
        assert_eq!(kernel("6.1.0-28-amd64"), Grade::Lesser);
        assert_eq!(kernel("6.7.0"), Grade::Good);
        assert_eq!(kernel("5.10.0"), Grade::Missing);
        assert_eq!(kernel(""), Grade::Missing);
    }

    #[test]
    fn an_ordinary_user_depends_on_settings() {
        let user = |scope, kernel_faults| Facts {
            cap_sys_ptrace: false,
            ptrace_scope: scope,
            kernel_faults,
            ..good()
        };
        let device = || Ok(UserfaultfdAccess::Device);
        assert_eq!(grade(&user(Some(0), device()), "ptrace"), Grade::Good);
        assert_eq!(grade(&user(Some(1), device()), "ptrace"), Grade::Lesser);
        assert_eq!(grade(&user(Some(2), device()), "ptrace"), Grade::Missing);
        assert_eq!(grade(&user(None, device()), "faults in the kernel"), Grade::Good);
        let none = Err("Permission denied".to_owned());
        assert_eq!(grade(&user(None, none), "faults in the kernel"), Grade::Missing);
    }

    #[test]
    fn firmware_alone_is_not_enough_of_kvm() {
        for boot in
            [KernelBoot::Fails("/boot/vmlinuz".into()), KernelBoot::NotChecked("none".into())]
        {
            let facts = Facts { kvm: Kvm::RunsFirmware(boot), ..good() };
            assert_eq!(grade(&facts, "KVM"), Grade::Lesser);
        }
    }

    #[test]
    fn what_is_not_good_says_what_follows() {
        let bad = Facts {
            kernel: "4.19".into(),
            userfaultfd: Err("no".into()),
            kernel_faults: Err("no".into()),
            cap_sys_ptrace: false,
            ptrace_scope: Some(3),
            shm: false,
            setsid: false,
            qemu: Err("none".into()),
            kvm: Kvm::NoDevice,
            runtime_dir: Err("none".into()),
        };
        for finding in judge(&bad) {
            assert_ne!(finding.grade, Grade::Good, "{finding:?}");
            assert!(!finding.consequence.is_empty(), "{finding:?}");
        }
    }
}
