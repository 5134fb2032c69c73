//! The owner of a session: the fingerprint of a public key in a file beside the log.

use std::io;
use std::path::{Path, PathBuf};

use crate::backup::error::BackupError;

/// The maximum size of the file in bytes.
const FILE_BYTES_MAX: u64 = 1 << 10;

/// The fingerprint of the key that owns a session, if the session has an owner.
pub(super) fn read_owner(directory: &Path, session: &str) -> Result<Option<String>, BackupError> {
    let path = owner_path(directory, session);
    match firn_files::read_permissions(&path, FILE_BYTES_MAX) {
        Ok(bytes) => parse_owner(&bytes)
            .map(Some)
            .ok_or_else(|| owner_error(&path, "it must be `key:` and 64 hexadecimal digits")),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(owner_error(&path, &error.to_string())),
    }
}

/// Makes a key the owner of a session, for good.
pub(in crate::backup) fn write_owner(
    directory: &Path,
    session: &str,
    key: &str,
) -> Result<(), BackupError> {
    let path = owner_path(directory, session);
    firn_files::replace_private(&path, format!("key:{key}\n").as_bytes())
        .and_then(|()| std::fs::File::open(directory)?.sync_all())
        .map_err(|source| BackupError::File { what: "cannot write", path, source })
}

fn owner_path(directory: &Path, session: &str) -> PathBuf {
    directory.join(format!("{session}.owner"))
}

fn parse_owner(bytes: &[u8]) -> Option<String> {
    let digits = std::str::from_utf8(bytes).ok()?.trim().strip_prefix("key:")?;
    let is_hash = digits.len() == 64 && digits.bytes().all(|byte| byte.is_ascii_hexdigit());
    is_hash.then(|| digits.to_ascii_lowercase())
}

fn owner_error(path: &Path, why: &str) -> BackupError {
    BackupError::Table { path: path.to_owned(), why: why.to_owned() }
}
