//! The origin of an image, as the image describes it, and the differences to this host.
//!
//! The description is stored in the image as JSON. A restore starts QEMU from it. It refuses,
//! unless forced, where the guest would notice a difference: another version of QEMU, or a disk
//! with other contents than at the checkpoint.

use std::fmt;
use std::path::{Path, PathBuf};

use firn_vmm::{DiskImage, FileIdentity, UserConnection};
use serde::{Deserialize, Serialize};

use crate::records::cpu::CpuFacts;

/// The version of [`ImageMeta`] itself.
pub const VERSION: u32 = 1;

/// The version with drives: a Firn that does not know drives would have the VM write to them.
pub const VERSION_WITH_DRIVES: u32 = 2;

/// The version for blocked output: a Firn that does not know the mark would release the output.
pub const VERSION_HELD: u32 = 3;

/// The version of an image that is paused or cannot be restored: a Firn that does not know these
/// marks would run the VM.
pub const VERSION_MARKED: u32 = 4;

/// The version of an image whose guest was frozen: a Firn that does not know this mark would leave it so.
pub const VERSION_FROZEN: u32 = 5;

/// The origin of an image.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct ImageMeta {
    /// `VERSION`, `VERSION_WITH_DRIVES`, `VERSION_HELD`, `VERSION_MARKED` or `VERSION_FROZEN`.
    pub version: u32,
    /// The VM's name.
    pub name: String,
    /// When the checkpoint was requested, in seconds since 1970.
    pub created: u64,
    /// The version of Firn that wrote it.
    pub firn: String,
    /// The machine type with its version, such as `pc-q35-7.2`.
    pub machine: String,
    /// The hypervisor and how it was started.
    pub qemu: QemuFacts,
    /// Guest RAM, in bytes.
    pub memory_bytes: u64,
    /// Virtual CPUs.
    pub vcpus: u32,
    /// Disk images that it refers to and that must be unchanged: layers below drives, read-only
    /// disks, and disks of which no snapshot could be made.
    #[serde(default)]
    pub disks: Vec<DiskImage>,
    /// The drives that the guest writes to, at the cut. Their contents are not in the image, but in
    /// files that no process writes to any more.
    #[serde(default)]
    pub drives: Vec<FrozenDrive>,
    /// The share of the working set that was found in the last eighth of the time in which the
    /// guest was traced, 0 to 1: the larger it is, the more was missed. Absent if the working set
    /// is from another source.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub found_late: Option<f64>,
    /// A standby may run the VM: its output is blocked until a release, wherever it is restored.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub held: bool,
    /// QEMU's name for the run state of a VM that did not run when it was saved, such as `paused`;
    /// `None` if it ran.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub paused: Option<String>,
    /// The guest's file systems were frozen at the cut: each restore has to thaw them.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub frozen: bool,
    /// The TCP connections that the guest had by QEMU's user networking shortly before the cut, which
    /// no restored VM has.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub connections: Vec<UserConnection>,
    /// The host's processor, if the guest sees it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cpu: Option<CpuFacts>,
    /// The reasons why no restore can succeed, if the user accepted them when the image was made.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub unrestorable: Vec<String>,
    /// libvirt's XML of the running domain, without passwords, if the VM belonged to libvirt.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub domain_xml: Option<String>,
    /// libvirt's definition of the domain, from which its next start would have been, without
    /// passwords; `None` if the domain was not persistent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub domain_definition: Option<String>,
}

/// A drive at the cut.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct FrozenDrive {
    /// The file that the command line names, as it names it.
    pub named: String,
    /// The file that has the drive's contents, absolute.
    pub file: PathBuf,
    /// Its format: `qcow2` or `raw`.
    pub format: String,
    /// The size of the drive that the guest sees, in bytes.
    pub bytes: u64,
    /// The identity of the file and its contents.
    pub identity: FileIdentity,
    /// Whether the file was made for this image, as a clone or a copy of the file that the VM
    /// continued with.
    #[serde(default)]
    pub is_clone: bool,
    /// Whether it is a snapshot that the disk's storage made. The storage keeps its contents, and
    /// its name is unique. As a device it may get another time of its last write.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub is_storage_snapshot: bool,
}

/// A QEMU and its command line.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct QemuFacts {
    /// Its version, such as `7.2.22 (Debian 1:7.2+dfsg-7)`.
    pub version: String,
    /// The accelerator: `kvm` or `tcg`.
    pub accel: String,
    /// The command line as the user gave it, program first.
    pub user_args: Vec<String>,
    /// The command line with Firn's additions; unchanged for a VM that Firn attached to.
    pub args: Vec<String>,
    /// Its working directory, in which relative paths of the command line start.
    pub directory: PathBuf,
}

/// A difference between an image and this host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum HostMismatch {
    /// Another version of QEMU.
    Qemu {
        /// The version in the image.
        image: String,
        /// The version on this host.
        host: String,
    },
    /// A disk can't be examined.
    DiskMissing(String),
    /// A disk was written to since the checkpoint.
    DiskChanged(String),
}

impl fmt::Display for HostMismatch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Qemu { image, host } => {
                write!(f, "the image is of QEMU {image}, this host has QEMU {host}")
            }
            Self::DiskMissing(file) => write!(f, "disk {file} is not there"),
            Self::DiskChanged(file) => {
                write!(f, "disk {file} has changed since the checkpoint")
            }
        }
    }
}

impl ImageMeta {
    /// Adds these drives.
    pub(crate) fn with_drives(self, drives: Vec<FrozenDrive>) -> Self {
        Self { drives, ..self }.with_version()
    }

    /// Adds disks, each file once.
    pub(crate) fn add_disks(&mut self, disks: Vec<DiskImage>) {
        let which = |disk: &DiskImage| disk.identity.map(|it| (it.dev, it.inode));
        for disk in disks {
            let is_known = |it: &DiskImage| which(it).is_some() && which(it) == which(&disk);
            if !self.disks.iter().any(is_known) {
                self.disks.push(disk);
            }
        }
    }

    /// Sets whether the output of the VM is blocked.
    pub(crate) fn with_output_blocked(self, held: bool) -> Self {
        Self { held, ..self }.with_version()
    }

    /// Sets the run state of a VM that did not run.
    pub(crate) fn with_paused_state(self, paused: Option<String>) -> Self {
        Self { paused, ..self }.with_version()
    }

    /// Sets whether the guest's file systems are frozen at the cut.
    pub(crate) fn with_frozen(self, frozen: bool) -> Self {
        Self { frozen, ..self }.with_version()
    }

    /// Sets the reasons why the image cannot be restored.
    pub(crate) fn with_obstacles(self, unrestorable: Vec<String>) -> Self {
        Self { unrestorable, ..self }.with_version()
    }

    /// Sets libvirt's description of the running domain, and its definition.
    pub(crate) fn with_domain_xml(
        self,
        domain_xml: Option<String>,
        domain_definition: Option<String>,
    ) -> Self {
        Self { domain_xml, domain_definition, ..self }
    }

    /// Has QEMU work in a directory where only root can put files. QEMU searches its directory for
    /// firmware, and an image of unknown origin may name one that has some.
    pub(crate) fn without_directory(self) -> Self {
        let qemu = QemuFacts { directory: PathBuf::from("/"), ..self.qemu };
        Self { qemu, ..self }
    }

    /// Sets the oldest version that can express the contents.
    fn with_version(self) -> Self {
        let is_marked = self.paused.is_some() || !self.unrestorable.is_empty();
        let version = match (is_marked, self.held, self.drives.is_empty()) {
            _ if self.frozen => VERSION_FROZEN,
            (true, _, _) => VERSION_MARKED,
            (false, true, _) => VERSION_HELD,
            (false, false, false) => VERSION_WITH_DRIVES,
            (false, false, true) => VERSION,
        };
        Self { version, ..self }
    }

    /// Compares the disks. `identify` returns the current identity of a file; `None` if it does not
    /// exist.
    ///
    /// Size and time of the last write decide, so that a copy with the same size and time passes,
    /// wherever it is stored. A disk that was no local file (a network disk) can't be compared and
    /// passes.
    pub fn disk_mismatches(
        &self,
        identify: impl Fn(&DiskImage) -> Option<FileIdentity>,
    ) -> Vec<HostMismatch> {
        let changed = |disk: &DiskImage| {
            let then = disk.identity?;
            match identify(disk) {
                None => Some(HostMismatch::DiskMissing(disk.file.clone())),
                Some(now) if has_same_content(now, then) => None,
                Some(_) => Some(HostMismatch::DiskChanged(disk.file.clone())),
            }
        };
        self.disks.iter().filter_map(changed).collect()
    }

    /// Compares the drives of which the image has snapshots.
    pub fn drive_mismatches(
        &self,
        identify: impl Fn(&FrozenDrive) -> Option<FileIdentity>,
    ) -> Vec<HostMismatch> {
        let changed = |drive: &FrozenDrive| {
            let name = drive.file.display().to_string();
            match identify(drive) {
                None => Some(HostMismatch::DiskMissing(name)),
                Some(_) if drive.is_storage_snapshot => None,
                Some(now) if has_same_content(now, drive.identity) => None,
                Some(_) => Some(HostMismatch::DiskChanged(name)),
            }
        };
        self.drives.iter().filter_map(changed).collect()
    }

    /// The current identity of a disk; relative paths start in QEMU's working directory.
    pub(crate) fn disk_identity(&self, file: &Path) -> Option<FileIdentity> {
        FileIdentity::from_path(&self.qemu.directory.join(file)).ok()
    }

    /// Compares all disk files with those of this host.
    pub fn file_mismatches(&self) -> Vec<HostMismatch> {
        let mut mismatches = self.disk_mismatches(|disk| self.disk_identity(Path::new(&disk.file)));
        mismatches.extend(self.drive_mismatches(|drive| self.disk_identity(&drive.file)));
        mismatches
    }

    /// Compares QEMU's version: the number, without the distribution's addition.
    pub fn qemu_mismatch(&self, host: &str) -> Option<HostMismatch> {
        (version_number(&self.qemu.version) != version_number(host))
            .then(|| HostMismatch::Qemu { image: self.qemu.version.clone(), host: host.to_owned() })
    }
}

fn version_number(version: &str) -> &str {
    version.split_once(' ').map_or(version, |(number, _)| number)
}

fn has_same_content(now: FileIdentity, then: FileIdentity) -> bool {
    (now.size, now.mtime_ns) == (then.size, then.mtime_ns)
}

#[cfg(test)]
mod tests {
    use super::*;

    const THEN: FileIdentity = FileIdentity { dev: 1, inode: 2, size: 100, mtime_ns: 5 };

    fn disk(file: &str, identity: Option<FileIdentity>) -> DiskImage {
        DiskImage {
            node: "disk0".into(),
            file: file.into(),
            format: "raw".into(),
            read_only: false,
            size: 100,
            identity,
        }
    }

    fn meta() -> ImageMeta {
        let disks = vec![
            disk("/same", Some(THEN)),
            disk("/copied", Some(THEN)),
            disk("/written", Some(THEN)),
            disk("/gone", Some(THEN)),
            disk("nbd://host", None),
        ];
        let qemu = QemuFacts { version: "7.2.22".into(), ..QemuFacts::default() };
        ImageMeta { qemu, disks, ..ImageMeta::default() }
    }

    /// A Firn that does not know blocked output must not restore such an image.
    #[test]
    fn the_version_decides_which_firn_can_restore_an_image() {
        let drive = FrozenDrive {
            named: "d".into(),
            file: "/d".into(),
            format: "raw".into(),
            bytes: 1,
            identity: FileIdentity { dev: 1, inode: 2, size: 3, mtime_ns: 4 },
            is_clone: false,
            is_storage_snapshot: false,
        };
        assert_eq!(ImageMeta::default().with_drives(Vec::new()).version, VERSION);
        assert_eq!(
            ImageMeta::default().with_drives(vec![drive.clone()]).version,
            VERSION_WITH_DRIVES
        );
        assert_eq!(
            ImageMeta::default().with_output_blocked(true).with_drives(vec![drive]).version,
            VERSION_HELD
        );
        assert_eq!(
            ImageMeta::default().with_output_blocked(true).with_output_blocked(false).version,
            VERSION
        );
        let reasons = vec!["it has a vfio-pci".to_owned()];
        assert_eq!(
            ImageMeta::default().with_obstacles(reasons).with_output_blocked(true).version,
            VERSION_MARKED
        );
        assert_eq!(
            ImageMeta::default().with_paused_state(Some("paused".into())).version,
            VERSION_MARKED
        );
        assert_eq!(
            ImageMeta::default().with_frozen(true).with_output_blocked(true).version,
            VERSION_FROZEN
        );
        assert_eq!(
            ImageMeta::default().with_paused_state(None).with_obstacles(Vec::new()).version,
            VERSION
        );
    }

    #[test]
    fn every_disk_that_is_not_the_same_is_named() {
        let look = |disk: &DiskImage| match disk.file.as_str() {
            "/same" => Some(THEN),
            "/copied" => Some(FileIdentity { inode: 9, ..THEN }),
            "/written" => Some(FileIdentity { mtime_ns: 6, ..THEN }),
            _ => None,
        };
        let expected = [
            HostMismatch::DiskChanged("/written".into()),
            HostMismatch::DiskMissing("/gone".into()),
        ];
        assert_eq!(meta().disk_mismatches(look), expected);
    }

    #[test]
    fn another_qemu_is_a_mismatch_that_names_both() {
        assert_eq!(meta().qemu_mismatch("7.2.22 (Debian 1:7.2+dfsg-7)"), None);
        let text = meta().qemu_mismatch("10.0.2").unwrap().to_string();
        assert_eq!(text, "the image is of QEMU 7.2.22, this host has QEMU 10.0.2");
    }
}
