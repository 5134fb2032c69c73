//! A family: clones of one image, which share the memory that none of them has written.

use std::path::{Path, PathBuf};

use firn_image::ImageKey;
use firn_restore::FillChoices;
use serde::{Deserialize, Serialize};

use crate::records::image_ids::ImageIds;

/// What a supervisor knows of the family of its VM.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FamilyRecord {
    /// A name that no other family has.
    pub id: String,
    /// The image.
    pub image: PathBuf,
    /// The directory of the template's holder, which exists while the template is being filled.
    pub directory: PathBuf,
}

impl FamilyRecord {
    /// The socket at which the holder hands out the template.
    pub(crate) fn holder_socket(&self) -> PathBuf {
        holder_socket(&self.directory)
    }

    /// The file that describes the template.
    pub(crate) fn description_file(&self) -> PathBuf {
        description_file(&self.directory)
    }
}

/// The holder's socket in a family's directory.
pub(crate) fn holder_socket(directory: &Path) -> PathBuf {
    directory.join("holder.sock")
}

/// The description of the template in a family's directory.
pub(crate) fn description_file(directory: &Path) -> PathBuf {
    directory.join("template.json")
}

/// The description of a template.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct TemplateDescription {
    /// The numbers of the image.
    #[serde(flatten)]
    pub(crate) ids: ImageIds,
    /// The address of each region's file in the holder.
    pub(crate) addresses: Vec<u64>,
}

/// The plan of a template's holder.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct TemplatePlan {
    /// The image; absolute.
    pub(crate) image: PathBuf,
    /// Its keys, if it is sealed.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(crate) keys: Vec<ImageKey>,
    /// The directory that contains the directories of families.
    pub(crate) families: PathBuf,
    /// Fill the blocks that earlier restores of the image had to read on demand early.
    pub(crate) learn: bool,
    /// When and how fast it is filled.
    #[serde(flatten)]
    pub(crate) fill: FillChoices,
}
