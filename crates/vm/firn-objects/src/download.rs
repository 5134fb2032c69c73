//! Downloads one object into the partial file of an image.

use firn_image::PartialFile;

use crate::error::StoreError;
use crate::parts::{TransferProgress, split_into_parts, transfer_parts};
use crate::storage::{ObjectFacts, ObjectStorage};
use firn_cache::StoreLocation;

/// Downloads an object, several ranges at a time. Each range is of the same state of the object.
pub(crate) fn download_object(
    storage: &ObjectStorage,
    at: &StoreLocation,
    facts: &ObjectFacts,
    partial: &PartialFile,
    progress: &TransferProgress<'_>,
) -> Result<(), StoreError> {
    let parts = split_into_parts(facts.size);
    transfer_parts(
        &parts,
        &|_, part| {
            let bytes = storage.read_range(at, facts, part.clone())?;
            Ok(partial.write_received(&bytes, part.start)?)
        },
        &|done| progress("downloading", done, facts.size),
    )
    .map(drop)
}
