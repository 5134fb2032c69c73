//! The VM's disks in saves and restores: an image's disks stay as they were at its cut, and nobody writes to them again.
//!
//! ```text
//!   save      drive a.qcow2     ->  image: "a.qcow2 is as it was"        the VM writes to an overlay on a.qcow2
//!             (or, where files can share blocks)  "a.qcow2.web-5f is"    the VM goes on with a.qcow2
//!   suspend   drive a.qcow2     ->  image: "a.qcow2 is as it was"        the VM has ended
//!   restore   "a.qcow2 is ..."  ->  overlay on a.qcow2                   the VM writes to that, and is alone with it
//! ```
//!
//! Overlays that no image refers to are the VM's own: they are in the journal, and `firn stop --discard` removes them.
//! What a save is about to put on drives is in the journal before it is made, so that a successor finds out from the
//! hypervisor how far that came:
//!
//! | overlay | image | then |
//! |---|---|---|
//! | not in use | no | it is removed |
//! | in use | no | the VM goes on with it; what lies below is the VM's own still |
//! | in use | whole | the VM goes on with it; what lies below is the image's |

use std::hash::{BuildHasher, Hasher, RandomState};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};

use firn_vmm::command_line::{self, DriveFile};
use firn_vmm::{Drive, DriveCut, FileIdentity, Overlay, Vm, clone_file, create_overlay};
use serde::{Deserialize, Serialize};
use serde_json::json;

use crate::failure::{Context, Failure, FailureKind};
use crate::journal::{Journal, JournalFile, Phase};
use crate::meta::{FrozenDrive, Meta};
use crate::protocol::{RestoreDisks, SaveChoices, SaveDisks};

const KEEPING: &str = "keeping the VM's disks as they are";

/// A file that a save makes for a drive.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Pending {
    /// What the VM is to write to.
    Overlay {
        /// The drive's file until then.
        below: PathBuf,
        /// The overlay.
        overlay: Overlay,
    },
    /// What the image is to refer to.
    Clone(PathBuf),
}

/// What a save does about the VM's drives.
pub(crate) struct Cutting<'a> {
    /// The hypervisor program.
    program: &'a str,
    vm_name: &'a str,
    dir: Option<&'a Path>,
    drives: Vec<Planned>,
    /// Whether the pause has begun: until then no overlay is in use.
    begun: AtomicBool,
}

/// A drive that is to be kept.
struct Planned {
    /// The file of the command line that it stands for, as it is named there.
    named: String,
    drive: Drive,
    /// `None` if the VM ends: then nothing has to be done about it.
    pending: Option<Pending>,
}

impl<'a> Cutting<'a> {
    /// Looks at the drives, and leaves them as they are. Refuses drives that can't be kept, unless the VM is to end.
    pub(crate) fn plan(
        vm: &mut Vm,
        meta: &'a Meta,
        choices: &'a SaveChoices,
        then_stop: bool,
    ) -> Result<Self, Failure> {
        let program = meta.qemu.args.first().map_or("", String::as_str);
        let (vm_name, dir) = (meta.name.as_str(), choices.disk_dir.as_deref());
        let mut cutting =
            Self { program, vm_name, dir, drives: Vec::new(), begun: AtomicBool::default() };
        if choices.disks == Some(SaveDisks::Reference) {
            return Ok(cutting);
        }
        let mut obstacles = Vec::new();
        for drive in vm.drives().doing("looking at the VM's disks")? {
            match keepable(meta, drive) {
                Ok((named, drive)) => {
                    cutting.drives.push(Planned { named, drive, pending: None });
                }
                Err(_) if then_stop => {}
                Err(obstacle) => obstacles.push(obstacle),
            }
        }
        match obstacles.is_empty() {
            true => Ok(cutting),
            false => Err(refused(obstacles)),
        }
    }

    /// Makes the files, and has the hypervisor open them. On an error nothing is left of them.
    pub(crate) fn prepare(&mut self, vm: &mut Vm, journal: &JournalFile) -> Result<(), Failure> {
        let prepared = self.choose().and_then(|()| {
            self.write_down(journal)?;
            self.make(vm)
        });
        firn_fault::point("save.drives-ready");
        prepared.map_err(|failure| {
            self.undo(vm, journal);
            failure.while_doing(KEEPING).hint("--disk-dir DIR says where files for disks are made")
        })
    }

    /// Whether each file can be cloned, or else gets an overlay. A clone that is made to find out is made again in the
    /// pause.
    fn choose(&mut self) -> Result<(), Failure> {
        for Planned { named, drive, pending } in &mut self.drives {
            let (suffix, path) = new_file(self.dir, &drive.file, named, self.vm_name);
            *pending = Some(match clone_file(&drive.file, &path).doing("trying to clone it")? {
                true => Pending::Clone(path),
                false => Pending::Overlay {
                    below: drive.file.clone(),
                    overlay: Overlay { node: format!("firn-{suffix}"), path },
                },
            });
        }
        Ok(())
    }

    fn write_down(&self, journal: &JournalFile) -> Result<(), Failure> {
        let all: Vec<Pending> = self.pending().cloned().collect();
        let change = |journal: &mut Journal| {
            if let Phase::Saving { drives, .. } = &mut journal.phase {
                *drives = all;
            }
        };
        journal.update(change).doing("writing the journal")
    }

    fn make(&self, vm: &mut Vm) -> Result<(), Failure> {
        for Planned { drive, pending, .. } in &self.drives {
            let Some(Pending::Overlay { below, overlay }) = pending else { continue };
            create_overlay(self.program, below, &drive.format, drive.bytes, &overlay.path)
                .doing("making an overlay")?;
            vm.open_overlay(drive, overlay).doing("opening an overlay")?;
        }
        Ok(())
    }

    fn pending(&self) -> impl Iterator<Item = &Pending> {
        self.drives.iter().filter_map(|planned| planned.pending.as_ref())
    }

    /// What is to be done in the pause.
    pub(crate) fn cut(&self) -> DriveCut {
        let mut cut = DriveCut::default();
        for Planned { drive, pending, .. } in &self.drives {
            match pending {
                Some(Pending::Overlay { overlay, .. }) => {
                    cut.overlays.push((drive.node.clone(), overlay.clone()));
                }
                Some(Pending::Clone(path)) => cut.clones.push((drive.file.clone(), path.clone())),
                None => {}
            }
        }
        cut
    }

    /// The pause begins.
    pub(crate) fn begin(&self) {
        self.begun.store(true, Ordering::Relaxed);
    }

    /// Whether a file is the one that a drive is written to, or was.
    pub(crate) fn covers(&self, file: &str) -> bool {
        self.drives.iter().any(|it| it.drive.chain.first().is_some_and(|top| top == file))
    }

    /// What the image has to say of them, after the pause.
    pub(crate) fn frozen(&self) -> io::Result<Vec<FrozenDrive>> {
        self.drives.iter().map(Planned::frozen).collect()
    }

    /// After a failure: removes what is not in use.
    pub(crate) fn undo(&self, vm: &mut Vm, journal: &JournalFile) {
        let all: Vec<Pending> = self.pending().cloned().collect();
        let in_use = unused_removed(&all, self.begun.load(Ordering::Relaxed), &mut |overlay| {
            vm.close_overlay(overlay)
        });
        // What is in use is written down; else the worst is a file that nobody needs.
        let _ = journal.update(|journal| journal.overlays.extend(in_use));
    }

    /// What there is to say about them.
    pub(crate) fn facts(&self) -> serde_json::Value {
        let fact = |planned: &Planned| {
            let now = match &planned.pending {
                Some(Pending::Overlay { overlay, .. }) => Some(overlay.path.as_path()),
                Some(Pending::Clone(_)) => Some(planned.drive.file.as_path()),
                None => None,
            };
            json!({ "drive": planned.drive.name, "kept": planned.kept(), "goes_on_with": now })
        };
        self.drives.iter().map(fact).collect()
    }
}

impl Planned {
    /// The file that stays as it is.
    fn kept(&self) -> &Path {
        match &self.pending {
            Some(Pending::Clone(path)) => path,
            _ => &self.drive.file,
        }
    }

    /// Whoever finds the image after a power failure finds its disks too.
    fn frozen(&self) -> io::Result<FrozenDrive> {
        let file = self.kept();
        sync(file)?;
        Ok(FrozenDrive {
            named: self.named.clone(),
            file: file.to_owned(),
            format: self.drive.format.clone(),
            bytes: self.drive.bytes,
            identity: FileIdentity::of(file).map_err(|error| {
                io::Error::new(error.kind(), format!("{}: {error}", file.display()))
            })?,
            is_clone: matches!(self.pending, Some(Pending::Clone(_))),
        })
    }
}

fn sync(file: &Path) -> io::Result<()> {
    let context = |error: io::Error| {
        io::Error::new(error.kind(), format!("syncing {}: {error}", file.display()))
    };
    let dir = file.parent().unwrap_or(Path::new("/"));
    let sync = |path: &Path| std::fs::File::open(path)?.sync_all();
    sync(file).and_then(|()| sync(dir)).map_err(context)
}

/// The file of the command line that a drive stands for; or why it can't be kept.
fn keepable(meta: &Meta, drive: Drive) -> Result<(String, Drive), String> {
    if let Some(obstacle) = &drive.obstacle {
        return Err(format!("{}: {obstacle}", drive.name));
    }
    match named(meta, &drive) {
        Some(named) => Ok((named, drive)),
        None => Err(format!("{}: no option of the command line names its file", drive.name)),
    }
}

/// Some image of its chain is named by the command line, or took the place of one that is.
fn named(meta: &Meta, drive: &Drive) -> Option<String> {
    let directory = &meta.qemu.directory;
    let is_in_chain =
        |file: &Path| drive.chain.iter().any(|layer| directory.join(layer) == directory.join(file));
    let replaced = meta.drives.iter().find(|it| is_in_chain(&it.file));
    replaced.map(|it| it.named.clone()).or_else(|| {
        let files = command_line::plan(&meta.qemu.user_args).ok()?.disk_files();
        files.into_iter().find(|file| is_in_chain(Path::new(file)))
    })
}

fn refused(obstacles: Vec<String>) -> Failure {
    let failure = Failure { kind: FailureKind::Refused, chain: obstacles, hint: None };
    failure.while_doing("the VM's disks can't be kept as they are at the checkpoint").hint(
        "suspend the VM, or save it without its disks: with --disks reference a restore works only while they are unchanged",
    )
}

/// A name for a file that belongs to `vm` and stands for `named`: its random part, and the path, beside `file` or in `dir`.
fn new_file(dir: Option<&Path>, file: &Path, named: &str, vm: &str) -> (String, PathBuf) {
    let random = RandomState::new().build_hasher().finish();
    let suffix = format!("{:012x}", random >> 16);
    let stem = Path::new(named).file_name().or(file.file_name()).unwrap_or_default();
    let mut name = stem.to_owned();
    name.push(format!(".{vm}-{suffix}"));
    let dir = dir.or(file.parent()).unwrap_or(Path::new("/"));
    (suffix, dir.join(name))
}

/// Removes what is not in use of what a save has made and no image refers to. Gives the overlays that are in use, or may
/// be.
fn unused_removed<E: std::fmt::Display>(
    pending: &[Pending],
    begun: bool,
    close: &mut dyn FnMut(&Overlay) -> Result<bool, E>,
) -> Vec<PathBuf> {
    let mut in_use = Vec::new();
    for file in pending {
        match file {
            Pending::Clone(path) => remove(path),
            Pending::Overlay { overlay, .. } => {
                let closed = close(overlay).unwrap_or_else(|error| {
                    tracing::warn!(
                        "what becomes of {} is not known: {error}",
                        overlay.path.display()
                    );
                    !begun
                });
                match closed {
                    true => remove(&overlay.path),
                    false => in_use.push(overlay.path.clone()),
                }
            }
        }
    }
    in_use
}

/// The image is whole: what lay on top until then is its own, and what lies on top now is the VM's.
pub(crate) fn hand_over(journal: &mut Journal, pending: &[Pending]) {
    for file in pending {
        if let Pending::Overlay { below, overlay } = file {
            journal.overlays.retain(|path| path != below);
            journal.overlays.push(overlay.path.clone());
        }
    }
}

/// What a save has made that was under way when the journal was written.
pub(crate) fn pending(journal: &Journal) -> Vec<Pending> {
    match &journal.phase {
        Phase::Saving { drives, .. } => drives.clone(),
        _ => Vec::new(),
    }
}

/// A save came to nothing, and its supervisor is dead. `vm` is `None` if the hypervisor is, too.
pub(crate) fn give_up(journal: &JournalFile, vm: Option<&mut Vm>) {
    let pending = pending(&journal.read());
    if pending.is_empty() {
        return;
    }
    let in_use = match vm {
        Some(vm) => unused_removed(&pending, true, &mut |overlay| vm.close_overlay(overlay)),
        None => unused_removed(&pending, true, &mut |_| Ok::<_, io::Error>(false)),
    };
    let _ = journal.update(|journal| journal.overlays.extend(in_use));
}

/// Removes the overlays that are the VM's own.
pub(crate) fn discard(journal: &Journal) {
    journal.overlays.iter().for_each(|path| remove(path));
}

fn remove(path: &Path) {
    match std::fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            tracing::warn!("can't remove {}: {error}", path.display());
        }
        _ => {}
    }
}

/// The files that a restored VM gets for its drives.
#[derive(Default)]
pub(crate) struct Own {
    files: Vec<DriveFile>,
    made: Vec<PathBuf>,
}

impl Own {
    /// Makes an overlay for each drive, or takes the image's own files.
    pub(crate) fn make(
        meta: &Meta,
        vm_name: &str,
        (disks, dir): (RestoreDisks, Option<&Path>),
        journal: &JournalFile,
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
        journal.update(|journal| journal.overlays = made).doing("writing the journal")?;
        own.create(meta)?;
        firn_fault::point("restore.drives");
        Ok(own)
    }

    fn create(&self, meta: &Meta) -> Result<(), Failure> {
        let program = meta.qemu.args.first().map_or("", String::as_str);
        for (drive, path) in meta.drives.iter().zip(&self.made) {
            create_overlay(program, &drive.file, &drive.format, drive.bytes, path)
                .doing("making a disk of the VM's own")
                .map_err(|failure| {
                    failure.hint("--disk-dir says where, --disks in-place does without")
                })?;
        }
        Ok(())
    }

    /// Which file takes the place of which.
    pub(crate) fn files(&self) -> &[DriveFile] {
        &self.files
    }

    /// The VM runs: they stay.
    pub(crate) fn keep(mut self) {
        self.made.clear();
    }
}

impl Drop for Own {
    fn drop(&mut self) {
        self.made.iter().for_each(|path| remove(path));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::name::VmName;

    fn overlay(dir: &Path, name: &str) -> Pending {
        let path = dir.join(name);
        std::fs::write(&path, "").unwrap();
        Pending::Overlay {
            below: format!("/below-{name}").into(),
            overlay: Overlay { node: name.into(), path },
        }
    }

    #[test]
    fn what_is_not_in_use_is_removed() {
        let dir = tempfile::tempdir().unwrap();
        let all =
            [overlay(dir.path(), "used"), overlay(dir.path(), "idle"), overlay(dir.path(), "lost")];
        let mut close = |overlay: &Overlay| match &*overlay.node {
            "used" => Ok(false),
            "idle" => Ok(true),
            _ => Err("QEMU is gone"),
        };
        let left = unused_removed(&all, true, &mut close);
        assert_eq!(left, [dir.path().join("used"), dir.path().join("lost")]);
        assert!(!dir.path().join("idle").exists() && dir.path().join("lost").exists());
        let left = unused_removed(&all, false, &mut close);
        assert_eq!(left, [dir.path().join("used")], "before the pause nothing can be in use");
        assert!(!dir.path().join("lost").exists());
    }

    #[test]
    fn the_image_gets_what_lay_on_top() {
        let dir = tempfile::tempdir().unwrap();
        let mut journal = Journal::new(VmName::new("web").unwrap(), None);
        journal.overlays = vec!["/below-a".into(), "/other".into()];
        hand_over(&mut journal, &[overlay(dir.path(), "a"), Pending::Clone("/c".into())]);
        assert_eq!(journal.overlays, [PathBuf::from("/other"), dir.path().join("a")]);
    }

    #[test]
    fn files_are_named_after_the_disk_and_the_vm() {
        let (suffix, path) = new_file(None, Path::new("/a/web.qcow2.web-1"), "web.qcow2", "web");
        assert_eq!(path, PathBuf::from(format!("/a/web.qcow2.web-{suffix}")));
        assert_eq!(suffix.len(), 12);
        let (_, other) = new_file(Some(Path::new("/b")), Path::new("/a/x"), "x", "web");
        assert_eq!(other.parent(), Some(Path::new("/b")));
        assert_ne!(path.file_name(), other.file_name());
    }
}
