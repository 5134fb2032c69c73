//! Removes an image from the store.
//!
//! First its uploads that are not complete, then its signature and its learned blocks, then the image: if
//! this is interrupted, what is left is an image without a signature, or nothing.

use crate::error::StoreError;
use crate::list::list_stored;
use crate::side_files::SIDE_SUFFIXES;
use crate::storage::{ObjectStorage, PutRule};
use crate::upload_record::{Leftovers, abort_leftovers};
use firn_cache::StoreLocation;

/// What was removed.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct RemovedObject {
    /// The object.
    pub location: StoreLocation,
    /// Whether there was an object.
    pub was_there: bool,
    /// The number of unfinished uploads that were aborted.
    pub aborted_uploads: usize,
}

/// Removes an image, its signature, and uploads of it that are not complete.
///
/// # Errors
/// If another image below the same prefix builds on it, unless `force`; if there is nothing to
/// remove.
pub fn remove_image(at: &StoreLocation, force: bool) -> Result<RemovedObject, StoreError> {
    if at.key.is_empty() {
        return Err(StoreError::NoObjectName(at.clone()));
    }
    let storage = ObjectStorage::open(at, PutRule::Create)?;
    storage.check_writable(at)?;
    let identity = match storage.read_outline(at) {
        Ok(found) => found.map(|(_, outline)| outline.identity),
        // A damaged object is only removed on purpose.
        Err(StoreError::Damaged { .. }) if force => Some(String::new()),
        Err(error) => return Err(error),
    };
    if let Some(identity) = &identity
        && !force
    {
        refuse_parent(&storage, at, identity)?;
    }
    let aborted_uploads = abort_leftovers(&storage, at, Leftovers::All)?;
    let was_there = identity.is_some();
    if !was_there && aborted_uploads == 0 {
        return Err(StoreError::Missing { what: "object", location: at.clone() });
    }
    if was_there {
        for suffix in SIDE_SUFFIXES {
            storage.remove_object(&at.with_suffix(suffix))?;
        }
        storage.remove_object(at)?;
    }
    Ok(RemovedObject { location: at.clone(), was_there, aborted_uploads })
}

/// Refuses an image that another one names as its parent.
fn refuse_parent(
    storage: &ObjectStorage,
    at: &StoreLocation,
    identity: &str,
) -> Result<(), StoreError> {
    let images = list_stored(storage, &at.with_key(at.prefix()))?;
    let builds_on = |image: &&crate::list::StoredImage| {
        let parent = image.outline.as_ref().ok().and_then(|outline| outline.parent.as_ref());
        parent.is_some_and(|parent| parent.identity == identity)
    };
    match images.iter().find(builds_on) {
        None => Ok(()),
        Some(child) => {
            let (location, child) = (at.clone(), child.location.clone());
            Err(StoreError::InUse { location, child })
        }
    }
}
