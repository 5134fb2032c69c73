//! Pushes an image, and those it builds on, into the store.
//!
//! ```text
//!   oldest parent:  there already, with the same identity?  yes: skip    no: verify, upload, check
//!   ...
//!   the image:      there already, with the same bytes?     yes: skip    no: verify, upload, check
//!                   and its signature
//! ```
//!
//! So at each moment the parents of an image that is visible are visible too. A file is verified
//! before it is uploaded. The store checks each part by its SHA-256, which is signed; afterwards
//! the end of the object is read back, and compared.

use std::fs::File;
use std::path::{Path, PathBuf};

use firn_image::{Image, check_sealed_file, list_chain, verify_own_file};

use crate::chain::{LocalFile, list_local_chain};
use crate::error::StoreError;
use crate::parts::TransferProgress;
use crate::side_files::{
    LEARNED_BYTES_MAX, LEARNED_SUFFIX, SIDE_SUFFIXES, SIGNATURE_BYTES_MAX, SIGNATURE_SUFFIX,
    side_path,
};
use crate::storage::{ObjectStorage, PutRule};
use crate::upload::{FileSource, upload_file};
use crate::upload_record::{Leftovers, abort_leftovers};
use firn_cache::StoreLocation;

/// How to push.
#[derive(Clone, Copy, Debug)]
pub struct PushOptions {
    /// Also the images that it builds on.
    pub chain: bool,
    /// Replace another image of that name.
    pub force: bool,
    /// Threads that verify.
    pub threads: usize,
}

/// A file that is in the store now.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct PushedFile {
    /// The file.
    pub path: PathBuf,
    /// Its object.
    pub location: StoreLocation,
    /// Its identity, in hexadecimal.
    pub identity: String,
    /// Its length.
    pub bytes: u64,
    /// Whether it was there before.
    pub was_there: bool,
    /// Whether its signature is in the store.
    pub is_signed: bool,
}

/// Pushes an image. Returns its files, the newest first.
///
/// # Errors
/// If a file can't be pushed: then its object does not exist, or is as it was.
pub fn push_image(
    path: &Path,
    at: &StoreLocation,
    options: PushOptions,
    progress: &TransferProgress<'_>,
) -> Result<Vec<PushedFile>, StoreError> {
    if at.key.is_empty() {
        return Err(StoreError::NoObjectName(at.clone()));
    }
    open_unsealed(path)?;
    let files = list_local_chain(path, at)?;
    let creating = ObjectStorage::open(at, PutRule::Create)?;
    creating.check_writable(at)?;
    let replacing = match options.force {
        true => Some(ObjectStorage::open(at, PutRule::Replace)?),
        false => None,
    };
    if !options.chain {
        require_parent(&creating, &files)?;
    }
    let count = if options.chain { files.len() } else { 1 };
    let mut pushed = Vec::new();
    for number in (0..count).rev() {
        let Some((local, parents)) = files.get(number..).and_then(<[_]>::split_first) else {
            continue;
        };
        // Parents are never replaced: other images may build on what has their name.
        let replacing = replacing.as_ref().filter(|_| number == 0);
        let (storage, may_replace) = (replacing.unwrap_or(&creating), replacing.is_some());
        let threads = options.threads;
        let is_parent = number > 0;
        let push = FilePush { storage, local, parents, is_parent, may_replace, threads };
        pushed.insert(0, push.run(progress)?);
    }
    Ok(pushed)
}

/// Checks in advance that an image could be pushed: the store can be used, and nothing has the name.
///
/// # Errors
/// If it could not.
pub fn check_new_image(at: &StoreLocation) -> Result<(), StoreError> {
    if at.key.is_empty() {
        return Err(StoreError::NoObjectName(at.clone()));
    }
    let storage = ObjectStorage::open(at, PutRule::Create)?;
    storage.check_writable(at)?;
    match storage.read_outline(at) {
        Ok(None) => Ok(()),
        Ok(Some(_)) | Err(StoreError::Damaged { .. }) => Err(StoreError::Taken(at.clone())),
        Err(error) => Err(error),
    }
}

/// Checks an image that is not sealed. For one that is, no key is needed: its files are pushed as they
/// are.
fn open_unsealed(path: &Path) -> Result<(), StoreError> {
    match list_chain(path)?.first() {
        Some(part) if part.is_sealed => Ok(()),
        _ => Ok(Image::open(path).map(drop)?),
    }
}

/// Checks that the parent of the first file is in the store.
fn require_parent(storage: &ObjectStorage, files: &[LocalFile]) -> Result<(), StoreError> {
    let [image, parent, ..] = files else { return Ok(()) };
    let found = storage.read_outline(&parent.location)?;
    let (path, location) = (image.path.clone(), parent.location.clone());
    match found {
        Some((_, found)) if found.identity == parent.outline.identity => Ok(()),
        Some(_) => Err(StoreError::WrongParent {
            image: path.display().to_string(),
            parent: location.to_string(),
        }),
        None => Err(StoreError::NoParent { path, parent: location }),
    }
}

/// The push of one file of a chain.
struct FilePush<'a> {
    storage: &'a ObjectStorage,
    local: &'a LocalFile,
    /// The files that it builds on.
    parents: &'a [LocalFile],
    is_parent: bool,
    may_replace: bool,
    threads: usize,
}

impl FilePush<'_> {
    fn run(&self, progress: &TransferProgress<'_>) -> Result<PushedFile, StoreError> {
        let LocalFile { path, location, outline, .. } = self.local;
        let was_there = self.is_there()?;
        abort_leftovers(self.storage, location, Leftovers::Abandoned)?;
        if !was_there {
            self.verify_file(progress)?;
            self.upload(progress)?;
        }
        self.push_learned()?;
        Ok(PushedFile {
            path: path.clone(),
            location: location.clone(),
            identity: outline.identity.clone(),
            bytes: outline.file_bytes,
            was_there,
            is_signed: self.push_signature()?,
        })
    }

    /// Whether the file is in the store already. An error if something else has its name.
    fn is_there(&self) -> Result<bool, StoreError> {
        if self.may_replace {
            // The memory of an object with the right end may be damaged.
            return Ok(false);
        }
        let own = &self.local.outline;
        match self.storage.read_outline(&self.local.location) {
            Ok(None) => Ok(false),
            Ok(Some((_, found))) if found.has_same_bytes(own) => Ok(true),
            // A parent may have been rewritten since (`firn image reorder`): it is the same checkpoint.
            Ok(Some((_, found))) if self.is_parent && found.identity == own.identity => Ok(true),
            Ok(Some(_)) | Err(StoreError::Damaged { .. }) => {
                Err(StoreError::Taken(self.local.location.clone()))
            }
            Err(error) => Err(error),
        }
    }

    fn verify_file(&self, progress: &TransferProgress<'_>) -> Result<(), StoreError> {
        let path = &self.local.path;
        if self.local.outline.is_sealed {
            let file = &self.local.file;
            return Ok(check_sealed_file(path, file, &|done, total| {
                progress("verifying", done.into(), total.into());
            })?);
        }
        let chain = std::iter::once(self.local).chain(self.parents);
        let files: Result<Vec<File>, _> = chain.map(|it| it.file.try_clone()).collect();
        let files = files.map_err(|source| StoreError::Io {
            step: "duplicate",
            path: path.clone(),
            source,
        })?;
        let image = Image::open_from(path, &files)?;
        let unit = u64::from(image.geometry().locality_block_bytes);
        let report = verify_own_file(&image, self.threads, &|done, total| {
            progress("verifying", u64::from(done) * unit, u64::from(total) * unit);
        });
        match report.is_clean() {
            true => Ok(()),
            false => Err(StoreError::DamagedFile {
                path: path.clone(),
                problem_count: report.problem_count,
                first: report.problems.into_iter().next().map(Box::new),
            }),
        }
    }

    fn upload(&self, progress: &TransferProgress<'_>) -> Result<(), StoreError> {
        let LocalFile { path, file, outline, location } = self.local;
        if self.may_replace {
            // Those of the image that is replaced.
            for suffix in SIDE_SUFFIXES {
                self.storage.remove_object(&location.with_suffix(suffix))?;
            }
        }
        let source = FileSource { path, file, len: outline.file_bytes };
        let uploaded = upload_file(self.storage, &source, location, progress);
        if uploaded.as_ref().is_err_and(StoreError::is_final) {
            return uploaded;
        }
        match (self.storage.read_outline(location), uploaded) {
            // Also if the answer was lost, or another push of the same image was first.
            (Ok(Some((_, found))), _) if found.has_same_bytes(outline) => Ok(()),
            (_, Err(error)) | (Err(error), Ok(())) => Err(error),
            (Ok(_), Ok(())) => Err(StoreError::Replaced(location.clone())),
        }
    }

    /// Puts the signature of a file beside its object, if the file has one.
    fn push_signature(&self) -> Result<bool, StoreError> {
        let path = side_path(&self.local.path, SIGNATURE_SUFFIX);
        let failed = |source| StoreError::Io { step: "read", path: path.clone(), source };
        let bytes = match firn_files::read_input(&path, SIGNATURE_BYTES_MAX) {
            Ok(bytes) => bytes,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(false),
            Err(error) => return Err(failed(error)),
        };
        self.storage.put_small(&self.local.location.with_suffix(SIGNATURE_SUFFIX), bytes.into())?;
        Ok(true)
    }

    /// Puts the learned blocks of a file beside its object, if the file has some. They only make
    /// restores faster: what can't be read is left out.
    fn push_learned(&self) -> Result<(), StoreError> {
        let path = side_path(&self.local.path, LEARNED_SUFFIX);
        let at = self.local.location.with_suffix(LEARNED_SUFFIX);
        match firn_files::read_input(&path, LEARNED_BYTES_MAX) {
            Ok(bytes) => self.storage.put_small(&at, bytes.into()),
            Err(_) => Ok(()),
        }
    }
}
