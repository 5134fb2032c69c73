//! Queries on a record.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use firn_image::list_chain;
use firn_vmm::{FileIdentity, allocated_bytes};

use super::record::{ChangedContents, DiskLayer, ImageUse, LayerKind, LayerRecord};
use super::record_files::{record_dir, record_key};
use super::store::read_record;

impl LayerRecord {
    /// The existing layers directly on a file.
    pub(super) fn layers_over<'a>(&'a self, file: &'a Path) -> impl Iterator<Item = &'a DiskLayer> {
        let is_on = move |layer: &&DiskLayer| layer.below.as_deref() == Some(file);
        self.layers.iter().filter(is_on).filter(|layer| layer.file.exists())
    }

    /// The layer with this file, if Firn made it.
    pub(super) fn find_layer(&self, file: &Path) -> Option<&DiskLayer> {
        self.layers.iter().find(|layer| layer.file == file)
    }

    /// The images that need a file as the topmost of a disk.
    pub(super) fn images_of<'a>(&'a self, file: &'a Path) -> impl Iterator<Item = &'a Path> {
        let uses = self.images.iter().filter(move |image| image.file == file);
        uses.filter(|image| !image.is_gone()).map(|image| image.image.as_path())
    }

    /// Whether a file is a copy of changes, on another copy, and the topmost file of no image.
    fn is_intermediate(&self, file: &Path) -> bool {
        let layer = self.find_layer(file).filter(|layer| layer.kind == LayerKind::Clone);
        let below = layer.and_then(|layer| layer.below.as_ref());
        below.is_some_and(|below| self.find_layer(below).is_some())
            && self.images_of(file).next().is_none()
    }

    /// The current contents of `file` as an image knows it.
    pub(super) fn find_changed(&self, file: &Path, then: FileIdentity) -> Option<&ChangedContents> {
        self.changed
            .iter()
            .find(|changed| changed.file == file && is_same_content(changed.then, then))
    }

    /// Removes entries that are obsolete. Files that only removed images needed become unused.
    pub(super) fn prune_obsolete(&mut self) {
        self.images.retain(|image| !image.is_gone());
        self.unused.retain(|file| file.exists());
        self.drop_clones();
        let images = &self.images;
        let is_needed = |file: &Path| images.iter().any(|image| image.file == file);
        self.layers.retain(|layer| layer.file.exists() || is_needed(&layer.file));
        let is_known = |file: &PathBuf| images.iter().any(|image| image.chain.contains(file));
        self.changed.retain(|changed| is_known(&changed.file));
        self.partial.retain(|partial| partial.base.exists());
    }

    /// Drops clones that no image needs and that are no backing file of a layer.
    fn drop_clones(&mut self) {
        let is_needed = |layer: &DiskLayer| {
            layer.kind != LayerKind::Clone
                || self.images.iter().any(|image| image.file == layer.file)
                // A later copy may have it as its backing file, and be listed in the record of
                // another directory.
                || self.images.iter().any(|image| image.chain.contains(&layer.file))
                || self.layers_over(&layer.file).next().is_some()
        };
        let unused: Vec<PathBuf> =
            self.layers.iter().filter(|it| !is_needed(it)).map(|it| it.file.clone()).collect();
        self.layers.retain(|layer| !unused.contains(&layer.file));
        self.unused.extend(unused.into_iter().filter(|file| file.exists()));
    }
}

impl ImageUse {
    /// Whether Firn replaced or removed the image. An image that is only missing may have been
    /// moved.
    fn is_gone(&self) -> bool {
        let Some(identity) = &self.replaced else { return false };
        match list_chain(&self.image).map(|chain| chain.into_iter().next()) {
            Ok(image) => image.is_none_or(|image| image.identity != *identity),
            // An image that can't be read now may be the same.
            Err(_) => !self.image.exists(),
        }
    }
}

/// The images that need files of a chain, in words.
pub(crate) fn describe_needs(chain: &[PathBuf]) -> String {
    let mut images = Vec::new();
    for file in chain.iter().map(|file| record_key(file)) {
        let Ok(Some(record)) = read_record(record_dir(&file)) else { continue };
        images.extend(record.images_of(&file).map(|image| image.display().to_string()));
    }
    match &images[..] {
        [] => String::new(),
        [image] => format!(", which {image} needs"),
        [first, others @ ..] => format!(", which {first} and {} more images need", others.len()),
    }
}

/// The bytes of those files of a chain of copies that hold only changes and are the copy of no
/// image: images need them only because a later copy builds on them.
pub(crate) fn intermediate_copy_bytes(chain: &[PathBuf]) -> u64 {
    let mut records = BTreeMap::new();
    let keys = chain.iter().map(|file| record_key(file));
    let intermediate = keys.filter(|file| {
        let dir = record_dir(file).to_owned();
        let read = |dir: &PathBuf| read_record(dir).ok().flatten().unwrap_or_default();
        let record = &*records.entry(dir).or_insert_with_key(read);
        record.is_intermediate(file)
    });
    intermediate.map(|file| allocated_bytes(&file).unwrap_or(0)).sum()
}

/// Whether a file has to stay over one that has a part of its contents, because a merge ended
/// early.
pub(crate) fn must_cover_partial_merge(file: &Path) -> bool {
    let file = record_key(file);
    let record = match read_record(record_dir(&file)) {
        Ok(Some(record)) => record,
        Ok(None) => return false,
        Err(_) => return true,
    };
    let merges = record.merges.iter().map(|merge| &merge.tops);
    let partial = record.partial.iter().map(|partial| &partial.tops);
    merges.chain(partial).any(|tops| tops.contains(&file))
}

/// Whether two identities have the same size and time of the last write, as a restore compares
/// them.
pub(super) fn is_same_content(one: FileIdentity, other: FileIdentity) -> bool {
    (one.size, one.mtime_ns) == (other.size, other.mtime_ns)
}

/// Whether Firn made a file, and the file has no layer over it.
pub(super) fn is_top(record: &LayerRecord, file: &Path) -> bool {
    record.find_layer(file).is_some() && record.layers_over(file).next().is_none()
}
