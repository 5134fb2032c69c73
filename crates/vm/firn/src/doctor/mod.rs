//! `firn doctor`

use std::path::PathBuf;

use clap::Args as ClapArgs;
use firn_supervisor::{Failure, FailureKind};

use crate::output::{FactPrinter, check_input, format_table};

mod facts;
mod findings;
mod kernel_boot;
mod kvm;

use findings::{FindingGrade, HostFinding, judge_host};

/// Show what this host lacks, and what therefore does not work or is slower.
///
/// To check KVM, it boots this host's kernel until it writes its first line. To check whether this
/// user may trace page faults, it makes a userfaultfd. An ordinary user needs the group of
/// /dev/userfaultfd for that: packaging/udev has a rule.
///
/// Exits with code 7 if something is missing that Firn needs.
#[derive(Debug, ClapArgs)]
#[command(after_long_help = "Examples:
  firn doctor
  firn doctor --kernel /srv/guest/vmlinuz")]
pub struct DoctorArgs {
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
        self.kernel.as_deref().map_or(Ok(()), check_input)?;
        let findings = judge_host(&facts::collect_facts(&self.qemu, self.kernel.as_deref()));
        out.print_facts(&findings, || describe_findings(&findings))?;
        match findings.iter().filter(|finding| finding.grade == FindingGrade::Missing).count() {
            0 => Ok(()),
            count => {
                let text = format!("{count} things are missing that Firn needs");
                Err(Failure::new(FailureKind::Host, text))
            }
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
