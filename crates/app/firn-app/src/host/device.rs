//! The device whose memory the host shares: `ivshmem-plain` (QEMU, docs/specs/ivshmem-spec.rst).
//! Its memory is BAR 2.

use std::fs::{self, File};
use std::os::fd::AsFd as _;
use std::path::Path;

use firn_calls::{CallWindow, WindowError};

use super::HostError;
use crate::sys::mapping::OwnedMapping;

const DEVICES: &str = "/sys/bus/pci/devices";
/// Red Hat's vendor number, and the number of the device.
const IVSHMEM: [&str; 2] = ["0x1af4", "0x1110"];

/// An ivshmem device, whose memory is mapped.
pub(super) struct IvshmemDevice {
    memory: OwnedMapping,
}

impl IvshmemDevice {
    /// Opens the first device that the host serves.
    pub(super) fn find_served() -> Result<Self, HostError> {
        let none = |why: String| HostError::NoDevice(why);
        let entries = fs::read_dir(DEVICES).map_err(|error| none(format!("{DEVICES}: {error}")))?;
        let mut last = none(format!("{DEVICES} has no ivshmem device"));
        for entry in entries.flatten().filter(|entry| is_ivshmem(&entry.path())) {
            match Self::open(&entry.path().join("resource2")) {
                Ok(device) => return Ok(device),
                Err(error) => last = error,
            }
        }
        Err(last)
    }

    fn open(path: &Path) -> Result<Self, HostError> {
        let none = |why: String| HostError::NoDevice(format!("{}: {why}", path.display()));
        let file = File::options().read(true).write(true).open(path);
        let file = file.map_err(|error| none(error.to_string()))?;
        let len = file.metadata().map_err(|error| none(error.to_string()))?.len() as usize;
        let memory =
            OwnedMapping::map_shared(file.as_fd(), len).map_err(|error| none(error.to_string()))?;
        let device = Self { memory };
        device.window()?.service_number()?;
        Ok(device)
    }

    pub(super) fn window(&self) -> Result<CallWindow<'_>, WindowError> {
        CallWindow::new(self.memory.half_words(0, self.memory.len() / 4))
    }
}

fn is_ivshmem(device: &Path) -> bool {
    let has_content = |file: &str, wanted: &str| {
        fs::read_to_string(device.join(file)).is_ok_and(|text| text.trim() == wanted)
    };
    has_content("vendor", IVSHMEM[0]) && has_content("device", IVSHMEM[1])
}
