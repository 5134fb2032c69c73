//! Pulls an image, and those it builds on, out of the store.
//!
//! ```text
//!   oldest parent:  a local file of that name has the same identity?   yes: skip
//!   ...             no: download to .NAME.partial, verify each byte, rename
//!   the image:      download, verify, rename; then its signature
//! ```
//!
//! A partial file is in the directory of the image, where its parents are, so it can be opened and
//! verified there. Nothing has the name of an image before all its bytes were checked.

use std::fs::File;
use std::path::{Path, PathBuf};

use firn_image::{Image, ImageError, PartialFile, check_sealed_file, verify_own_file};

use crate::chain::{StoredFile, list_stored_chain, read_local_outline};
use crate::download::download_object;
use crate::error::StoreError;
use crate::parts::TransferProgress;
use crate::side_files::{
    LEARNED_BYTES_MAX, LEARNED_SUFFIX, SIGNATURE_BYTES_MAX, SIGNATURE_SUFFIX, side_path,
};
use crate::storage::{ObjectStorage, PutRule};
use firn_cache::StoreLocation;

/// A file that is on this host now.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct PulledFile {
    /// Its object.
    pub location: StoreLocation,
    /// The file.
    pub path: PathBuf,
    /// Its identity, in hexadecimal.
    pub identity: String,
    /// Its length.
    pub bytes: u64,
    /// Whether it was there before.
    pub was_there: bool,
    /// Whether it has a signature, which was pulled too.
    pub is_signed: bool,
}

/// Pulls an image to `path`, and its parents into the same directory. Returns its files, the newest
/// first. `threads` verify.
///
/// # Errors
/// If a file can't be pulled: then nothing new has its name.
pub fn pull_image(
    at: &StoreLocation,
    path: &Path,
    threads: usize,
    progress: &TransferProgress<'_>,
) -> Result<Vec<PulledFile>, StoreError> {
    if at.key.is_empty() {
        return Err(StoreError::NoObjectName(at.clone()));
    }
    let storage = ObjectStorage::open(at, PutRule::Create)?;
    let chain = list_stored_chain(&storage, at)?;
    let targets = list_targets(&chain, path)?;
    let mut pulled = Vec::new();
    for (number, (stored, path)) in chain.iter().zip(&targets).enumerate().rev() {
        let pull = FilePull { storage: &storage, stored, path, threads };
        pulled.insert(0, pull.run(number > 0, progress)?);
    }
    Ok(pulled)
}

/// The paths of the files of a chain. Those of parents are the ones that the images name.
fn list_targets(chain: &[StoredFile], path: &Path) -> Result<Vec<PathBuf>, StoreError> {
    let mut targets = vec![path.to_owned()];
    for parent in chain.iter().skip(1) {
        let target = path.with_file_name(parent.location.name());
        if targets.contains(&target) {
            return Err(StoreError::WrongParent {
                image: chain[0].location.to_string(),
                parent: target.display().to_string(),
            });
        }
        targets.push(target);
    }
    Ok(targets)
}

/// The pull of one file of a chain.
struct FilePull<'a> {
    storage: &'a ObjectStorage,
    stored: &'a StoredFile,
    path: &'a Path,
    threads: usize,
}

impl FilePull<'_> {
    fn run(
        &self,
        is_parent: bool,
        progress: &TransferProgress<'_>,
    ) -> Result<PulledFile, StoreError> {
        let was_there = is_parent && self.is_there()?;
        let is_signed = match was_there {
            true => false,
            false => {
                self.download(progress)?;
                self.pull_learned();
                self.pull_signature()?
            }
        };
        Ok(PulledFile {
            location: self.stored.location.clone(),
            path: self.path.to_owned(),
            identity: self.stored.outline.identity.clone(),
            bytes: self.stored.outline.file_bytes,
            was_there,
            is_signed,
        })
    }

    /// Whether a local file is this parent. An error if it is something else.
    fn is_there(&self) -> Result<bool, StoreError> {
        let failed = |source| StoreError::Io { step: "open", path: self.path.to_owned(), source };
        let file: File = match firn_files::open_input(self.path) {
            Ok(file) => file,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(false),
            Err(error) => return Err(failed(error)),
        };
        match read_local_outline(self.path, &file)?.identity == self.stored.outline.identity {
            true => Ok(true),
            false => Err(StoreError::WrongParent {
                image: self.stored.location.to_string(),
                parent: self.path.display().to_string(),
            }),
        }
    }

    fn download(&self, progress: &TransferProgress<'_>) -> Result<(), StoreError> {
        let partial = PartialFile::create(self.path)?;
        let StoredFile { location, facts, .. } = self.stored;
        download_object(self.storage, location, facts, &partial, progress)?;
        self.verify_partial(&partial, progress)?;
        Ok(partial.publish()?)
    }

    fn verify_partial(
        &self,
        partial: &PartialFile,
        progress: &TransferProgress<'_>,
    ) -> Result<(), StoreError> {
        let location = || self.stored.location.clone();
        let unopenable = |source: ImageError| StoreError::Unopenable {
            location: location(),
            source: Box::new(source),
        };
        if self.stored.outline.is_sealed {
            return check_sealed(partial.path(), progress).map_err(unopenable);
        }
        let image = Image::open(partial.path()).map_err(unopenable)?;
        let unit = u64::from(image.geometry().locality_block_bytes);
        let report = verify_own_file(&image, self.threads, &|done, total| {
            progress("verifying", u64::from(done) * unit, u64::from(total) * unit);
        });
        match report.is_clean() {
            true => Ok(()),
            false => Err(StoreError::Unsound {
                location: location(),
                problem_count: report.problem_count,
                first: report.problems.into_iter().next().map(Box::new),
            }),
        }
    }

    /// Pulls the learned blocks, if there are some. They only make restores faster: it is no error if
    /// they can't be pulled.
    fn pull_learned(&self) {
        let at = self.stored.location.with_suffix(LEARNED_SUFFIX);
        let path = side_path(self.path, LEARNED_SUFFIX);
        if let Ok(Some(bytes)) = self.storage.read_small(&at, LEARNED_BYTES_MAX) {
            let _ = firn_files::replace_private(&path, &bytes);
        }
    }

    /// Pulls the signature, if there is one.
    fn pull_signature(&self) -> Result<bool, StoreError> {
        let at = self.stored.location.with_suffix(SIGNATURE_SUFFIX);
        let Some(bytes) = self.storage.read_small(&at, SIGNATURE_BYTES_MAX)? else {
            return Ok(false);
        };
        let path = side_path(self.path, SIGNATURE_SUFFIX);
        let failed = |source| StoreError::Io { step: "write", path: path.clone(), source };
        firn_files::replace_output(&path, &bytes).map_err(failed)?;
        Ok(true)
    }
}

/// Checks a sealed image as it is stored, without its key.
fn check_sealed(path: &Path, progress: &TransferProgress<'_>) -> Result<(), ImageError> {
    let failed = |source| ImageError::Io { step: "open", path: path.to_owned(), source };
    let file = File::open(path).map_err(failed)?;
    check_sealed_file(path, &file, &|done, total| progress("verifying", done.into(), total.into()))
}
