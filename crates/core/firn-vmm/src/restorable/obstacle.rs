//! The reasons why a VM could not be restored, each with a remedy.

use std::fmt;

/// A kind of device whose memory accesses, or whose state, Firn has no access to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum InaccessibleDeviceKind {
    /// A device of the host (`vfio-pci`).
    Vfio,
    /// A virtio device in hardware.
    Vdpa,
    /// A device in another process (`vhost-user`).
    VhostUser,
    /// A directory shared by another process.
    Virtiofs,
    /// Memory that the guest plugs and unplugs in pieces.
    VirtioMem,
    /// Memory that outlives the VM (`nvdimm`, `virtio-pmem`).
    PersistentMemory,
    /// Memory of an SGX enclave.
    Enclave,
}

impl InaccessibleDeviceKind {
    /// The kind of a device of this driver; `None` if Firn has access to all of its state.
    pub(super) fn of_driver(driver: &str) -> Option<Self> {
        match driver {
            driver if driver.starts_with("vfio-") => Some(Self::Vfio),
            driver if driver.starts_with("vhost-vdpa") => Some(Self::Vdpa),
            driver if driver.starts_with("vhost-user-fs") => Some(Self::Virtiofs),
            driver if driver.starts_with("vhost-user") => Some(Self::VhostUser),
            driver if driver.starts_with("virtio-mem") => Some(Self::VirtioMem),
            driver if driver.starts_with("virtio-pmem") => Some(Self::PersistentMemory),
            "nvdimm" => Some(Self::PersistentMemory),
            "sgx-epc" => Some(Self::Enclave),
            _ => None,
        }
    }

    /// The kind of a network back end of this type.
    pub(super) fn of_backend(kind: &str) -> Option<Self> {
        match kind {
            "vhost-user" => Some(Self::VhostUser),
            "vhost-vdpa" => Some(Self::Vdpa),
            _ => None,
        }
    }

    fn describe_reason(self) -> &'static str {
        match self {
            Self::Vfio => "is hardware that writes to guest memory unseen and keeps its own state",
            Self::Vdpa => "is hardware (vDPA) that writes to guest memory unseen",
            Self::VhostUser => "is run by another process, which writes to guest memory unseen",
            Self::Virtiofs => "is run by virtiofsd, whose open files are in no image",
            Self::VirtioMem => "gives guest memory and takes it back, which no image records",
            Self::PersistentMemory => "is persistent memory, which no image holds",
            Self::Enclave => "is encrypted enclave memory, which no image can hold",
        }
    }
}

/// One reason why a VM could not be restored from a checkpoint.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RestoreObstacle {
    /// A device that the command line does not have.
    HotPlugged {
        /// Its id, or its QOM path.
        device: String,
        /// Its driver.
        driver: String,
    },
    /// Devices of the command line that were removed.
    Removed {
        /// Their ids, or their number.
        devices: String,
    },
    /// Fewer vCPUs than the command line has.
    FewerVcpus {
        /// The number now.
        now: u64,
        /// The number at the start.
        initial: u64,
    },
    /// A medium that the command line does not have.
    ChangedMedium {
        /// The drive.
        drive: String,
        /// The medium's file.
        file: String,
    },
    /// An open descriptor of the process that started QEMU.
    Descriptor {
        /// The option.
        option: String,
    },
    /// A device of whose state Firn has only a part.
    Unseen {
        /// Its id or name.
        device: String,
        /// Its driver or type.
        driver: String,
        /// The kind of the device.
        kind: InaccessibleDeviceKind,
    },
    /// Encrypted guest memory.
    Confidential {
        /// The object that encrypts it.
        object: String,
    },
    /// A secret that another QEMU could not read.
    Secret {
        /// Its id.
        id: String,
        /// The place of the secret, and why it is unavailable.
        location: String,
    },
    /// Firn could not start the command line again.
    CommandLine {
        /// The reason.
        reason: String,
    },
}

impl fmt::Display for RestoreObstacle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::HotPlugged { device, driver } => write!(
                f,
                "device {device} ({driver}) was added while the VM ran: remove it (device_del), or start the VM with it"
            ),
            Self::Removed { devices } => write!(
                f,
                "the command line has {devices}, and the VM no longer does: start the VM without, or add it again"
            ),
            Self::FewerVcpus { now, initial } => write!(
                f,
                "the VM has {now} of the {initial} vCPUs it was started with: add them again, or start it with {now}"
            ),
            Self::ChangedMedium { drive, file } => write!(
                f,
                "drive {drive} has another medium than the command line gives it, {file}: eject it, or start the VM with it"
            ),
            Self::Descriptor { option } => write!(
                f,
                "{option}: a restore has no such open descriptor; name a file, a device or a socket by its path"
            ),
            Self::Unseen { device, driver, kind } => write!(
                f,
                "{device} ({driver}) {}: remove it, or start the VM without it",
                kind.describe_reason()
            ),
            Self::Confidential { object } => {
                write!(f, "guest memory is encrypted ({object}): start the VM without encryption")
            }
            Self::Secret { id, location } => {
                write!(
                    f,
                    "secret {id} cannot be read again ({location}): give it in a file that stays"
                )
            }
            Self::CommandLine { reason } => {
                write!(f, "its command line cannot be started again: {reason}")
            }
        }
    }
}
