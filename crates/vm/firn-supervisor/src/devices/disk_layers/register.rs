//! Recording of layers and images by saves and copies.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use firn_image::Image;
use firn_vmm::read_backing_file;

use super::record::{DiskLayer, ImageUse, LayerKind};
use super::record_files::{record_dir, record_key};
use super::store::RecordFolder;
use crate::records::device_records::{DriveSnapshot, SnapshotFile};
use crate::records::failure::Failure;
use crate::records::meta::ImageMeta;

/// Maximum number of files in a chain, so that the walk of a chain with a loop ends.
const FILES_MAX: usize = 256;

/// New entries, by the directory whose record receives them.
#[derive(Default)]
struct NewEntries {
    by_dir: BTreeMap<PathBuf, (Vec<DiskLayer>, Vec<ImageUse>)>,
}

/// Records the files that a save to `image` makes and freezes. The files exist; the VM does not use
/// them yet.
pub(crate) fn record_save(vm: &str, image: &Path, drives: &[DriveSnapshot]) -> Result<(), Failure> {
    let mut notes = NewEntries::default();
    for kept in drives {
        notes.add_kept(vm, image, kept);
    }
    let replaced = ReplacedImage::open_at(image);
    let dirs = notes.by_dir.keys().cloned();
    let dirs: BTreeSet<PathBuf> =
        dirs.chain(replaced.iter().flat_map(ReplacedImage::record_dirs)).collect();
    for dir in dirs {
        let (layers, images) = notes.by_dir.remove(&dir).unwrap_or_default();
        let mut folder = RecordFolder::lock(&dir)?;
        replaced.iter().for_each(|it| it.mark_replaced(&mut folder.record.images));
        folder.record.layers.extend(layers);
        folder.record.images.extend(images);
        folder.store_record()?;
    }
    Ok(())
}

/// Records that an image is about to be written once more, under another name, which will need the
/// same files.
pub fn record_copy(image: &Path, copy: &Path) -> Result<(), Failure> {
    let (from, to) = (record_key(image), record_key(copy));
    let source = ReplacedImage::open_at(image).filter(|_| from != to);
    let replaced = ReplacedImage::open_at(copy);
    let dirs = source.iter().chain(&replaced).flat_map(ReplacedImage::record_dirs);
    for dir in dirs.filter(|_| source.is_some()).collect::<BTreeSet<PathBuf>>() {
        let Some(mut folder) = RecordFolder::lock_existing(&dir)? else { continue };
        replaced.iter().for_each(|it| it.mark_replaced(&mut folder.record.images));
        let uses = folder.record.images.iter().filter(|it| it.image == from);
        let uses = uses.filter(|it| it.replaced.is_none()).cloned();
        let copies: Vec<_> = uses.map(|it| ImageUse { image: to.clone(), ..it }).collect();
        folder.record.images.extend(copies);
        folder.store_record()?;
    }
    Ok(())
}

/// Reverts the entries of a failed save: its image needs no files, and the image before it needs
/// its files again. A failure here is only logged; the worst result is a layer that remains.
pub(crate) fn forget_save(image: &Path, drives: &[DriveSnapshot]) {
    let files = drives.iter().filter_map(DriveSnapshot::contents_file).map(|it| record_key(&it));
    let replaced = ReplacedImage::open_at(image);
    let old = replaced.iter().flat_map(ReplacedImage::record_dirs);
    let dirs: BTreeSet<PathBuf> = files.map(|it| record_dir(&it).to_owned()).chain(old).collect();
    for dir in dirs {
        if let Err(failure) = forget_in(&dir, image, drives) {
            tracing::warn!("{failure}");
        }
    }
}

fn forget_in(dir: &Path, image: &Path, drives: &[DriveSnapshot]) -> Result<(), Failure> {
    let Some(mut folder) = RecordFolder::lock_existing(dir)? else { return Ok(()) };
    let files: Vec<PathBuf> =
        drives.iter().filter_map(DriveSnapshot::contents_file).map(|it| record_key(&it)).collect();
    let image = record_key(image);
    let of_save =
        |it: &ImageUse| it.image == image && it.replaced.is_none() && files.contains(&it.file);
    folder.record.images.retain(|it| !of_save(it));
    let marked = folder.record.images.iter_mut().filter(|it| it.image == image);
    marked.for_each(|it| it.replaced = None);
    folder.store_record()
}

impl DriveSnapshot {
    /// The file that has the contents of the drive at the cut.
    fn contents_file(&self) -> Option<PathBuf> {
        match &self.made {
            Some(SnapshotFile::Clone(path)) => Some(path.clone()),
            Some(SnapshotFile::Copy(copy)) => Some(copy.path.clone()),
            // Not a file of Firn's: the user removes it.
            Some(SnapshotFile::Storage(_)) => None,
            _ => self.chain.first().cloned(),
        }
    }
}

impl NewEntries {
    fn add_kept(&mut self, vm: &str, image: &Path, kept: &DriveSnapshot) {
        let below = kept.chain.first().map(PathBuf::as_path);
        match &kept.made {
            Some(SnapshotFile::Overlay(overlay)) => {
                self.add_layer(vm, &overlay.path, below, LayerKind::Overlay);
            }
            Some(SnapshotFile::Clone(path)) => self.add_layer(vm, path, below, LayerKind::Clone),
            Some(SnapshotFile::Copy(copy)) => {
                let below = backing_files(&copy.path);
                let below = below.first().map(PathBuf::as_path);
                self.add_layer(vm, &copy.path, below, LayerKind::Clone);
            }
            Some(SnapshotFile::Storage(_)) | None => {}
        }
        let Some(file) = kept.contents_file().map(|file| record_key(&file)) else { return };
        let mut chain: Vec<PathBuf> = match &kept.made {
            Some(SnapshotFile::Copy(copy)) => backing_files(&copy.path),
            _ => kept.chain.iter().map(|file| record_key(file)).collect(),
        };
        if chain.first() != Some(&file) {
            chain.insert(0, file.clone());
        }
        let mut dirs: Vec<PathBuf> = chain.iter().map(|file| record_dir(file).to_owned()).collect();
        dirs.dedup();
        for dir in dirs {
            let (image, file, chain) = (record_key(image), file.clone(), chain.clone());
            let entry = ImageUse { image, file, chain, replaced: None };
            let images = &mut self.by_dir.entry(dir).or_default().1;
            if !images.contains(&entry) {
                images.push(entry);
            }
        }
    }

    /// Adds a layer to the record of its backing file's directory, where readers look it up.
    fn add_layer(&mut self, vm: &str, file: &Path, below: Option<&Path>, kind: LayerKind) {
        let (file, below) = (record_key(file), below.map(record_key));
        let dir = record_dir(below.as_ref().unwrap_or(&file)).to_owned();
        let (vm, made) = (vm.to_owned(), now_ms());
        let layer = DiskLayer { file, below, vm, made, kind, abandoned: false, restored: false };
        self.by_dir.entry(dir).or_default().0.push(layer);
    }
}

/// The backing files of a copy: it may contain only the changes since another copy.
fn backing_files(copy: &Path) -> Vec<PathBuf> {
    let below =
        |file: &Path| read_backing_file(file).ok().flatten().map(|below| record_key(&below));
    std::iter::successors(below(copy), |file| below(file)).take(FILES_MAX).collect()
}

/// The image whose name another image is about to take.
struct ReplacedImage {
    image: PathBuf,
    identity: String,
    files: Vec<PathBuf>,
}

impl ReplacedImage {
    fn open_at(path: &Path) -> Option<Self> {
        let image = path.exists().then(|| Image::open(path).ok()).flatten()?;
        let meta: ImageMeta = serde_json::from_value(image.meta().clone()).ok()?;
        let files = meta.drives.iter().map(|drive| record_key(&drive.file)).collect();
        Some(Self { image: record_key(path), identity: image.identity(), files })
    }

    fn record_dirs(&self) -> Vec<PathBuf> {
        self.files
            .iter()
            .map(|file| record_dir(file).to_owned())
            .filter(|dir| dir.exists())
            .collect()
    }

    /// Marks only entries of this image: another one of the same name may have been moved away.
    fn mark_replaced(&self, images: &mut [ImageUse]) {
        let is_about = |it: &ImageUse| it.chain.first().is_some_and(|it| self.files.contains(it));
        let same = |it: &&mut ImageUse| it.image == self.image && it.replaced.is_none();
        for entry in images.iter_mut().filter(same).filter(|it| is_about(it)) {
            entry.replaced = Some(self.identity.clone());
        }
    }
}

/// The time, in milliseconds since 1970.
pub(super) fn now_ms() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    since.as_millis().try_into().unwrap_or(u64::MAX)
}
