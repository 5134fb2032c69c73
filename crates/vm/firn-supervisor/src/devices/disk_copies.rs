//! The choice of the snapshot method for each drive (clone, overlay or copy), and the handling of
//! copies.
//!
//! | `--disks` | Firn started the VM | Firn attached to it |
//! |---|---|---|
//! | (not given) | clone, or else overlay | clone, or else copy |
//! | `copy`, `clone`, `overlay` | as chosen | as chosen |
//!
//! A drive on a block device (an LVM or ZFS volume, a loop device) or on the network (NBD, Ceph RBD,
//! iSCSI) is always copied: it has no directory for an overlay beside it, and an image could not
//! check later that it is unchanged.
//!
//! With `--disk-snapshot COMMAND`, the storage of each drive makes a snapshot of it
//! ([`StorageSnapshot`]).
//!
//! An overlay changes the block graph: the VM writes to another file than its command line names.
//! The graph of a VM that Firn did not start stays as it is, because its user starts it again by
//! that command line.
//!
//! A copy for an image with a parent holds what changed since the parent's copy, if three things
//! agree: the parent image names a file, the journal names the dirty bitmap that began with this
//! file, and QEMU has that bitmap. Otherwise everything is copied. Everything is copied as well when
//! the chain of copies is long, or when it holds more superseded contents than the drive has bytes,
//! because an old copy can be removed only with all images that build on it.

use std::io;
use std::path::{Path, PathBuf};

use firn_image::Image;
use firn_vmm::{
    BaseFile, COPIES_MAX, CopyExtent, DiskImage, Drive, DriveCopy, FileIdentity, Overlay, QemuVm,
    StorageCommand, StorageSnapshot, allocated_bytes, can_clone, list_backing_files,
};

use crate::devices::disk_layers::intermediate_copy_bytes;
use crate::devices::disk_snapshots::{DISK_DIR_HINT, new_file};
use crate::hypervisor::qemu;
use crate::records::control_protocol::{SaveDisks, SaveRequest};
use crate::records::device_records::{DriveSnapshot, SnapshotFile};
use crate::records::failure::{Failure, FailureContext, FailureKind};
use crate::records::journal::{HypervisorRecord, Journal, JournalFile};
use crate::records::meta::{FrozenDrive, ImageMeta};

/// The method of snapshots, and what is known of earlier copies.
pub(crate) struct DiskPolicy<'a> {
    how: Option<SaveDisks>,
    is_launched: bool,
    pub(crate) vm_name: &'a str,
    disk_dir: Option<&'a Path>,
    /// The command by which storage makes snapshots.
    storage_command: Option<&'a StorageCommand>,
    image_dir: &'a Path,
    /// The drives of the image that the new one builds on.
    parents: Vec<FrozenDrive>,
    /// The copies with which the dirty bitmaps began.
    bitmap_copies: Vec<DriveCopy>,
}

/// The snapshot that is made of a drive.
pub(crate) struct DiskChoice {
    pub(crate) made: SnapshotFile,
    /// For a copy.
    pub(crate) copy_file: Option<CopyFile>,
}

/// The parameters of the file of a copy.
#[derive(Default)]
pub(crate) struct CopyFile {
    /// The files below it with their formats, topmost first.
    below: Vec<(PathBuf, String)>,
    /// The approximate number of bytes that it will hold.
    bytes: u64,
}

impl CopyFile {
    /// The files that an image with this copy depends on.
    pub(crate) fn base_chain(&self) -> Vec<PathBuf> {
        self.below.iter().map(|(file, _)| file.clone()).collect()
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum DiskMethod {
    Clone,
    Overlay,
    Copy,
}

impl<'a> DiskPolicy<'a> {
    pub(crate) fn new(
        hypervisor_record: &'a HypervisorRecord,
        journal: &Journal,
        request: &'a SaveRequest,
        parent: Option<&Image>,
    ) -> Self {
        let parent =
            parent.and_then(|it| serde_json::from_value::<ImageMeta>(it.meta().clone()).ok());
        Self {
            how: request.choices.disks,
            is_launched: hypervisor_record.launched,
            vm_name: &hypervisor_record.meta.name,
            disk_dir: request.choices.disk_dir.as_deref(),
            storage_command: request.choices.disk_snapshot.as_ref(),
            image_dir: request.image.parent().unwrap_or(Path::new("/")),
            parents: parent.map(|meta| meta.drives).unwrap_or_default(),
            bitmap_copies: journal.copies.clone(),
        }
    }

    /// Whether the image only refers to the drives.
    pub(crate) fn is_reference_only(&self) -> bool {
        self.how == Some(SaveDisks::Reference)
    }

    /// Whether a drive may get one more overlay.
    pub(crate) fn adds_overlays(&self) -> bool {
        match self.how {
            None => self.is_launched && self.storage_command.is_none(),
            how => how == Some(SaveDisks::Overlay),
        }
    }

    /// Chooses the snapshot of a drive.
    pub(crate) fn choose_method(
        &self,
        vm: &mut QemuVm,
        drive: &Drive,
        named: &str,
    ) -> Result<DiskChoice, Failure> {
        let (suffix, path) = new_file(self.disk_dir, drive.top_file(), named, self.vm_name);
        let name = format!("firn-{suffix}");
        if let Some(command) = self.storage_command {
            return self.plan_storage(command, drive, name);
        }
        let made = match self.check_method(self.can_clone(drive, &path)?, drive)? {
            DiskMethod::Clone => SnapshotFile::Clone(path),
            DiskMethod::Overlay => SnapshotFile::Overlay(Overlay { node: name, path }),
            DiskMethod::Copy => return self.plan_copy(vm, drive, named, name),
        };
        Ok(DiskChoice { made, copy_file: None })
    }

    fn plan_storage(
        &self,
        command: &StorageCommand,
        drive: &Drive,
        name: String,
    ) -> Result<DiskChoice, Failure> {
        let snapshot = StorageSnapshot {
            command: command.clone(),
            vm: self.vm_name.to_owned(),
            drive: drive.name.clone(),
            disk: drive.top_file().to_owned(),
            name: format!("{name}-{}", self.vm_name),
            path: PathBuf::new(),
        };
        let planned = snapshot.plan().map_err(|error| {
            let failure = Failure::from_error(FailureKind::Refused, &error);
            failure.with_hint("the command has to print the path of the snapshot that it will make")
        })?;
        Ok(DiskChoice { made: SnapshotFile::Storage(planned), copy_file: None })
    }

    fn can_clone(&self, drive: &Drive, path: &Path) -> Result<bool, Failure> {
        if drive.is_copied_only() || matches!(self.how, Some(SaveDisks::Copy | SaveDisks::Overlay))
        {
            return Ok(false);
        }
        let dir = path.parent().unwrap_or(Path::new("/"));
        // The path of a lower layer may be relative to the directory of the layer above.
        let is_at_home = drive.chain.len() == 1 || drive.top_file().parent() == Some(dir);
        let can = can_clone(drive.top_file(), dir).while_doing("checking whether it can be cloned");
        match can.map(|can| can && is_at_home) {
            // A copy may be made in another directory.
            Err(_) if self.how.is_none() && !self.is_launched => Ok(false),
            can => can.map_err(|failure| failure.with_hint(DISK_DIR_HINT)),
        }
    }

    /// Whether a drive can be preserved, as far as its kind is concerned. The reason as an error if
    /// not.
    pub(crate) fn check_kind(&self, drive: &Drive) -> Result<(), String> {
        if self.storage_command.is_some() {
            return check_alone(drive);
        }
        let is_copied = matches!(self.how, None | Some(SaveDisks::Copy));
        let kind = match (drive.is_device, drive.is_remote) {
            (false, false) => return Ok(()),
            (true, _) => "a device",
            (_, true) => "on the network",
        };
        match is_copied {
            true => Ok(()),
            false => {
                let disk = drive.top_file().display();
                Err(format!("{disk} is {kind}: it can only be copied"))
            }
        }
    }

    fn check_method(&self, can_clone: bool, drive: &Drive) -> Result<DiskMethod, Failure> {
        if drive.is_copied_only() {
            return Ok(DiskMethod::Copy);
        }
        match (choose_method(self.how, self.is_launched, can_clone), drive.top_file().display()) {
            (Some(method), _) => Ok(method),
            (None, file) => {
                let text = format!("{}: the file system of {file} can't clone it", drive.name);
                let failure = Failure::new(FailureKind::Refused, text);
                Err(failure.with_hint("--disks copy copies it"))
            }
        }
    }

    fn plan_copy(
        &self,
        vm: &mut QemuVm,
        drive: &Drive,
        named: &str,
        name: String,
    ) -> Result<DiskChoice, Failure> {
        let dir = self.disk_dir.unwrap_or(self.image_dir);
        let (_, path) = new_file(Some(dir), drive.top_file(), named, self.vm_name);
        let (extent, copy_file) = match self.plan_changes(vm, drive, named)? {
            Some(changes) => changes,
            None => plan_full_copy(drive).while_doing("reading the files of the VM's disks")?,
        };
        let copy = DriveCopy { source: drive.node.clone(), name, path, extent };
        Ok(DiskChoice { made: SnapshotFile::Copy(copy), copy_file: Some(copy_file) })
    }

    /// Plans a copy of what changed since the parent's copy; `None` if that is not known.
    fn plan_changes(
        &self,
        vm: &mut QemuVm,
        drive: &Drive,
        named: &str,
    ) -> Result<Option<(CopyExtent, CopyFile)>, Failure> {
        let Some((parent, copy)) = self.find_parent(drive, named) else { return Ok(None) };
        let Ok(below) = list_backing_files(&parent.file) else { return Ok(None) };
        let is_long = below.len() + 1 >= COPIES_MAX || has_excess_copies(drive, &below);
        if is_long || !is_unchanged(parent) {
            return Ok(None);
        }
        let bytes = vm.changed_bytes(copy).while_doing("reading dirty bitmaps")?;
        Ok(bytes.map(|bytes| {
            let parent = (parent.file.clone(), parent.format.clone());
            let below = std::iter::once(parent).chain(below).collect();
            (CopyExtent::Changes(copy.name.clone()), CopyFile { below, bytes })
        }))
    }

    fn find_parent(&self, drive: &Drive, named: &str) -> Option<(&FrozenDrive, &DriveCopy)> {
        let is_parent = |it: &&FrozenDrive| it.named == named && it.bytes == drive.bytes;
        let parent = self.parents.iter().find(is_parent)?;
        let began = |it: &&DriveCopy| it.path == parent.file && it.source == drive.node;
        Some((parent, self.bitmap_copies.iter().find(began)?))
    }
}

/// Refuses a drive of several files: a snapshot of the topmost is not the drive.
fn check_alone(drive: &Drive) -> Result<(), String> {
    match drive.chain.len() {
        0 | 1 => Ok(()),
        files => {
            let file = drive.top_file().display();
            Err(format!(
                "{file} has {} backing files, which its storage's snapshot lacks",
                files - 1
            ))
        }
    }
}

/// `None` if a clone was requested and is impossible.
fn choose_method(how: Option<SaveDisks>, is_launched: bool, can_clone: bool) -> Option<DiskMethod> {
    match (how, can_clone) {
        (Some(SaveDisks::Copy), _) => Some(DiskMethod::Copy),
        (Some(SaveDisks::Overlay), _) => Some(DiskMethod::Overlay),
        (_, true) => Some(DiskMethod::Clone),
        (None, false) if is_launched => Some(DiskMethod::Overlay),
        (None, false) => Some(DiskMethod::Copy),
        (Some(_), false) => None,
    }
}

/// Plans a copy of a whole drive, or of all of its topmost layer.
fn plan_full_copy(drive: &Drive) -> io::Result<(CopyExtent, CopyFile)> {
    let bytes = drive_bytes(drive)?;
    // Each file of the chain names the one below it: drives for which this is not true are refused.
    let below: Vec<_> = match drive.chain.get(1..) {
        None | Some([]) => Vec::new(),
        Some(lower) => {
            let formats =
                list_backing_files(drive.top_file())?.into_iter().map(|(_, format)| format);
            lower.iter().cloned().zip(formats).collect()
        }
    };
    let extent = if below.is_empty() { CopyExtent::All } else { CopyExtent::Top };
    Ok((extent, CopyFile { below, bytes }))
}

/// The number of bytes that a drive's topmost image takes; of one that is no file, all that it has.
fn drive_bytes(drive: &Drive) -> io::Result<u64> {
    if drive.is_copied_only() { Ok(drive.bytes) } else { allocated_bytes(drive.top_file()) }
}

/// Whether the copies below hold more contents that no image is made of than the drive has: then a
/// full copy, after which they can be removed with the images on them, takes less space.
fn has_excess_copies(drive: &Drive, below: &[(PathBuf, String)]) -> bool {
    let below: Vec<PathBuf> = below.iter().map(|(file, _)| file.clone()).collect();
    let drive_bytes = drive_bytes(drive).unwrap_or(u64::MAX);
    intermediate_copy_bytes(&below) > drive_bytes
}

fn is_unchanged(drive: &FrozenDrive) -> bool {
    FileIdentity::from_path(&drive.file)
        .is_ok_and(|now| (now.size, now.mtime_ns) == (drive.identity.size, drive.identity.mtime_ns))
}

/// Creates the file of a copy, and has the hypervisor open it.
pub(crate) fn create_copy(
    vm: &mut QemuVm,
    program: &str,
    drive: &Drive,
    copy: &DriveCopy,
    copy_file: &CopyFile,
) -> Result<(), Failure> {
    let base = copy_file.below.first().map(|(file, format)| BaseFile { file, format });
    copy.create_file(program, drive, base, copy_file.bytes)
        .while_doing("creating a file for the copy of a disk")
        .map_err(|failure| failure.with_hint(DISK_DIR_HINT))?;
    vm.open_copy(copy).while_doing("opening a file for the copy of a disk")
}

/// The files below copies, which an image needs unchanged.
pub(crate) fn find_layers<'c>(
    copies: impl Iterator<Item = &'c DriveCopy>,
    bytes: u64,
) -> io::Result<Vec<DiskImage>> {
    let mut layers = Vec::new();
    for copy in copies {
        for (file, format) in list_backing_files(&copy.path)? {
            let identity = FileIdentity::from_path(&file).ok();
            let file = file.to_string_lossy().into_owned();
            let node = String::new();
            layers.push(DiskImage { node, file, format, read_only: true, size: bytes, identity });
        }
    }
    Ok(layers)
}

fn list_copies(drives: &[DriveSnapshot]) -> Vec<DriveCopy> {
    let copy = |kept: &DriveSnapshot| match &kept.made {
        Some(SnapshotFile::Copy(copy)) => Some(copy.clone()),
        _ => None,
    };
    drives.iter().filter_map(copy).collect()
}

/// Ends the jobs of copies of a failed save, and closes their files. A VM that QEMU stopped because
/// such a file was full is resumed.
pub(crate) fn discard_copies(vm: &mut QemuVm, drives: &[DriveSnapshot]) {
    let copies = list_copies(drives);
    if copies.is_empty() {
        return;
    }
    let discarded = vm.discard_copies(&copies).and_then(|was_unfinished| {
        let is_stuck = was_unfinished && vm.status()?.status == "io-error";
        if is_stuck { vm.cont() } else { Ok(()) }
    });
    if let Err(error) = discarded {
        let failure = Failure::from_error(FailureKind::Other, &error);
        tracing::warn!("{}", failure.while_doing("ending the copies of the VM's disks"));
    }
}

/// Records the copies of a complete image, on which the next ones build.
pub(crate) fn record_copies(known: &mut Vec<DriveCopy>, drives: &[DriveSnapshot]) {
    let new = list_copies(drives);
    known.retain(|copy| new.iter().all(|it| it.source != copy.source));
    known.extend(new);
}

/// Removes the dirty bitmaps that no copy needs any more.
pub(crate) fn remove_old_bitmaps(vm: &mut QemuVm, journal: &Journal) {
    if journal.copies.is_empty() {
        return;
    }
    if let Err(error) = vm.remove_bitmaps(&journal.copies) {
        // If this fails, the worst outcome is that QEMU tracks writes for no use.
        tracing::warn!("{}", Failure::from_error(FailureKind::Other, &error));
    }
}

/// Removes all dirty bitmaps of Firn's, before Firn detaches from the VM.
pub(crate) fn remove_all_bitmaps(journal: &JournalFile) {
    let Journal { hypervisor_record, copies, .. } = journal.current_journal();
    let Some(hypervisor_record) = hypervisor_record.filter(|_| !copies.is_empty()) else { return };
    const LEAVING: &str = "removing dirty bitmaps from the VM's disks";
    let left = qemu::connect_monitor(&hypervisor_record)
        .and_then(|mut vm| vm.remove_bitmaps(&[]).while_doing(LEAVING))
        .and_then(|()| {
            journal.update(|journal| journal.copies.clear()).while_doing("writing the journal")
        });
    if let Err(failure) = left {
        tracing::warn!("{failure}");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn overlays_are_the_default_only_of_vms_that_firn_started() {
        use SaveDisks::{Clone, Copy, Overlay};
        assert_eq!(choose_method(None, true, false), Some(DiskMethod::Overlay));
        assert_eq!(choose_method(None, false, false), Some(DiskMethod::Copy));
        assert_eq!(choose_method(None, false, true), Some(DiskMethod::Clone));
        assert_eq!(choose_method(Some(Copy), true, true), Some(DiskMethod::Copy));
        assert_eq!(choose_method(Some(Overlay), false, true), Some(DiskMethod::Overlay));
        assert_eq!(choose_method(Some(Clone), true, true), Some(DiskMethod::Clone));
        assert_eq!(choose_method(Some(Clone), true, false), None);
    }
}
