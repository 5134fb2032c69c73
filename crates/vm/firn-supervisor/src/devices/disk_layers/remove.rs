//! `firn image rm`: removes images, and the files that only they need. Refuses if an image is
//! needed.

use std::collections::BTreeSet;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use firn_image::{Image, list_chain};
use serde::Serialize;

use super::queries::is_top;
use super::record::{ImageUse, LayerKind};
use super::record_files::{record_dir, record_key};
use super::resolve::resolve_current_disks;
use super::store::{RecordFolder, read_record};
use crate::processes::runtime::RuntimeDir;
use crate::records::failure::{Failure, FailureContext, FailureKind};
use crate::records::journal::{Journal, VmPhase};
use crate::records::meta::ImageMeta;

/// The suffixes of files that belong to an image.
const SUFFIXES: [&str; 1] = [".learned"];

/// The result of the removal of an image.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct RemovedImage {
    /// The image.
    pub image: PathBuf,
    /// Files of disks that were removed with it.
    pub removed: Vec<PathBuf>,
    /// Files of disks that it needed, and that stay: the newest states of disks.
    pub kept: Vec<PathBuf>,
}

/// Removes images. Checks all of them before it removes one; with `with_disks`, it also removes
/// layers that are the newest state of a disk.
pub fn remove_images(
    base: &RuntimeDir,
    images: &[PathBuf],
    with_disks: bool,
) -> Result<Vec<RemovedImage>, Failure> {
    let going: BTreeSet<PathBuf> = images.iter().map(|image| record_key(image)).collect();
    let mut found = Vec::new();
    for image in &going {
        found.push(
            ImageRemoval::find_image(base, image)
                .and_then(|it| it.check_unneeded(base, &going).map(|()| it))?,
        );
    }
    // Incremental images first: the images that are left at any time have all their parents.
    found.sort_by_key(|it| std::cmp::Reverse(it.depth));
    found.iter().map(|it| it.remove_image(with_disks)).collect()
}

/// An image that will be removed.
struct ImageRemoval {
    image: PathBuf,
    /// `None` if the image file does not exist any more.
    identity: Option<String>,
    /// The current topmost files of its disks.
    files: Vec<PathBuf>,
    dirs: BTreeSet<PathBuf>,
    depth: usize,
}

impl ImageRemoval {
    fn find_image(base: &RuntimeDir, image: &Path) -> Result<Self, Failure> {
        if !image.exists() {
            return Self::find_missing(base, image);
        }
        let opening = || format!("opening {}", image.display());
        let opened = Image::open(image).map_err(|error| {
            crate::records::failure::image_failure(&error)
                .while_doing(opening())
                .with_hint(UNREADABLE)
        })?;
        let meta: ImageMeta = serde_json::from_value(opened.meta().clone())
            .while_doing_as(FailureKind::Damaged, "reading the VM's description in the image")?;
        let then = meta.drives.iter().map(|drive| record_key(&drive.file)).collect::<Vec<_>>();
        let now = resolve_current_disks(meta)?;
        let files: Vec<PathBuf> = now.drives.iter().map(|drive| record_key(&drive.file)).collect();
        let dirs = then.iter().chain(&files).map(|file| record_dir(file).to_owned()).collect();
        let (identity, depth) = (Some(opened.identity()), opened.chain_paths().len());
        Ok(Self { image: image.to_owned(), identity, files, dirs, depth })
    }

    /// Finds the uses of an image whose file was removed without Firn. They are in the records
    /// beside it, and beside the disks of VMs.
    fn find_missing(base: &RuntimeDir, image: &Path) -> Result<Self, Failure> {
        let journals = base.list_vms().while_doing("listing VMs")?;
        let journals =
            journals.iter().filter_map(|vm| Journal::load(&vm.journal_file()).ok().flatten());
        let beside = journals.flat_map(|journal| journal.overlays);
        let beside = beside.map(|file| record_dir(&record_key(&file)).to_owned());
        let dirs: BTreeSet<PathBuf> =
            beside.chain([record_dir(image).to_owned()]).filter(|dir| dir.is_dir()).collect();
        let mut files = Vec::new();
        for dir in &dirs {
            let uses = read_record(dir)?.unwrap_or_default().images;
            files.extend(uses.into_iter().filter(|it| it.image == image).map(|it| it.file));
        }
        if files.is_empty() {
            let text = format!("{} is not there", image.display());
            return Err(Failure::new(FailureKind::Usage, text));
        }
        Ok(Self { image: image.to_owned(), identity: None, files, dirs, depth: 0 })
    }

    /// Refuses to remove an image that is needed, and names the users.
    fn check_unneeded(&self, base: &RuntimeDir, going: &BTreeSet<PathBuf>) -> Result<(), Failure> {
        let mut needed_by = self.find_children(going);
        needed_by.extend(self.find_restores(base)?);
        for file in &self.files {
            let record = read_record(record_dir(file))?.unwrap_or_default();
            needed_by.extend(record.layers_over(file).filter(|layer| layer.restored).map(
                |layer| {
                    format!(
                        "{}, a disk of the VM {}, stands on its disk",
                        layer.file.display(),
                        layer.vm
                    )
                },
            ));
        }
        if needed_by.is_empty() {
            return Ok(());
        }
        let failure = Failure { kind: FailureKind::Refused, chain: needed_by, hint: None };
        let text = format!("{} is needed", self.image.display());
        Err(failure.while_doing(text).with_hint(
            "`firn image merge` makes an image whole; a VM that is not wanted ends with `firn stop --discard`",
        ))
    }

    /// Images in the same directory that are incremental to it.
    fn find_children(&self, going: &BTreeSet<PathBuf>) -> Vec<String> {
        let entries = fs::read_dir(record_dir(&self.image)).into_iter().flatten().flatten();
        let others = entries.map(|entry| entry.path()).filter(|path| path.is_file());
        let others = others.filter(|path| *path != self.image && !going.contains(path));
        let builds = |path: &PathBuf| {
            // Also if it is sealed, and its key is not here.
            let chain = list_chain(path).unwrap_or_default();
            chain.iter().skip(1).any(|it| record_key(&it.path) == self.image)
        };
        others.filter(builds).map(|path| format!("{} builds on it", path.display())).collect()
    }

    /// VMs that still read their memory from it.
    fn find_restores(&self, base: &RuntimeDir) -> Result<Vec<String>, Failure> {
        let mut found = Vec::new();
        for vm in base.list_vms().while_doing("listing VMs")? {
            let Ok(Some(journal)) = Journal::load(&vm.journal_file()) else { continue };
            let VmPhase::Restoring { image, .. } = &journal.phase else { continue };
            let chain = list_chain(image)
                .map(|chain| chain.iter().map(|it| record_key(&it.path)).collect::<Vec<_>>());
            let chain = chain.unwrap_or_else(|_| vec![record_key(image)]);
            if chain.contains(&self.image) {
                found.push(format!("the VM {} is being restored from it", vm.name()));
            }
        }
        Ok(found)
    }

    /// Removes the image. Once the record has its removal, the image needs no files when its own
    /// file is gone.
    fn remove_image(&self, with_disks: bool) -> Result<RemovedImage, Failure> {
        let removing = || format!("removing {}", self.image.display());
        for dir in &self.dirs {
            let Some(mut folder) = RecordFolder::lock_existing(dir)? else { continue };
            let mine = |it: &&mut ImageUse| it.image == self.image && it.replaced.is_none();
            let identity = self.identity.clone().unwrap_or_default();
            let uses = folder.record.images.iter_mut().filter(mine);
            uses.for_each(|it| it.replaced = Some(identity.clone()));
            if self.identity.is_some() {
                folder.store_record()?;
            }
            drop(folder);
        }
        firn_fault::pass_point("image-rm.recorded");
        for suffix in SUFFIXES {
            let mut path = self.image.as_os_str().to_owned();
            path.push(suffix);
            remove_if_exists(Path::new(&path)).while_doing(removing())?;
        }
        remove_if_exists(&self.image).while_doing(removing())?;
        firn_fault::pass_point("image-rm.removed");
        self.remove_unneeded_files(with_disks)
    }

    /// Removes the files that are not needed any more.
    fn remove_unneeded_files(&self, with_disks: bool) -> Result<RemovedImage, Failure> {
        let mut done = RemovedImage { image: self.image.clone(), ..RemovedImage::default() };
        for dir in &self.dirs {
            let Some(mut folder) = RecordFolder::lock_existing(dir)? else { continue };
            folder.settle_dead()?;
            if self.identity.is_none() {
                folder.record.images.retain(|it| it.image != self.image);
            }
            folder.record.prune_obsolete();
            for file in self.files.iter().filter(|file| record_dir(file) == dir) {
                folder.record.drop_layers(file, with_disks);
                if is_top(&folder.record, file) {
                    done.kept.push(file.clone());
                }
            }
            done.removed.extend(folder.record.unused.iter().cloned());
            folder.store_record()?;
        }
        Ok(done)
    }
}

const UNREADABLE: &str =
    "its list of disks can't be read; remove the file itself, and run `firn image rm` once more";

fn remove_if_exists(path: &Path) -> io::Result<()> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

impl super::record::LayerRecord {
    /// Drops layers from `file` down that no image needs and that have no layer over them; the
    /// newest state of a disk only with `with_newest`.
    fn drop_layers(&mut self, file: &Path, with_newest: bool) {
        let mut next = Some(file.to_owned());
        while let Some(file) = next.take() {
            let is_free = is_top(self, &file) && self.images_of(&file).next().is_none();
            if !is_free || (!with_newest && self.is_newest(&file)) {
                return;
            }
            next = self.find_layer(&file).and_then(|layer| layer.below.clone());
            self.layers.retain(|layer| layer.file != file);
            self.unused.push(file);
        }
    }

    /// Whether no layer of the same VM in this record was made later.
    fn is_newest(&self, file: &Path) -> bool {
        let Some(layer) = self.find_layer(file) else { return true };
        let later = |it: &&super::record::DiskLayer| {
            it.vm == layer.vm && it.made > layer.made && it.kind == LayerKind::Overlay
        };
        !layer.abandoned && !self.layers.iter().filter(|it| it.file.exists()).any(|it| later(&it))
    }
}
