//! Which file a record names, and in which directory the record of a file is.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};

/// The path that identifies a file in records, whatever links lead to it. The file itself may not
/// exist any more.
pub(super) fn record_key(file: &Path) -> PathBuf {
    if let Ok(path) = std::fs::canonicalize(file) {
        return path;
    }
    let dir = file.parent().and_then(|dir| std::fs::canonicalize(dir).ok());
    dir.map_or_else(|| file.to_owned(), |dir| dir.join(file.file_name().unwrap_or(OsStr::new(""))))
}

/// The directory whose record lists a file. The file is given by its [`record_key`].
pub(super) fn record_dir(file: &Path) -> &Path {
    file.parent().unwrap_or(Path::new("/"))
}
