//! Health check: checks before each cut that a VM has the devices that the standby has, and whether
//! it runs.
//!
//! An epoch is committed when the next one is complete, and that one is cut after another check. So
//! no committed epoch contains the state of a device that was added in between.

use std::collections::BTreeSet;

use firn_vmm::{DevicePath, QemuVm, RunState};
use serde::{Deserialize, Serialize};

use super::GuestError;

/// Why a VM does not run, as its hypervisor reports it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum GuestRunTrouble {
    /// The guest's kernel reported a panic.
    GuestPanicked,
    /// The hypervisor met an error of its own or of KVM's.
    InternalError,
    /// A disk failed, and the VM is paused.
    IoError,
    /// The guest shut down, and its command line makes the hypervisor stay.
    Shutdown,
    /// The guest's watchdog expired.
    Watchdog,
}

impl GuestRunTrouble {
    /// From QEMU's `RunState`. A VM that its user paused is in no trouble.
    pub fn from_state(state: &RunState) -> Option<Self> {
        match state.status.as_str() {
            "guest-panicked" => Some(Self::GuestPanicked),
            "internal-error" => Some(Self::InternalError),
            "io-error" => Some(Self::IoError),
            "shutdown" => Some(Self::Shutdown),
            "watchdog" => Some(Self::Watchdog),
            _ => None,
        }
    }

    /// A description for the user.
    pub fn description(self) -> &'static str {
        match self {
            Self::GuestPanicked => "guest panicked",
            Self::InternalError => "internal error of QEMU",
            Self::IoError => "waits: a disk failed",
            Self::Shutdown => "guest shut down",
            Self::Watchdog => "watchdog expired",
        }
    }
}

/// The last reports of a hypervisor, if there were any.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ExitReport {
    /// Why it shuts down, as QEMU names it (`ShutdownCause`).
    pub shutdown: Option<String>,
    /// Whether the guest panicked.
    pub has_panicked: bool,
}

impl ExitReport {
    /// Reads the remaining events of a connection that may be closed.
    pub(super) fn read_events(vm: &mut QemuVm) -> Self {
        let qmp = vm.qmp();
        qmp.drain_events();
        let shutdown = qmp.shutdown_cause().map(str::to_owned);
        let has_panicked = qmp.has_panicked() || shutdown.as_deref() == Some("guest-panic");
        Self { shutdown, has_panicked }
    }
}

/// The devices of a VM when its protection began.
#[derive(Debug)]
pub(super) struct DeviceSet(BTreeSet<DevicePath>);

impl DeviceSet {
    /// Lists the devices that the VM has now.
    pub(super) fn list_devices(vm: &mut QemuVm) -> Result<Self, GuestError> {
        Ok(Self(vm.device_paths()?))
    }

    /// Checks that the devices are the same.
    ///
    /// # Errors
    /// If a device was added or removed since.
    pub(super) fn check_unchanged(&self, vm: &mut QemuVm) -> Result<(), GuestError> {
        match describe_change(&self.0, &vm.device_paths()?) {
            None => Ok(()),
            Some(change) => Err(GuestError::Devices(change)),
        }
    }
}

/// Describes the difference.
fn describe_change(before: &BTreeSet<DevicePath>, now: &BTreeSet<DevicePath>) -> Option<String> {
    let list = |devices: Vec<&DevicePath>, verb: &str| {
        let names: Vec<String> = devices.iter().map(ToString::to_string).collect();
        (!names.is_empty()).then(|| format!("{} {verb}", names.join(", ")))
    };
    let added = list(now.difference(before).collect(), "was added");
    let removed = list(before.difference(now).collect(), "was removed");
    let changes: Vec<String> = added.into_iter().chain(removed).collect();
    (!changes.is_empty()).then(|| changes.join("; "))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn device(name: &str) -> DevicePath {
        DevicePath { path: format!("/machine/peripheral/{name}"), class: "edu".to_owned() }
    }

    #[test]
    fn a_device_that_comes_or_goes_is_named() {
        let before = BTreeSet::from([device("a"), device("b")]);
        assert_eq!(describe_change(&before, &before), None);
        let now = BTreeSet::from([device("b"), device("c")]);
        assert_eq!(
            describe_change(&before, &now).unwrap(),
            "c (edu) was added; a (edu) was removed"
        );
    }

    #[test]
    fn a_paused_vm_is_in_no_trouble() {
        let state = |status: &str| RunState { running: false, status: status.to_owned() };
        assert_eq!(GuestRunTrouble::from_state(&state("paused")), None);
        assert_eq!(
            GuestRunTrouble::from_state(&state("guest-panicked")),
            Some(GuestRunTrouble::GuestPanicked)
        );
    }
}
