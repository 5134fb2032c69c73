//! The devices of a VM that Firn has a part in, as the journal records them: network cards and disks
//! that the supervisor serves, and the files that a save makes for drives.

use std::path::PathBuf;

use firn_disks::DiskFileId;
use firn_vmm::{DriveCopy, Overlay, StorageSnapshot};
use serde::{Deserialize, Serialize};

/// A network card whose frames pass through Firn.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct NetworkCard {
    /// Its back end's id on QEMU's command line.
    pub id: String,
    /// The socket that its frames go to; absolute.
    pub uplink: PathBuf,
    /// The number in QEMU of the supervisor's end of the socket pair.
    pub descriptor: i32,
    /// The inode of that socket, because the number may come to mean another file.
    pub inode: u64,
    /// The number and inode of QEMU's end.
    #[serde(default)]
    pub theirs: Option<(i32, u64)>,
}

/// The filters that a card has which is not Firn's own, while its frames pass through Firn.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CardFilter {
    /// The number in the names of the filters and of their sockets.
    pub number: u32,
    /// QEMU's name of the back end that has the filters.
    pub netdev: String,
}

/// A disk that a supervisor serves.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ServedDisk {
    /// Its id on QEMU's command line.
    pub id: String,
    /// Its file, absolute.
    pub file: PathBuf,
    /// Its size in bytes, including the bytes by which the file may still grow.
    pub size: u64,
    /// The identity of the file: another file of this name does not belong to the VM.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub is: Option<DiskFileId>,
}

/// The snapshot of one drive that a save makes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DriveSnapshot {
    /// The files that the image will build on: they cease to belong to the VM when it is complete.
    pub chain: Vec<PathBuf>,
    /// The file that the save makes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub made: Option<SnapshotFile>,
}

/// A file that a save makes for a drive.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum SnapshotFile {
    /// The overlay that the VM is to write to.
    Overlay(Overlay),
    /// A clone that the image is to refer to.
    Clone(PathBuf),
    /// A copy that the image is to refer to, made by a job of the hypervisor.
    Copy(DriveCopy),
    /// A snapshot that the image is to refer to, made by the disk's storage.
    Storage(StorageSnapshot),
}
