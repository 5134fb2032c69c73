//! The end of a VM's protection, determined from what is known of its hypervisor. A pure core.
//!
//! ```text
//!   `firn stop`                                         stopped
//!   hypervisor ended  the guest panicked                panicked
//!                     it reported why it shuts down     shut down; lost if a signal or an error of the host did it
//!                     exit code 0                       shut down
//!                     anything else                     lost
//!   hypervisor lives  it does not answer                lost
//!                     anything else                     unprotected: the VM continues to run here
//! ```
//!
//! A host that shuts down sends a signal to all its processes: the VM then continues at its backup.

use firn_epochs::guest::{ExitReport, GuestError};
use firn_epochs::protection_end::ProtectionEnd;

use crate::records::failure::{Failure, FailureKind};
use crate::records::process_exit::ProcessExit;

/// The evidence for how a protection ended.
pub(crate) struct EndEvidence<'a> {
    /// The user stops the VM.
    pub(crate) is_stop: bool,
    /// How the hypervisor ended, if it has.
    pub(crate) exit: Option<ProcessExit>,
    /// The last events that it reported.
    pub(crate) exit_report: &'a ExitReport,
    /// The error that ended the protection, if there was one.
    pub(crate) error: Option<&'a GuestError>,
}

/// Decides how the protection ended.
pub(crate) fn decide_end(known: &EndEvidence<'_>) -> ProtectionEnd {
    match (known.is_stop, known.exit) {
        (true, _) => ProtectionEnd::Stopped,
        (false, Some(exit)) => end_of_dead(exit, known.exit_report),
        (false, None) => end_of_live(known.error),
    }
}

fn end_of_dead(exit: ProcessExit, exit_report: &ExitReport) -> ProtectionEnd {
    if exit_report.has_panicked {
        return ProtectionEnd::Panicked;
    }
    match exit_report.shutdown.as_deref() {
        Some(cause @ ("host-error" | "host-signal")) => {
            ProtectionEnd::Lost(format!("QEMU ended ({exit}; it reported {cause})"))
        }
        Some(_) => ProtectionEnd::ShutDown,
        None if exit == ProcessExit::Code(0) => ProtectionEnd::ShutDown,
        None => ProtectionEnd::Lost(format!("QEMU ended ({exit})")),
    }
}

fn end_of_live(error: Option<&GuestError>) -> ProtectionEnd {
    match error {
        Some(error) if error.is_hang() => {
            ProtectionEnd::Lost(format!("QEMU does not answer ({})", error_text(error)))
        }
        Some(error) => ProtectionEnd::Unprotected(error_text(error)),
        None => ProtectionEnd::Unprotected("its supervisor was terminated".to_owned()),
    }
}

fn error_text(error: &GuestError) -> String {
    Failure::from_error(FailureKind::Other, error).to_string()
}

#[cfg(test)]
mod tests {
    use firn_vmm::QmpError;

    use super::*;

    fn end(
        exit: Option<ProcessExit>,
        cause: Option<&str>,
        error: Option<&GuestError>,
    ) -> ProtectionEnd {
        let exit_report = ExitReport { shutdown: cause.map(str::to_owned), has_panicked: false };
        decide_end(&EndEvidence { is_stop: false, exit, exit_report: &exit_report, error })
    }

    #[test]
    fn a_stop_by_the_user_has_priority_over_other_causes() {
        let exit_report = ExitReport::default();
        let known = EndEvidence {
            is_stop: true,
            exit: Some(ProcessExit::Signal(9)),
            exit_report: &exit_report,
            error: None,
        };
        assert_eq!(decide_end(&known), ProtectionEnd::Stopped);
    }

    #[test]
    fn a_hypervisor_that_is_gone_was_lost_unless_it_reported_a_shutdown() {
        for cause in ["guest-shutdown", "host-qmp-quit", "guest-reset"] {
            assert_eq!(end(Some(ProcessExit::Unknown), Some(cause), None), ProtectionEnd::ShutDown);
        }
        assert_eq!(end(Some(ProcessExit::Code(0)), None, None), ProtectionEnd::ShutDown);
        assert!(end(Some(ProcessExit::Signal(9)), None, None).is_loss());
        assert!(end(Some(ProcessExit::Code(0)), Some("host-signal"), None).is_loss());
        let exit_report = ExitReport { shutdown: Some("guest-panic".into()), has_panicked: true };
        let known = EndEvidence {
            is_stop: false,
            exit: Some(ProcessExit::Code(0)),
            exit_report: &exit_report,
            error: None,
        };
        assert_eq!(decide_end(&known), ProtectionEnd::Panicked);
    }

    #[test]
    fn a_hypervisor_that_does_not_answer_is_lost_and_another_error_leaves_the_vm_running() {
        let hang = QmpError::TimedOut { command: "query-status".into(), waited_ms: 10_000 };
        assert!(end(None, None, Some(&hang.into())).is_loss());
        let change = GuestError::Devices("a (edu) was added".into());
        let unprotected = end(None, None, Some(&change));
        assert!(matches!(&unprotected, ProtectionEnd::Unprotected(why) if why.contains("a (edu)")));
        assert!(!unprotected.is_loss() && !unprotected.is_intended());
    }
}
