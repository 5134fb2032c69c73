//! What a directory's record holds.

use std::path::{Path, PathBuf};

use firn_vmm::FileIdentity;
use serde::{Deserialize, Serialize};

use crate::identity::ProcessIdentity;

/// The version of the record.
pub(super) const VERSION: u32 = 1;

/// The record of a directory. In memory all paths are absolute; in the file those in the directory are bare names, so that a
/// directory may be moved.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct Record {
    /// `VERSION`.
    pub(super) version: u32,
    /// Files on which a file of this directory is the next one below, and clones in it.
    #[serde(default)]
    pub(super) layers: Vec<Layer>,
    /// Images that need files of this directory.
    #[serde(default)]
    pub(super) images: Vec<ImageUse>,
    /// Where contents are now that an image knows under another name, or with another time of the last write.
    #[serde(default)]
    pub(super) changed: Vec<Changed>,
    /// Merges that have begun.
    #[serde(default)]
    pub(super) merges: Vec<Merge>,
    /// Files that hold a part of what lies over them, because a merge ended early: only right below those.
    #[serde(default)]
    pub(super) partial: Vec<Partial>,
    /// Files that nothing needs any more, to be removed.
    #[serde(default)]
    pub(super) unused: Vec<PathBuf>,
}

/// A file that was made on another one, or as a clone.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Layer {
    /// The file.
    pub(super) file: PathBuf,
    /// The one that it is made on; `None` for the clone of a file with nothing below it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) below: Option<PathBuf>,
    /// The VM that made it.
    pub(super) vm: String,
    /// When, in milliseconds since 1970.
    pub(super) made: u64,
    /// What it is for.
    pub(super) kind: LayerKind,
    /// A user has returned to what lies below it: it is not the newest state of the disk any more.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub(super) abandoned: bool,
    /// A restore made it, on a file of its image.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub(super) restored: bool,
}

/// What a layer is for.
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
    /// Where the contents of its disk are now.
    pub(super) file: PathBuf,
    /// The files that its disk consisted of when it was made, the topmost first.
    pub(super) chain: Vec<PathBuf>,
    /// The identity of this image, if another one is about to take its name, or if it is about to be removed: unless the
    /// image of that name has this identity, nothing is needed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) replaced: Option<String>,
}

/// Contents that an image knows otherwise.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Changed {
    /// The file that images name.
    pub(super) file: PathBuf,
    /// As they know it.
    pub(super) then: FileIdentity,
    /// The file that has the contents now.
    pub(super) is_in: PathBuf,
    /// Its format.
    pub(super) format: String,
    /// As it is now.
    pub(super) now: FileIdentity,
}

/// A merge that has begun: `tops` go into `base`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Merge {
    /// The hypervisor that does it.
    pub(super) process: ProcessIdentity,
    /// The VM.
    pub(super) vm: String,
    /// The file that gets the contents.
    pub(super) base: PathBuf,
    /// Its format.
    pub(super) format: String,
    /// The files that are merged into it, the topmost first.
    pub(super) tops: Vec<PathBuf>,
    /// The file that lies on the topmost; `None` if the VM writes to the topmost itself.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) above: Option<PathBuf>,
    /// What these files were before, except of what the VM writes to.
    pub(super) before: Vec<(PathBuf, FileIdentity)>,
}

/// A file that holds a part of what lies over it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Partial {
    /// The file.
    pub(super) base: PathBuf,
    /// What has to lie over it.
    pub(super) tops: Vec<PathBuf>,
}

impl Default for Record {
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

impl Record {
    /// Whether it says nothing.
    pub(super) fn is_empty(&self) -> bool {
        *self == Self::default()
    }

    /// The same with paths relative to `dir` where they are in it.
    pub(super) fn stored(mut self, dir: &Path) -> Self {
        self.each_path(&mut |path| {
            if path.parent() == Some(dir) {
                *path = path.file_name().unwrap_or_default().into();
            }
        });
        self
    }

    /// The same with absolute paths.
    pub(super) fn loaded(mut self, dir: &Path) -> Self {
        self.each_path(&mut |path| *path = dir.join(&path));
        self
    }

    fn each_path(&mut self, change: &mut dyn FnMut(&mut PathBuf)) {
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
