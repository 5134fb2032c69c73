//! Which files belong to an image: itself and those it builds on, locally and in the store.
//!
//! ```text
//!   /srv/web.firn --parent--> /srv/base.firn           s3://vms/a/web.firn --parent--> s3://vms/a/base.firn
//! ```
//!
//! An image names its parent by a path relative to its own directory. The same name is used in the
//! store, below the same prefix, so a chain that was pulled finds its parents. A parent in another
//! directory has no such name, and is refused.

use std::collections::BTreeSet;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Component, Path, PathBuf};

use firn_image::{CHAIN_MAX, ChainPart, ImageOutline, OutlineError, ParentName, list_chain};

use crate::error::StoreError;
use crate::storage::{ObjectFacts, ObjectStorage};
use firn_cache::StoreLocation;

/// A file of a chain on this host.
pub(crate) struct LocalFile {
    pub(crate) path: PathBuf,
    pub(crate) file: File,
    pub(crate) outline: ImageOutline,
    /// Where it is, or is going to be, in the store.
    pub(crate) location: StoreLocation,
}

/// An image of a chain in the store.
pub(crate) struct StoredFile {
    pub(crate) location: StoreLocation,
    pub(crate) facts: ObjectFacts,
    pub(crate) outline: ImageOutline,
}

/// The name of a parent in the directory of the image that builds on it. `image` is for the error.
pub(crate) fn parent_file_name<'a>(
    image: &dyn std::fmt::Display,
    parent: &'a ParentName,
) -> Result<&'a str, StoreError> {
    let mut parts = parent.path.components();
    let name = match (parts.next(), parts.next()) {
        (Some(Component::Normal(name)), None) => name.to_str(),
        _ => None,
    };
    name.ok_or_else(|| StoreError::ParentElsewhere {
        image: image.to_string(),
        parent: parent.path.clone(),
    })
}

/// What an image on this host is, by its end.
pub(crate) fn read_local_outline(path: &Path, file: &File) -> Result<ImageOutline, StoreError> {
    let failed = |source| StoreError::Io { step: "read", path: path.to_owned(), source };
    let len = file.metadata().map_err(failed)?.len();
    let outline = ImageOutline::read(len, &mut |range| {
        let mut bytes = vec![0; (range.end - range.start) as usize];
        file.read_exact_at(&mut bytes, range.start).map(|()| bytes)
    });
    outline.map_err(|error| match error {
        OutlineError::Read(source) => failed(source),
        OutlineError::Flaw(flaw) => {
            firn_image::ImageError::Damaged { path: path.to_owned(), flaw }.into()
        }
    })
}

/// The files of an image, the newest first, and their locations if the image is at `at`.
pub(crate) fn list_local_chain(
    image: &Path,
    at: &StoreLocation,
) -> Result<Vec<LocalFile>, StoreError> {
    let mut files: Vec<LocalFile> = Vec::new();
    for ChainPart { path, file, .. } in list_chain(image)? {
        let location = match files.last() {
            None => at.clone(),
            Some(LocalFile {
                path, outline: ImageOutline { parent: Some(parent), .. }, ..
            }) => at.with_name(parent_file_name(&path.display(), parent)?),
            Some(_) => break,
        };
        let outline = read_local_outline(&path, &file)?;
        files.push(LocalFile { path, file, outline, location });
    }
    Ok(files)
}

/// An image in the store and those it builds on, the newest first.
pub(crate) fn list_stored_chain(
    storage: &ObjectStorage,
    at: &StoreLocation,
) -> Result<Vec<StoredFile>, StoreError> {
    let missing = || StoreError::Missing { what: "object", location: at.clone() };
    let (facts, outline) = storage.read_outline(at)?.ok_or_else(missing)?;
    let mut chain = vec![StoredFile { location: at.clone(), facts, outline }];
    let mut seen = BTreeSet::from([at.key.clone()]);
    while let Some(StoredFile {
        location: child,
        outline: ImageOutline { parent: Some(parent), .. },
        ..
    }) = chain.last()
    {
        let location = at.with_name(parent_file_name(child, parent)?);
        if chain.len() == CHAIN_MAX || !seen.insert(location.key.clone()) {
            return Err(StoreError::ChainTooLong(at.clone()));
        }
        let found = storage.read_outline(&location)?;
        let (facts, outline) = found
            .ok_or_else(|| StoreError::Missing { what: "object", location: location.clone() })?;
        if outline.identity != parent.identity {
            let (image, parent) = (child.to_string(), location.to_string());
            return Err(StoreError::WrongParent { image, parent });
        }
        chain.push(StoredFile { location, facts, outline });
    }
    Ok(chain)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_parent_has_a_name_in_the_same_directory_or_none() {
        let parent = |path: &str| ParentName { identity: String::new(), path: path.into() };
        let image = "web.firn".to_owned();
        assert_eq!(parent_file_name(&image, &parent("base.firn")).unwrap(), "base.firn");
        for path in ["/srv/base.firn", "../base.firn", "old/base.firn", "..", ""] {
            assert!(parent_file_name(&image, &parent(path)).is_err(), "{path}");
        }
    }
}
