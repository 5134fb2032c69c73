//! `firn doctor`

use std::path::PathBuf;

use clap::Args as ClapArgs;
use firn_supervisor::{Failure, FailureKind, OperationCheck, VmName, absolute_path, check_process};

use crate::libvirt::LibvirtArgs;
use crate::output::{FactPrinter, check_input, format_table};
use crate::units;

mod facts;
mod findings;
mod kernel_boot;
mod kvm;
mod vm;

use findings::{FindingGrade, HostFinding, judge_host};

/// Show what this host lacks for Firn, and what does not work or is slower because of that. For a
/// VM or a QEMU process, show which operations work on it.
///
/// To check KVM, the command boots this host's kernel in a VM until the kernel writes its first
/// line. To check whether this user may trace page faults, the command makes a userfaultfd. An
/// ordinary user must be in the group of /dev/userfaultfd for that. The udev rule that is installed
/// with Firn gives the device to the group kvm.
///
/// For a VM, the command checks each operation as the verb of that operation does, and changes
/// nothing. It prints which operations work, which work with a limit, and which are refused, with
/// the reason and its remedy.
///
/// Exits with code 7 if something is missing that Firn needs, and with code 5 if the VM can't be
/// saved while it runs.
#[derive(Debug, ClapArgs)]
#[command(after_long_help = "Examples:
  firn doctor
  firn doctor --kernel /srv/guest/vmlinuz
  firn doctor web
  firn doctor --pid 4711 --qmp /run/web.qmp
  firn doctor --libvirt web")]
pub struct DoctorArgs {
    /// A VM of this host, to check instead of the host.
    #[arg(conflicts_with = "libvirt")]
    name: Option<VmName>,
    /// The process of a QEMU that Firn does not manage, to check instead of the host.
    #[arg(long, requires = "qmp", conflicts_with = "name", value_parser = units::parse_number::<i32>(1..=i32::MAX as u64))]
    pid: Option<i32>,
    /// That QEMU's monitor socket.
    #[arg(long, requires = "pid", value_name = "SOCKET")]
    qmp: Option<PathBuf>,
    #[command(flatten)]
    domain: LibvirtArgs,
    /// The QEMU to check.
    #[arg(long, default_value = "qemu-system-x86_64", value_name = "PROGRAM")]
    qemu: String,
    /// The kernel to try KVM with; by default one in /boot.
    #[arg(long, value_name = "FILE")]
    kernel: Option<PathBuf>,
}

impl DoctorArgs {
    /// Runs the verb.
    pub fn run(&self, out: FactPrinter) -> Result<(), Failure> {
        if let Some(checks) = self.check_vm()? {
            return vm::report_checks(&checks, out);
        }
        self.kernel.as_deref().map_or(Ok(()), check_input)?;
        let findings = judge_host(&facts::collect_facts(&self.qemu, self.kernel.as_deref()));
        out.print_facts(&findings, || describe_findings(&findings))?;
        match findings.iter().filter(|finding| finding.grade == FindingGrade::Missing).count() {
            0 => Ok(()),
            count => {
                let what = if count == 1 { "thing is" } else { "things are" };
                let text = format!("{count} {what} missing that Firn needs");
                Err(Failure::new(FailureKind::Host, text))
            }
        }
    }
}

impl DoctorArgs {
    /// The checks of the VM that the user names; `None` if the host is to be checked.
    fn check_vm(&self) -> Result<Option<Vec<OperationCheck>>, Failure> {
        if let Some((_, pid, monitor)) = self.domain.find_vm()? {
            return check_process(pid, &monitor).map(Some);
        }
        match (&self.name, self.pid, &self.qmp) {
            (Some(name), ..) => vm::check_managed(name).map(Some),
            (_, Some(pid), Some(qmp)) => check_process(pid, &absolute_path(qmp)?.into()).map(Some),
            _ => Ok(None),
        }
    }
}

fn describe_findings(findings: &[HostFinding]) -> String {
    let row = |finding: &HostFinding| {
        let grade = match finding.grade {
            FindingGrade::Good => "ok",
            FindingGrade::Lesser => "LESS",
            FindingGrade::Missing => "MISSING",
        };
        let text = match finding.consequence.is_empty() {
            true => finding.found.clone(),
            false => format!("{}: {}", finding.found, finding.consequence),
        };
        vec![grade.to_owned(), finding.what.to_owned(), text]
    };
    format_table(&findings.iter().map(row).collect::<Vec<_>>())
}
