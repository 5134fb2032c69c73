//! Creation and replacement of output files.

use std::ffi::OsString;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use rustix::fs::OFlags;
use thiserror::Error;

use crate::kind::{NonRegularKind, NotRegular};

/// The reason why Firn does not write a file at a path.
#[derive(Debug, Error)]
pub enum OutputError {
    /// The path names something that a file must not replace.
    #[error("{path} is {kind}: a file is written to a regular file or a new name only", path = .path.display())]
    NotRegular {
        /// The path.
        path: PathBuf,
        /// The kind of the existing file.
        kind: NonRegularKind,
    },
    /// It ends in a slash, or has no last part.
    #[error("{path} is not a file name", path = .0.display())]
    Name(PathBuf),
    /// The system does not report what the path names.
    #[error("cannot check {path}", path = .path.display())]
    Io {
        /// The path.
        path: PathBuf,
        /// What the system reported.
        source: io::Error,
    },
}

/// Checks that a file may be created or replaced at a path: it names nothing, a regular file, or a
/// link to one or to nothing.
///
/// # Errors
/// If the path names something else, or no file.
pub fn check_output(path: &Path) -> Result<(), OutputError> {
    if path.file_name().is_none() || path.as_os_str().as_bytes().ends_with(b"/") {
        return Err(match path.is_dir() {
            true => {
                OutputError::NotRegular { path: path.to_owned(), kind: NonRegularKind::Directory }
            }
            false => OutputError::Name(path.to_owned()),
        });
    }
    match fs::metadata(path) {
        Ok(found) => match NotRegular::require_regular(found.file_type()) {
            Ok(()) => Ok(()),
            Err(NotRegular(kind)) => Err(OutputError::NotRegular { path: path.to_owned(), kind }),
        },
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        Err(source) => Err(OutputError::Io { path: path.to_owned(), source }),
    }
}

/// Opens a regular file for writing from its start, and creates it if there is none. Earlier
/// contents are lost.
///
/// # Errors
/// If it cannot be opened, or is not a regular file ([`NotRegular`]).
pub fn create_output(path: &Path) -> io::Result<File> {
    if let Ok(found) = fs::metadata(path) {
        NotRegular::require_regular(found.file_type())?;
    }
    let flags = OFlags::NONBLOCK | OFlags::NOCTTY;
    let mut options = OpenOptions::new();
    let file = options
        .write(true)
        .create(true)
        .truncate(false)
        .custom_flags(flags.bits() as i32)
        .open(path)?;
    NotRegular::require_regular(file.metadata()?.file_type())?;
    file.set_len(0)?;
    Ok(file)
}

/// Replaces a file by one with these bytes. After an error the old file is unchanged.
///
/// # Errors
/// If it cannot be written, or the path names something other than a regular file
/// ([`OutputError`]).
pub fn replace_output(path: &Path, bytes: &[u8]) -> io::Result<()> {
    replace_with_mode(path, bytes, 0o666)
}

/// The same, readable by the owner alone.
///
/// # Errors
/// As [`replace_output`].
pub fn replace_private(path: &Path, bytes: &[u8]) -> io::Result<()> {
    replace_with_mode(path, bytes, 0o600)
}

fn replace_with_mode(path: &Path, bytes: &[u8], mode: u32) -> io::Result<()> {
    check_output(path).map_err(|error| io::Error::new(io::ErrorKind::InvalidInput, error))?;
    let new = new_name(path);
    let written = write_new(&new, bytes, mode).and_then(|()| fs::rename(&new, path));
    if written.is_err() {
        // The caller needs the first error.
        drop(fs::remove_file(&new));
    }
    written
}

fn write_new(path: &Path, bytes: &[u8], mode: u32) -> io::Result<()> {
    let mut options = OpenOptions::new();
    let mut file = options.write(true).create_new(true).mode(mode).open(path)?;
    file.write_all(bytes)?;
    // The new name must not reach the disk before the bytes: after a power cut it would name an empty file.
    file.sync_all()
}

/// A hidden name in the same directory, which no other thread or process uses.
fn new_name(path: &Path) -> PathBuf {
    static COUNT: AtomicU64 = AtomicU64::new(0);
    let count = COUNT.fetch_add(1, Ordering::Relaxed);
    let mut name = OsString::from(".");
    name.push(path.file_name().unwrap_or_default());
    name.push(format!(".{}.{count}.new", std::process::id()));
    path.with_file_name(name)
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::fs::{CWD, Mode};
    use std::os::unix::fs::{FileTypeExt, symlink};

    fn fifo(dir: &Path) -> PathBuf {
        let path = dir.join("fifo");
        rustix::fs::mkfifoat(CWD, &path, Mode::RUSR | Mode::WUSR).unwrap();
        path
    }

    #[test]
    fn only_files_and_new_names_are_written_to() {
        let dir = tempfile::tempdir().unwrap();
        let path = |name: &str| dir.path().join(name);
        fs::write(path("file"), "old").unwrap();
        symlink("file", path("link")).unwrap();
        symlink("none", path("dangling")).unwrap();
        symlink("/dev/null", path("device")).unwrap();
        for good in ["file", "link", "dangling", "new"] {
            check_output(&path(good)).unwrap();
        }
        for bad in [path("device"), "/dev/null".into(), "/dev/full".into(), fifo(dir.path())] {
            assert!(matches!(check_output(&bad), Err(OutputError::NotRegular { .. })), "{bad:?}");
            assert!(create_output(&bad).is_err() && replace_output(&bad, b"x").is_err());
        }
        for bad in ["/", "..", "new/"].map(|name| dir.path().join(name)) {
            assert!(check_output(&bad).is_err(), "{bad:?}");
        }
        assert!(fs::metadata(path("fifo")).unwrap().file_type().is_fifo());
    }

    #[test]
    fn a_link_is_replaced_and_its_target_stays() {
        let dir = tempfile::tempdir().unwrap();
        let path = |name: &str| dir.path().join(name);
        fs::write(path("file"), "old").unwrap();
        symlink("file", path("link")).unwrap();
        replace_output(&path("link"), b"new").unwrap();
        assert_eq!(fs::read(path("file")).unwrap(), b"old");
        assert_eq!(fs::read(path("link")).unwrap(), b"new");
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 2);
    }

    #[test]
    fn an_existing_file_is_truncated() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("file");
        fs::write(&path, "longer").unwrap();
        create_output(&path).unwrap().write_all(b"new").unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"new");
    }
}
