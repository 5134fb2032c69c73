//! A directory with the files of an image and of those it builds on, under their names: hard links of
//! the cache's objects.

use std::fs;
use std::io;
use std::os::unix::fs::{DirBuilderExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use bytes::Bytes;
use firn_cache::{CacheDir, map_path};

use super::object::CachedObject;
use super::registry::hash_parts;
use crate::side_files::{LEARNED_SUFFIX, SIGNATURE_SUFFIX, side_path};

/// An object of an image's chain, and the name of its file.
pub(crate) struct ImageObject {
    pub(crate) object: Arc<CachedObject>,
    pub(crate) name: String,
}

/// The directory of an image, with its signature, and the learned blocks of the store, where there are any.
/// It is made, if it is not there, and gets its name when it is complete.
pub(crate) fn make_image_dir(
    cache: &CacheDir,
    chain: &[ImageObject],
    (signature, learned): (Option<&Bytes>, Option<&Bytes>),
) -> io::Result<PathBuf> {
    let parts = chain.iter().flat_map(|it| [it.object.name.hash.as_str(), it.name.as_str()]);
    let directory = cache.images().join(hash_parts(&parts.collect::<Vec<_>>()));
    if !chain.iter().all(|file| is_linked(cache, &directory, file)) {
        let new = directory.with_extension("new");
        let _ = fs::remove_dir_all(&new);
        fs::DirBuilder::new().mode(0o700).create(&new)?;
        for file in chain {
            let (from, to) = (cache.object(&file.object.name.hash), new.join(&file.name));
            fs::hard_link(&from, &to)?;
            fs::hard_link(map_path(&from), map_path(&to))?;
        }
        let _ = fs::remove_dir_all(&directory);
        fs::rename(&new, &directory)?;
    }
    if let Some(image) = chain.first() {
        let path = directory.join(&image.name);
        put_signature(&side_path(&path, SIGNATURE_SUFFIX), signature)?;
        put_learned(&side_path(&path, LEARNED_SUFFIX), learned);
    }
    Ok(directory)
}

/// What this host has learned itself stays.
fn put_learned(path: &Path, learned: Option<&Bytes>) {
    if let Some(bytes) = learned.filter(|_| !path.exists()) {
        let _ = firn_files::replace_private(path, bytes);
    }
}

fn put_signature(path: &Path, signature: Option<&Bytes>) -> io::Result<()> {
    match signature {
        Some(bytes) => firn_files::replace_output(path, bytes),
        None => match fs::remove_file(path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
            _ => Ok(()),
        },
    }
}

/// Whether a directory has the file of an object, and its map.
fn is_linked(cache: &CacheDir, directory: &Path, file: &ImageObject) -> bool {
    let is_same = |a: &Path, b: &Path| match (fs::metadata(a), fs::metadata(b)) {
        (Ok(a), Ok(b)) => (a.ino(), a.dev()) == (b.ino(), b.dev()),
        _ => false,
    };
    let (data, link) = (cache.object(&file.object.name.hash), directory.join(&file.name));
    is_same(&data, &link) && is_same(&map_path(&data), &map_path(&link))
}
