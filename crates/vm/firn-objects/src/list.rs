//! Lists the images below a prefix.

use firn_image::{ImageFlaw, ImageOutline};

use crate::error::StoreError;
use crate::parts::run_jobs;
use crate::side_files::SIDE_SUFFIXES;
use crate::storage::{ObjectFacts, ObjectStorage, PutRule};
use firn_cache::StoreLocation;

/// An object that is an image, or is named as one.
#[derive(Clone, PartialEq, Debug)]
pub struct StoredImage {
    /// The object.
    pub location: StoreLocation,
    /// Its length.
    pub bytes: u64,
    /// When it was pushed, in seconds since 1970.
    pub modified: u64,
    /// What its end shows, or why it shows nothing.
    pub outline: Result<ImageOutline, ImageFlaw>,
}

/// The images directly below a prefix, by their keys. Reads the end of each object only.
///
/// # Errors
/// If the store can't be read.
pub fn list_images(prefix: &StoreLocation) -> Result<Vec<StoredImage>, StoreError> {
    list_stored(&ObjectStorage::open(prefix, PutRule::Create)?, prefix)
}

pub(crate) fn list_stored(
    storage: &ObjectStorage,
    prefix: &StoreLocation,
) -> Result<Vec<StoredImage>, StoreError> {
    let objects = storage.list_objects(prefix)?;
    let read = |number: usize| match objects.get(number) {
        Some((location, facts)) => read_object(storage, location, facts),
        None => Ok(None),
    };
    let images = run_jobs(objects.len(), &read, &|_| ())?;
    Ok(images.into_iter().flatten().collect())
}

/// An object as an image; `None` if it is none, or is gone.
fn read_object(
    storage: &ObjectStorage,
    location: &StoreLocation,
    facts: &ObjectFacts,
) -> Result<Option<StoredImage>, StoreError> {
    if SIDE_SUFFIXES.iter().any(|suffix| location.name().ends_with(suffix)) {
        return Ok(None);
    }
    let outline = match storage.read_known_outline(location, facts) {
        Ok(outline) => Ok(outline),
        // Removed or replaced since it was listed.
        Err(StoreError::Missing { .. } | StoreError::Replaced(_)) => return Ok(None),
        Err(StoreError::Damaged { flaw, .. }) if location.name().ends_with(".firn") => Err(flaw),
        Err(StoreError::Damaged { .. }) => return Ok(None),
        Err(error) => return Err(error),
    };
    let (location, modified) = (location.clone(), facts.modified);
    Ok(Some(StoredImage { location, bytes: facts.size, modified, outline }))
}
