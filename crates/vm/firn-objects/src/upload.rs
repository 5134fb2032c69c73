//! Uploads one file in parts.
//!
//! The object appears with the last request, as a whole. Until then the store has parts that can't
//! be read. If this process is killed, its record makes the next push abort the upload.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;

use bytes::Bytes;

use crate::error::StoreError;
use crate::parts::{TransferProgress, split_into_parts, transfer_parts};
use crate::storage::ObjectStorage;
use crate::upload_record::write_record;
use firn_cache::StoreLocation;

/// A file to upload.
pub(crate) struct FileSource<'a> {
    pub(crate) path: &'a Path,
    pub(crate) file: &'a File,
    pub(crate) len: u64,
}

impl FileSource<'_> {
    fn read_range(&self, start: u64, end: u64) -> Result<Bytes, StoreError> {
        let mut bytes = vec![0; (end - start) as usize];
        let path = || self.path.to_owned();
        self.file.read_exact_at(&mut bytes, start).map_err(|source| StoreError::Io {
            step: "read",
            path: path(),
            source,
        })?;
        Ok(bytes.into())
    }
}

/// Uploads a file. After an error there is no new object, unless the store made one and its answer
/// was lost.
pub(crate) fn upload_file(
    storage: &ObjectStorage,
    source: &FileSource<'_>,
    at: &StoreLocation,
    progress: &TransferProgress<'_>,
) -> Result<(), StoreError> {
    let upload = storage.begin_upload(at)?;
    let record = match write_record(storage, at, &upload) {
        Ok(record) => record,
        Err(error) => return Err(abandon_upload(storage, at, &upload, error)),
    };
    firn_fault::pass_point("store.begun");
    match upload_parts(storage, source, at, &upload, progress) {
        Ok(()) => storage.remove_object(&record),
        // The record stays, and the next push finds it.
        Err(error) if error.is_final() => Err(error),
        Err(error) => {
            let error = abandon_upload(storage, at, &upload, error);
            let _ = storage.remove_object(&record);
            Err(error)
        }
    }
}

fn upload_parts(
    storage: &ObjectStorage,
    source: &FileSource<'_>,
    at: &StoreLocation,
    upload: &String,
    progress: &TransferProgress<'_>,
) -> Result<(), StoreError> {
    let parts = split_into_parts(source.len);
    let ids = transfer_parts(
        &parts,
        &|number, part| {
            let bytes = source.read_range(part.start, part.end)?;
            firn_fault::pass_point("store.part");
            storage.put_part(at, upload, number, bytes)
        },
        &|done| progress("uploading", done, source.len),
    )?;
    firn_fault::pass_point("store.complete");
    storage.complete_upload(at, upload, ids)?;
    firn_fault::pass_point("store.completed");
    Ok(())
}

/// Aborts an upload that has failed; returns the first error.
fn abandon_upload(
    storage: &ObjectStorage,
    at: &StoreLocation,
    upload: &String,
    error: StoreError,
) -> StoreError {
    let _ = storage.abort_upload(at, upload);
    error
}
