//! Snapshots of the VM's disks, for saves and restores: an image's disks keep their state of the
//! cut, and no process writes to them again.
//!
//! ```text
//!   save      drive a.qcow2     ->  image: "a.qcow2 is as it was"        the VM writes to an overlay on it
//!             (or, where files can share blocks)  "a.qcow2.web-5f is"    the VM continues with it
//!   suspend   drive a.qcow2     ->  image: "a.qcow2 is as it was"        the VM has ended
//!   restore   "a.qcow2 is ..."  ->  overlay on a.qcow2                   only the VM writes to that
//! ```
//!
//!   copy      drive a.qcow2     ->  image: "copy.qcow2 is"               the VM continues with a.qcow2 (`disk_copies`)
//!
//!   storage   drive /dev/vg/web ->  image: "/dev/vg/firn-.. is"          the VM continues with it (`--disk-snapshot`)
//!
//! Overlays that no image builds on belong to the VM: they are in the journal, and `firn stop
//! --discard` removes them. The journal records what a save does to drives before it is done, so
//! that a successor can find out from the hypervisor how much of it was done:
//!
//! | overlay | image | then |
//! |---|---|---|
//! | not in use | no | it is removed |
//! | in use | no | the VM continues with it; the layers below still belong to the VM |
//! | in use | complete | the VM continues with it; all layers below belong to the image |

use std::ffi::OsString;
use std::hash::{BuildHasher, Hasher, RandomState};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};

use firn_vmm::command_line::{self, DriveFile, NetworkDisk};
use firn_vmm::{
    CHAIN_MAX, CopyExtent, DiskImage, Drive, DriveCopy, DriveCut, FileIdentity, Overlay,
    OverlayBase, QemuVm, StorageSnapshot, create_overlay,
};
use serde_json::json;

use crate::devices::disk_copies::{self, CopyFile, DiskPolicy};
use crate::devices::disk_layers::{self, LockedLayers};
use crate::records::control_protocol::RestoreDisks;
use crate::records::device_records::{DriveSnapshot, SnapshotFile};
use crate::records::failure::{Failure, FailureContext, FailureKind};
use crate::records::journal::{Journal, JournalFile, VmPhase};
use crate::records::meta::{FrozenDrive, ImageMeta};

const SNAPSHOTTING: &str = "taking snapshots of the VM's disks";

/// The snapshots that a save makes of the VM's drives.
pub(crate) struct DiskSnapshots<'a> {
    /// The hypervisor program.
    program: &'a str,
    policy: DiskPolicy<'a>,
    /// The image only refers to the disks, and they continue to belong to the VM.
    is_reference_only: bool,
    then_stop: bool,
    drives: Vec<PlannedDrive>,
    /// Whether the pause has begun: until then no overlay is in use.
    has_pause_begun: AtomicBool,
}

/// A drive that a restore is to have.
struct PlannedDrive {
    /// The file of the command line that the drive stands for, as it is named there.
    named: String,
    drive: Drive,
    /// The identity of its file at the start, if the image only refers to it.
    before: Option<FileIdentity>,
    /// `None` if no file has to be made: the VM ends, or the image only refers to the disk.
    made: Option<SnapshotFile>,
    /// How the file of a copy is made.
    copy_file: Option<CopyFile>,
}

impl<'a> DiskSnapshots<'a> {
    /// Examines the drives, without changing them. Refuses what could not be restored: if the VM is
    /// to continue with snapshots, drives that can't have one; otherwise, drives that are not what
    /// the command line names.
    pub(crate) fn plan_drives(
        vm: &mut QemuVm,
        meta: &'a ImageMeta,
        policy: DiskPolicy<'a>,
        then_stop: bool,
    ) -> Result<Self, Failure> {
        let is_reference_only = policy.is_reference_only();
        let mut cutting = Self {
            program: meta.qemu.args.first().map_or("", String::as_str),
            policy,
            is_reference_only,
            then_stop,
            drives: Vec::new(),
            has_pause_begun: AtomicBool::default(),
        };
        let needs_snapshots = !then_stop && !is_reference_only;
        let adds_overlays = needs_snapshots && cutting.policy.adds_overlays();
        let mut obstacles = Vec::new();
        for drive in vm.drives().while_doing("querying the VM's disks")? {
            let is_as_started = is_as_started(meta, &drive);
            let checked = match needs_snapshots {
                true => cutting.policy.check_kind(&drive),
                false => check_reference(&drive),
            };
            let checked = checked.map_err(|obstacle| format!("{}: {obstacle}", drive.name));
            match checked.and_then(|()| check_drive(meta, drive, adds_overlays)) {
                Ok((named, drive)) => cutting.add_drive(named, drive),
                Err(_) if !needs_snapshots && is_as_started => {}
                Err(obstacle) => obstacles.push(obstacle),
            }
        }
        obstacles.extend(cutting.find_ambiguity(meta));
        match obstacles.is_empty() {
            true => Ok(cutting),
            false => Err(refuse_drives(obstacles, needs_snapshots)),
        }
    }

    fn add_drive(&mut self, named: String, drive: Drive) {
        let is_written = self.is_reference_only && !self.then_stop;
        let before = is_written.then(|| FileIdentity::from_path(drive.top_file()).ok()).flatten();
        self.drives.push(PlannedDrive { named, drive, before, made: None, copy_file: None });
    }

    /// The reason why a restore could not replace the files that the command line names, if any.
    fn find_ambiguity(&self, meta: &ImageMeta) -> Option<String> {
        let mut names: Vec<&str> = self.drives.iter().map(|it| &*it.named).collect();
        names.sort_unstable();
        if let Some(pair) = names.windows(2).find(|pair| pair[0] == pair[1]) {
            return Some(format!("two drives stand for {}", pair[0]));
        }
        let (file, format) = ("/", "qcow2");
        let drive = |named: &&str| DriveFile {
            named: (*named).to_owned(),
            file: file.to_owned(),
            format: format.to_owned(),
        };
        let drives: Vec<_> = names.iter().map(drive).collect();
        let tried =
            command_line::plan_command(&meta.qemu.user_args).and_then(|it| it.with_drives(&drives));
        // That a command line can't be restored at all is not reported here.
        tried.err().filter(|_| !drives.is_empty()).map(|error| error.to_string())
    }

    /// Makes the files, and has the hypervisor open them. After an error, none of the files is
    /// left.
    pub(crate) fn prepare_files(
        &mut self,
        vm: &mut QemuVm,
        journal: &JournalFile,
    ) -> Result<(), Failure> {
        let prepared = self.choose_files(vm).and_then(|()| {
            self.record_in_journal(journal)?;
            self.create_files(vm)?;
            self.record_layers(journal)
        });
        firn_fault::pass_point("save.drives-ready");
        prepared.map_err(|failure| {
            self.undo_save(vm, journal);
            failure.while_doing(SNAPSHOTTING)
        })
    }

    /// Chooses the file to make for each drive.
    fn choose_files(&mut self, vm: &mut QemuVm) -> Result<(), Failure> {
        if self.then_stop || self.is_reference_only {
            return Ok(());
        }
        for planned in &mut self.drives {
            let choice = self.policy.choose_method(vm, &planned.drive, &planned.named)?;
            (planned.made, planned.copy_file) = (Some(choice.made), choice.copy_file);
        }
        Ok(())
    }

    fn record_in_journal(&self, journal: &JournalFile) -> Result<(), Failure> {
        let all = self.drive_snapshots();
        let change = |journal: &mut Journal| {
            if let VmPhase::Saving { drives, .. } = &mut journal.phase {
                *drives = all;
            }
        };
        journal.update(change).while_doing("writing the journal")
    }

    /// Records the layers, before the VM uses one and before there is an image that needs one.
    fn record_layers(&self, journal: &JournalFile) -> Result<(), Failure> {
        let VmPhase::Saving { image, .. } = journal.current_journal().phase else { return Ok(()) };
        let recorded =
            disk_layers::record_save(self.policy.vm_name, &image, &self.drive_snapshots());
        firn_fault::pass_point("save.layers-recorded");
        recorded
    }

    fn drive_snapshots(&self) -> Vec<DriveSnapshot> {
        match self.is_reference_only {
            true => Vec::new(),
            false => self.drives.iter().map(PlannedDrive::to_snapshot).collect(),
        }
    }

    fn create_files(&self, vm: &mut QemuVm) -> Result<(), Failure> {
        for PlannedDrive { drive, made, copy_file, .. } in &self.drives {
            if let (Some(SnapshotFile::Copy(copy)), Some(copy_file)) = (made, copy_file) {
                disk_copies::create_copy(vm, self.program, drive, copy, copy_file)?;
            }
            let Some(SnapshotFile::Overlay(overlay)) = made else { continue };
            let (file, named) = (drive.top_file(), &*drive.named);
            let below = OverlayBase { file, named, format: &drive.format, bytes: drive.bytes };
            create_overlay(self.program, &below, &overlay.path)
                .while_doing("making an overlay")
                .map_err(|failure| failure.with_hint(DISK_DIR_HINT))?;
            vm.open_overlay(drive, overlay).while_doing("opening an overlay")?;
        }
        Ok(())
    }

    /// The part of the snapshots that is made in the pause.
    pub(crate) fn drive_cut(&self) -> DriveCut {
        let mut cut = DriveCut::default();
        for PlannedDrive { drive, made, .. } in &self.drives {
            match made {
                Some(SnapshotFile::Overlay(overlay)) => {
                    cut.overlays.push((drive.node.clone(), overlay.clone()));
                }
                Some(SnapshotFile::Clone(path)) => {
                    cut.clones.push((drive.top_file().to_owned(), path.clone()));
                }
                Some(SnapshotFile::Copy(copy)) => cut.copies.push(copy.clone()),
                Some(SnapshotFile::Storage(snapshot)) => cut.storage.push(snapshot.clone()),
                None => {}
            }
            if !drive.is_remote {
                cut.flushed.push(drive.top_file().to_owned());
            }
            cut.expected.push(drive.to_expected());
        }
        cut
    }

    /// Records that the pause begins.
    pub(crate) fn mark_pause_begun(&self) {
        self.has_pause_begun.store(true, Ordering::Relaxed);
    }

    /// Whether a disk is the topmost image of a drive.
    pub(crate) fn covers_disk(&self, disk: &DiskImage) -> bool {
        let which = |it: FileIdentity| (it.dev, it.inode);
        let Some(file) = disk.identity.map(which) else {
            return self.drives.iter().any(|it| it.drive.is_remote && it.drive.named == disk.file);
        };
        let tops =
            self.drives.iter().filter_map(|it| FileIdentity::from_path(it.drive.top_file()).ok());
        tops.map(which).any(|top| top == file)
    }

    /// The drives, as the image describes them after the pause.
    pub(crate) fn frozen_drives(&self) -> io::Result<Vec<FrozenDrive>> {
        self.drives.iter().map(PlannedDrive::to_frozen_drive).collect()
    }

    /// The files below those that were made for the image, which it needs unchanged as well.
    pub(crate) fn find_layers(&self) -> Result<Vec<DiskImage>, Failure> {
        let layers =
            self.drives.iter().map(PlannedDrive::find_layers).collect::<io::Result<Vec<_>>>();
        Ok(layers.while_doing("reading the files below the copies of disks")?.concat())
    }

    /// Ends the copies after a failure. The VM may be waiting for them.
    pub(crate) fn stop_copies(&self, vm: &mut QemuVm) {
        disk_copies::discard_copies(vm, &self.drive_snapshots());
    }

    /// Removes files that are not in use, after a failure that left no image.
    pub(crate) fn undo_save(&self, vm: &mut QemuVm, journal: &JournalFile) {
        let begun = self.has_pause_begun.load(Ordering::Relaxed);
        self.stop_copies(vm);
        let kept = self.drive_snapshots();
        let in_use = remove_unused(&kept, begun, &mut |overlay| vm.close_overlay(overlay));
        forget_layers(&journal.current_journal(), &kept);
        adopt_overlays(journal, in_use);
    }

    /// Facts about the drives, for the reply to a save.
    /// Whether the save makes snapshots of disks.
    pub(crate) fn makes_snapshots(&self) -> bool {
        !self.then_stop && !self.is_reference_only && !self.drives.is_empty()
    }

    pub(crate) fn drive_facts(&self) -> serde_json::Value {
        let fact = |planned: &PlannedDrive| {
            let now = match &planned.made {
                Some(SnapshotFile::Overlay(overlay)) => Some(overlay.path.as_path()),
                Some(SnapshotFile::Clone(_) | SnapshotFile::Copy(_) | SnapshotFile::Storage(_)) => {
                    Some(planned.drive.top_file())
                }
                None => None,
            };
            json!({
                "drive": planned.drive.name,
                "kept": planned.frozen_file(),
                "goes_on_with": now,
                "how": planned.name_method(),
            })
        };
        self.drives.iter().filter(|_| !self.is_reference_only).map(fact).collect()
    }
}

/// A chain has as many layers as it may have.
const DEEP: &str = "layers lie on each other already";

pub(crate) const DISK_DIR_HINT: &str =
    "--disk-dir DIR chooses the directory for the files of disks";

impl PlannedDrive {
    /// The file that keeps its state.
    fn frozen_file(&self) -> &Path {
        match &self.made {
            Some(
                SnapshotFile::Clone(path)
                | SnapshotFile::Copy(DriveCopy { path, .. })
                | SnapshotFile::Storage(StorageSnapshot { path, .. }),
            ) => path,
            _ => self.drive.top_file(),
        }
    }

    /// Whether the save makes a separate file for the image.
    fn has_own_file(&self) -> bool {
        !matches!(self.made, Some(SnapshotFile::Overlay(_)) | None)
    }

    /// The method of the snapshot, in a word.
    fn name_method(&self) -> &'static str {
        match &self.made {
            Some(SnapshotFile::Overlay(_)) => "overlay",
            Some(SnapshotFile::Clone(_)) => "clone",
            Some(SnapshotFile::Copy(DriveCopy { extent: CopyExtent::Changes(_), .. })) => {
                "copy of changes"
            }
            Some(SnapshotFile::Copy(_)) => "copy",
            Some(SnapshotFile::Storage(_)) => "storage snapshot",
            None => "file",
        }
    }

    fn find_layers(&self) -> io::Result<Vec<DiskImage>> {
        let copy = match &self.made {
            Some(SnapshotFile::Copy(copy)) => Some(copy),
            _ => None,
        };
        disk_copies::find_layers(copy.into_iter(), self.drive.bytes)
    }

    fn to_snapshot(&self) -> DriveSnapshot {
        let skip = usize::from(self.has_own_file());
        let chain = match &self.copy_file {
            Some(copy_file) => copy_file.base_chain(),
            None => self.drive.chain.iter().skip(skip).cloned().collect(),
        };
        DriveSnapshot { chain, made: self.made.clone() }
    }

    /// Syncs the file and describes it, so that after a power failure an image never lacks its
    /// disks.
    fn to_frozen_drive(&self) -> io::Result<FrozenDrive> {
        let file = self.frozen_file();
        if let Some(SnapshotFile::Copy(copy)) = &self.made {
            copy.trim_file()?;
        }
        if let Some(SnapshotFile::Storage(snapshot)) = &self.made {
            snapshot.finish(self.minimum_bytes()).map_err(io::Error::other)?;
        }
        sync_file(file)?;
        let identity = match self.before {
            Some(before) => before,
            None => FileIdentity::from_path(file).map_err(|error| {
                io::Error::new(error.kind(), format!("{}: {error}", file.display()))
            })?,
        };
        Ok(FrozenDrive {
            named: self.named.clone(),
            file: file.to_owned(),
            format: match &self.made {
                Some(SnapshotFile::Copy(_)) => "qcow2".to_owned(),
                _ => self.drive.format.clone(),
            },
            bytes: self.drive.bytes,
            identity,
            is_clone: self.has_own_file(),
            is_storage_snapshot: matches!(self.made, Some(SnapshotFile::Storage(_))),
        })
    }

    /// The bytes that a file with the contents of the drive has at least.
    fn minimum_bytes(&self) -> u64 {
        if self.drive.format == "raw" { self.drive.bytes } else { 1 }
    }
}

fn sync_file(file: &Path) -> io::Result<()> {
    let context = |error: io::Error| {
        io::Error::new(error.kind(), format!("syncing {}: {error}", file.display()))
    };
    let dir = file.parent().unwrap_or(Path::new("/"));
    let sync = |path: &Path| std::fs::File::open(path)?.sync_all();
    sync(file).and_then(|()| sync(dir)).map_err(context)
}

/// Refuses a disk that is no file in an image that only refers to disks: its contents can't be
/// identified later.
fn check_reference(drive: &Drive) -> Result<(), String> {
    let disk = drive.top_file().display();
    match (drive.is_device, drive.is_remote) {
        (true, _) => Err(format!("{disk} is a device, not a file")),
        (_, true) => Err(format!("{disk} is on the network, not a file")),
        (false, false) => Ok(()),
    }
}

/// The file of the command line that a drive stands for; or the reason why it can't have a
/// snapshot.
fn check_drive(
    meta: &ImageMeta,
    drive: Drive,
    adds_overlay: bool,
) -> Result<(String, Drive), String> {
    if let Some(obstacle) = &drive.obstacle {
        return Err(format!("{}: {obstacle}", drive.name));
    }
    if adds_overlay && drive.chain.len() >= CHAIN_MAX {
        let depth = drive.chain.len();
        let needed = disk_layers::describe_needs(&drive.chain);
        return Err(format!("{}: {depth} {DEEP}{needed}", drive.name));
    }
    match named_file(meta, &drive) {
        Some(named) => Ok((named, drive)),
        None => Err(format!("{}: no option of the command line names its file", drive.name)),
    }
}

/// The topmost file of the drive's chain that the command line names, or that replaces one that it
/// names.
pub(crate) fn named_file(meta: &ImageMeta, drive: &Drive) -> Option<String> {
    if drive.is_remote {
        return named_network_disk(meta, drive);
    }
    let files = disk_files(meta);
    drive.chain.iter().find_map(|layer| {
        let kept = meta.drives.iter().find(|it| it.file == *layer);
        let file = || files.iter().find(|file| meta.qemu.directory.join(file) == *layer).cloned();
        kept.map(|it| it.named.clone()).or_else(file)
    })
}

/// The disk on the network of the command line that a drive is: the one with its id or its node, or
/// else the only one without a name.
fn named_network_disk(meta: &ImageMeta, drive: &Drive) -> Option<String> {
    let plan = command_line::plan_command(&meta.qemu.user_args).ok()?;
    let disks = plan.network_disks();
    let is_this = |disk: &&NetworkDisk| disk.ids.iter().any(|id| drive.has_id(id));
    let mut nameless = disks.iter().filter(|disk| disk.ids.is_empty());
    let only_nameless = nameless.next().filter(|_| nameless.next().is_none());
    disks.iter().find(is_this).or(only_nameless).map(|disk| disk.named.clone())
}

fn disk_files(meta: &ImageMeta) -> Vec<String> {
    command_line::plan_command(&meta.qemu.user_args)
        .map(|plan| plan.disk_files())
        .unwrap_or_default()
}

/// Whether a drive is what the command line makes it, which a restore then makes again, whatever it
/// is. That is the drive's state at the start of the VM, unless the start was a restore that
/// replaced named files by others.
fn is_as_started(meta: &ImageMeta, drive: &Drive) -> bool {
    let top = drive.top_file();
    // With -snapshot, the top is a file without a name.
    let is_nameless = top.is_absolute() && !top.exists();
    let same = |file: &str| *file == drive.named || meta.qemu.directory.join(file) == top;
    // If the top is no local file, it may be named in ways that this code does not parse.
    let is_remote = !top.is_absolute() && meta.drives.is_empty();
    let at_first = || is_remote && meta.disks.iter().any(|disk| same(&disk.file));
    !is_nameless && (disk_files(meta).iter().any(|file| same(file)) || at_first())
}

fn refuse_drives(obstacles: Vec<String>, goes_on: bool) -> Failure {
    let is_deep = obstacles.iter().any(|obstacle| obstacle.contains(DEEP));
    let failure = Failure { kind: FailureKind::Refused, chain: obstacles, hint: None };
    match goes_on {
        true => failure.while_doing("the VM's disks can't have snapshots").with_hint(format!(
            "{}suspend the VM, or save it without its disks: with --disks reference a restore works only while they are unchanged",
            if is_deep {
                "remove images that are not wanted (`firn image rm`, also those whose files are gone), so that their layers are merged; or "
            } else {
                ""
            }
        )),
        false => failure
            .while_doing("a restore would give the VM other disks than it has")
            .with_hint("start the VM with what it uses now on its command line"),
    }
}

/// A name for a file that belongs to `vm` and stands for `named`: its random part, and its path, in
/// `dir` or else beside `file`.
pub(crate) fn new_file(
    dir: Option<&Path>,
    file: &Path,
    named: &str,
    vm: &str,
) -> (String, PathBuf) {
    let random = RandomState::new().build_hasher().finish();
    let suffix = format!("{:012x}", random >> 16);
    let stem = || Path::new(named).file_name().or(file.file_name()).unwrap_or_default();
    let mut name = NetworkDisk::file_stem(named).map_or_else(|| stem().to_owned(), OsString::from);
    name.push(format!(".{vm}-{suffix}"));
    let dir = dir.or(file.parent()).unwrap_or(Path::new("/"));
    (suffix, dir.join(name))
}

/// Removes the files that a save has made, that are not in use and that no image builds on. Returns
/// the overlays that are in use, or may be.
fn remove_unused<E: std::fmt::Display>(
    drives: &[DriveSnapshot],
    begun: bool,
    close: &mut dyn FnMut(&Overlay) -> Result<bool, E>,
) -> Vec<PathBuf> {
    let mut in_use = Vec::new();
    for made in drives.iter().filter_map(|kept| kept.made.as_ref()) {
        match made {
            SnapshotFile::Clone(path) | SnapshotFile::Copy(DriveCopy { path, .. }) => {
                remove_file(path)
            }
            SnapshotFile::Storage(snapshot) => {
                if begun {
                    remove_storage(snapshot);
                }
            }
            SnapshotFile::Overlay(overlay) => {
                let path = &overlay.path;
                let closed = close(overlay).unwrap_or_else(|error| {
                    tracing::warn!("can't find out whether {} is in use: {error}", path.display());
                    !begun
                });
                match closed {
                    true => remove_file(path),
                    false => in_use.push(path.clone()),
                }
            }
        }
    }
    in_use
}

/// Hands the files of a complete image over to it, and the overlays on top of them to the VM.
pub(crate) fn hand_over_files(journal: &mut Journal) {
    let VmPhase::Saving { drives, .. } = &journal.phase else { return };
    for DriveSnapshot { chain, made } in drives {
        let made = match made {
            Some(SnapshotFile::Overlay(overlay)) => Some(&overlay.path),
            _ => None,
        };
        journal.overlays.retain(|path| !chain.contains(path) && Some(path) != made);
        journal.overlays.extend(made.cloned());
    }
    disk_copies::record_copies(&mut journal.copies, drives);
}

/// Removes the files of a save that failed and whose thread or supervisor is dead. `vm` is `None`
/// if the hypervisor is dead, too.
pub(crate) fn abandon_snapshots(journal: &JournalFile, vm: Option<&mut QemuVm>) {
    let read = journal.current_journal();
    let VmPhase::Saving { drives, .. } = &read.phase else { return };
    let mut vm = vm;
    if let Some(vm) = &mut vm {
        disk_copies::discard_copies(vm, drives);
    }
    let in_use = match vm {
        Some(vm) => remove_unused(drives, true, &mut |overlay| vm.close_overlay(overlay)),
        None => remove_unused(drives, true, &mut |_| Ok::<_, io::Error>(false)),
    };
    forget_layers(&read, drives);
    adopt_overlays(journal, in_use);
}

/// Removes the layer records of a save that failed: its image needs no layers.
fn forget_layers(journal: &Journal, drives: &[DriveSnapshot]) {
    if let VmPhase::Saving { image, .. } = &journal.phase {
        disk_layers::forget_save(image, drives);
    }
}

/// Records overlays as files that belong to the VM.
fn adopt_overlays(journal: &JournalFile, overlays: Vec<PathBuf>) {
    if overlays.is_empty() {
        return;
    }
    // If this fails, the worst outcome is a file that is never removed.
    if let Err(error) = journal.update(|journal| add_overlays(journal, overlays)) {
        tracing::error!("{}", Failure::from_error(FailureKind::Other, &error));
    }
}

fn add_overlays(journal: &mut Journal, overlays: Vec<PathBuf>) {
    let is_new = |path: &PathBuf| !journal.overlays.contains(path);
    let new: Vec<_> = overlays.into_iter().filter(is_new).collect();
    journal.overlays.extend(new);
}

/// Finishes a save that the journal never recorded as ended, before another operation begins, so
/// that none of its files is forgotten.
pub(crate) fn finish_unrecorded_save(journal: &mut Journal) {
    let VmPhase::Saving { drives, .. } = &journal.phase else { return };
    if journal.is_image_complete() {
        return hand_over_files(journal);
    }
    for made in drives.iter().filter_map(|kept| kept.made.as_ref()) {
        match made {
            SnapshotFile::Clone(path) | SnapshotFile::Copy(DriveCopy { path, .. }) => {
                remove_file(path);
            }
            SnapshotFile::Storage(snapshot) => remove_storage(snapshot),
            SnapshotFile::Overlay(_) => {}
        }
    }
    forget_layers(journal, drives);
    let all = overlays_left(journal);
    add_overlays(journal, all);
}

/// Whether a save has made files that may have to be removed, and whether the hypervisor knows of
/// one.
pub(crate) fn has_snapshot_files(journal: &Journal) -> (bool, bool) {
    let VmPhase::Saving { drives, .. } = &journal.phase else { return (false, false) };
    let is_known = |kept: &DriveSnapshot| {
        matches!(kept.made, Some(SnapshotFile::Overlay(_) | SnapshotFile::Copy(_)))
    };
    (drives.iter().any(|kept| kept.made.is_some()), drives.iter().any(is_known))
}

/// Removes the overlays that belong to the VM.
pub(crate) fn discard_overlays(journal: &Journal) {
    for path in &journal.overlays {
        match disk_layers::must_cover_partial_merge(path) {
            true => tracing::warn!("{} is kept: a part of it is merged already", path.display()),
            false => remove_file(path),
        }
    }
}

/// The files that a VM writes to and would leave behind.
pub(crate) fn overlays_left(journal: &Journal) -> Vec<PathBuf> {
    let mut all = journal.overlays.clone();
    if let VmPhase::Saving { drives, .. } = &journal.phase {
        let made = drives.iter().filter_map(|kept| kept.made.as_ref());
        all.extend(made.filter_map(|made| match made {
            SnapshotFile::Overlay(overlay) => Some(overlay.path.clone()),
            SnapshotFile::Clone(_) | SnapshotFile::Copy(_) | SnapshotFile::Storage(_) => None,
        }));
    }
    all
}

fn remove_storage(snapshot: &StorageSnapshot) {
    if let Err(error) = snapshot.remove() {
        tracing::error!("the snapshot {} may be left: {error}", snapshot.name);
    }
}

fn remove_file(path: &Path) {
    match std::fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            tracing::warn!("can't remove {}: {error}", path.display());
        }
        _ => {}
    }
}

/// The files that a restored VM gets for its drives.
#[derive(Default)]
pub(crate) struct RestoredDisks {
    files: Vec<DriveFile>,
    made: Vec<PathBuf>,
}

impl RestoredDisks {
    /// Makes an overlay for each drive, or uses the image's own files.
    pub(crate) fn create_for_restore(
        (meta, program): (&ImageMeta, &Path),
        vm_name: &str,
        (disks, dir): (RestoreDisks, Option<&Path>),
        journal: &JournalFile,
        held: LockedLayers,
    ) -> Result<Self, Failure> {
        let mut own = Self::default();
        for drive in &meta.drives {
            let (file, format) = match disks {
                RestoreDisks::InPlace => (drive.file.clone(), drive.format.clone()),
                RestoreDisks::Own => {
                    let (_, path) = new_file(dir, &drive.file, &drive.named, vm_name);
                    own.made.push(path.clone());
                    (path, "qcow2".to_owned())
                }
            };
            let (named, file) = (drive.named.clone(), file.to_string_lossy().into_owned());
            own.files.push(DriveFile { named, file, format });
        }
        let made = own.made.clone();
        journal.update(|journal| journal.overlays = made).while_doing("writing the journal")?;
        own.create_overlays(meta, program)?;
        let layers = meta.drives.iter().zip(&own.made);
        let layers: Vec<_> = layers.map(|(drive, made)| (&**made, &*drive.file)).collect();
        held.record_restore(vm_name, &layers)?;
        firn_fault::pass_point("restore.drives");
        Ok(own)
    }

    /// Makes the overlays, by the tool beside this program, which has been checked: the image may
    /// name any.
    fn create_overlays(&self, meta: &ImageMeta, program: &Path) -> Result<(), Failure> {
        let program = &*program.to_string_lossy();
        for (drive, path) in meta.drives.iter().zip(&self.made) {
            let (file, format, bytes) = (&*drive.file, &*drive.format, drive.bytes);
            create_overlay(program, &OverlayBase { file, named: "", format, bytes }, path)
                .while_doing("making an overlay for the VM")
                .map_err(|failure| {
                    failure
                        .with_hint("--disk-dir chooses its directory; --disks in-place needs none")
                })?;
        }
        Ok(())
    }

    /// The files that replace those of the command line.
    pub(crate) fn files(&self) -> &[DriveFile] {
        &self.files
    }

    /// Keeps the files, because the VM runs.
    pub(crate) fn keep_files(mut self) {
        self.made.clear();
    }
}

impl Drop for RestoredDisks {
    fn drop(&mut self) {
        self.made.iter().for_each(|path| remove_file(path));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::records::name::VmName;

    fn overlay(dir: &Path, name: &str, chain: &[&str]) -> DriveSnapshot {
        let path = dir.join(name);
        std::fs::write(&path, "").unwrap();
        DriveSnapshot {
            chain: chain.iter().map(PathBuf::from).collect(),
            made: Some(SnapshotFile::Overlay(Overlay { node: name.into(), path })),
        }
    }

    #[test]
    fn unused_files_are_removed() {
        let dir = tempfile::tempdir().unwrap();
        let all = ["used", "idle", "lost"].map(|name| overlay(dir.path(), name, &["/a"]));
        let mut close = |overlay: &Overlay| match &*overlay.node {
            "used" => Ok(false),
            "idle" => Ok(true),
            _ => Err("QEMU is gone"),
        };
        let left = remove_unused(&all, true, &mut close);
        assert_eq!(left, [dir.path().join("used"), dir.path().join("lost")]);
        assert!(!dir.path().join("idle").exists() && dir.path().join("lost").exists());
        let left = remove_unused(&all, false, &mut close);
        assert_eq!(left, [dir.path().join("used")], "before the pause nothing can be in use");
        assert!(!dir.path().join("lost").exists());
    }

    /// Overlays of failed saves, `/o0` and `/o1`, are below the file that the image refers to.
    #[test]
    fn the_image_refers_to_its_whole_chain_of_disk_files() {
        let dir = tempfile::tempdir().unwrap();
        let saving = |drives: Vec<DriveSnapshot>| {
            let phase = VmPhase::Saving {
                image: "/i".into(),
                replaces: None,
                paused_by_us: false,
                then_stop: false,
                upload: None,
                drives,
            };
            let overlays = ["/o0", "/o1", "/other"].map(PathBuf::from).into();
            Journal { phase, overlays, ..Journal::new(VmName::new("web").unwrap(), None) }
        };
        let mut journal = saving(vec![overlay(dir.path(), "a", &["/o1", "/o0", "/base"])]);
        assert_eq!(overlays_left(&journal).len(), 4);
        hand_over_files(&mut journal);
        assert_eq!(journal.overlays, [PathBuf::from("/other"), dir.path().join("a")]);
        let clone = DriveSnapshot {
            chain: vec!["/o0".into()],
            made: Some(SnapshotFile::Clone("/c".into())),
        };
        let mut journal = saving(vec![clone]);
        hand_over_files(&mut journal);
        assert_eq!(journal.overlays, ["/o1", "/other"].map(PathBuf::from), "/o1 is the top still");
    }

    #[test]
    fn files_are_named_after_the_disk_and_the_vm() {
        let (suffix, path) = new_file(None, Path::new("/a/web.qcow2.web-1"), "web.qcow2", "web");
        assert_eq!(path, PathBuf::from(format!("/a/web.qcow2.web-{suffix}")));
        assert_eq!(suffix.len(), 12);
        let (_, other) = new_file(Some(Path::new("/b")), Path::new("/a/x"), "x", "web");
        assert_eq!(other.parent(), Some(Path::new("/b")));
        assert_ne!(path.file_name(), other.file_name());
        let rbd = Path::new("rbd:vms/web");
        let (suffix, path) = new_file(Some(Path::new("/b")), rbd, "network:disk:0/x", "web");
        assert_eq!(path, PathBuf::from(format!("/b/disk-0-x.web-{suffix}")));
    }
}
