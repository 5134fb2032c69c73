//! The format of a directory's record.

use std::path::{Path, PathBuf};

use firn_vmm::FileIdentity;
use serde::{Deserialize, Serialize};

use crate::processes::identity::ProcessIdentity;

/// The version of the record.
pub(super) const VERSION: u32 = 1;

/// The record of a directory. In memory all paths are absolute. In the file, paths in the directory
/// are bare names, so that the directory may be moved.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct LayerRecord {
    /// `VERSION`.
    pub(super) version: u32,
    /// Files whose backing file is in this directory, and clones in it.
    #[serde(default)]
    pub(super) layers: Vec<DiskLayer>,
    /// Images that need files of this directory.
    #[serde(default)]
    pub(super) images: Vec<ImageUse>,
    /// Files whose contents an image knows under another name, or with another time of the last
    /// write.
    #[serde(default)]
    pub(super) changed: Vec<ChangedContents>,
    /// Merges that have begun.
    #[serde(default)]
    pub(super) merges: Vec<PendingMerge>,
    /// Files with a part of the contents of the files over them, because a merge ended early:
    /// usable only under those.
    #[serde(default)]
    pub(super) partial: Vec<PartialMerge>,
    /// Files that are not needed any more, and that will be removed.
    #[serde(default)]
    pub(super) unused: Vec<PathBuf>,
}

/// A file that was made on another one, or as a clone.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct DiskLayer {
    /// The file.
    pub(super) file: PathBuf,
    /// Its backing file; `None` for the clone of a file without one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) below: Option<PathBuf>,
    /// The VM that made it.
    pub(super) vm: String,
    /// When it was made, in milliseconds since 1970.
    pub(super) made: u64,
    /// Its purpose.
    pub(super) kind: LayerKind,
    /// Whether a user has returned to its backing file, so that it is no longer the newest state of
    /// the disk.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub(super) abandoned: bool,
    /// Whether a restore made it, on a file of its image.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub(super) restored: bool,
}

/// The purpose of a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(super) enum LayerKind {
    /// A VM writes to it, or did.
    Overlay,
    /// It was made for an image, and no VM has written to it.
    Clone,
}

/// An image that needs files.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct ImageUse {
    /// The image.
    pub(super) image: PathBuf,
    /// The file that has the contents of its disk now.
    pub(super) file: PathBuf,
    /// The files that its disk consisted of when it was made, the topmost first.
    pub(super) chain: Vec<PathBuf>,
    /// The identity of this image, if another one is about to take its name, or if it is about to
    /// be removed: unless the image of that name has this identity, nothing is needed for it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) replaced: Option<String>,
}

/// Contents that an image knows under another name or identity.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct ChangedContents {
    /// The file that images name.
    pub(super) file: PathBuf,
    /// The identity that they know.
    pub(super) then: FileIdentity,
    /// The file that has the contents now.
    pub(super) is_in: PathBuf,
    /// Its format.
    pub(super) format: String,
    /// Its identity now.
    pub(super) now: FileIdentity,
}

/// A merge that has begun: `tops` are merged into `base`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct PendingMerge {
    /// The hypervisor that performs it.
    pub(super) process: ProcessIdentity,
    /// The VM.
    pub(super) vm: String,
    /// The file that receives the contents.
    pub(super) base: PathBuf,
    /// Its format.
    pub(super) format: String,
    /// The files that are merged into it, the topmost first.
    pub(super) tops: Vec<PathBuf>,
    /// The file over the topmost; `None` if the VM writes to the topmost itself.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) above: Option<PathBuf>,
    /// The identities of these files before the merge, except of the file that the VM writes to.
    pub(super) before: Vec<(PathBuf, FileIdentity)>,
}

/// A file with a part of the contents of the files over it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct PartialMerge {
    /// The file.
    pub(super) base: PathBuf,
    /// The files that have to stay over it.
    pub(super) tops: Vec<PathBuf>,
}

impl Default for LayerRecord {
    fn default() -> Self {
        Self {
            version: VERSION,
            layers: Vec::new(),
            images: Vec::new(),
            changed: Vec::new(),
            merges: Vec::new(),
            partial: Vec::new(),
            unused: Vec::new(),
        }
    }
}

impl LayerRecord {
    /// Whether it has no entries.
    pub(super) fn is_empty(&self) -> bool {
        *self == Self::default()
    }

    /// Makes paths in `dir` relative to it.
    pub(super) fn with_relative_paths(mut self, dir: &Path) -> Self {
        self.for_each_path(&mut |path| {
            if path.parent() == Some(dir) {
                *path = path.file_name().unwrap_or_default().into();
            }
        });
        self
    }

    /// Makes all paths absolute.
    pub(super) fn with_absolute_paths(mut self, dir: &Path) -> Self {
        self.for_each_path(&mut |path| *path = dir.join(&path));
        self
    }

    fn for_each_path(&mut self, change: &mut dyn FnMut(&mut PathBuf)) {
        for layer in &mut self.layers {
            change(&mut layer.file);
            layer.below.iter_mut().for_each(&mut *change);
        }
        for image in &mut self.images {
            change(&mut image.image);
            change(&mut image.file);
            image.chain.iter_mut().for_each(&mut *change);
        }
        for changed in &mut self.changed {
            change(&mut changed.file);
            change(&mut changed.is_in);
        }
        for merge in &mut self.merges {
            change(&mut merge.base);
            merge.tops.iter_mut().chain(&mut merge.above).for_each(&mut *change);
            merge.before.iter_mut().for_each(|(path, _)| change(path));
        }
        for partial in &mut self.partial {
            change(&mut partial.base);
            partial.tops.iter_mut().for_each(&mut *change);
        }
        self.unused.iter_mut().for_each(&mut *change);
    }
}
