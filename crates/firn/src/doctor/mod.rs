//! `firn doctor`

use std::path::PathBuf;

use clap::Args as ClapArgs;
use firn_supervisor::{Failure, FailureKind};

use crate::output::{Output, check_input, table};

mod facts;
mod findings;
mod kernel_boot;
mod kvm;

use findings::{Finding, Grade, judge};

/// Show what this host lacks, and what therefore does not work or is slower.
///
/// To check KVM, it boots this host's kernel until it writes its first line. To check whether this
/// user may trace page faults, it makes a userfaultfd. An ordinary user needs the group of
/// /dev/userfaultfd for that: packaging/udev has a rule.
///
/// Exits with code 7 if something is missing that Firn needs.
///
/// Examples:
///   firn doctor
///   firn doctor --kernel /srv/guest/vmlinuz
#[derive(Debug, ClapArgs)]
#[command(verbatim_doc_comment)]
pub struct Args {
    /// The QEMU to check.
    #[arg(long, default_value = "qemu-system-x86_64", value_name = "PROGRAM")]
    qemu: String,
    /// The kernel to try KVM with; by default one in /boot.
    #[arg(long, value_name = "FILE")]
    kernel: Option<PathBuf>,
}

impl Args {
    /// Runs the verb.
    pub fn run(&self, out: Output) -> Result<(), Failure> {
        self.kernel.as_deref().map_or(Ok(()), check_input)?;
        let findings = judge(&facts::collect(&self.qemu, self.kernel.as_deref()));
        out.facts(&findings, || describe(&findings))?;
        match findings.iter().filter(|finding| finding.grade == Grade::Missing).count() {
            0 => Ok(()),
            count => {
                let text = format!("{count} things are missing that Firn needs");
                Err(Failure::new(FailureKind::Host, text))
            }
        }
    }
}

fn describe(findings: &[Finding]) -> String {
    let row = |finding: &Finding| {
        let grade = match finding.grade {
            Grade::Good => "ok",
            Grade::Lesser => "LESS",
            Grade::Missing => "MISSING",
        };
        let text = match finding.consequence.is_empty() {
            true => finding.found.clone(),
            false => format!("{}: {}", finding.found, finding.consequence),
        };
        vec![grade.to_owned(), finding.what.to_owned(), text]
    };
    table(&findings.iter().map(row).collect::<Vec<_>>())
}
