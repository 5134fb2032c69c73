//! Reading of files whose mode matters: secrets that others must not read, and permissions that
//! others must not write.

use std::fs::File;
use std::io;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};

use thiserror::Error;

use crate::input::{open_input, read_open};

/// The mode bits with which users other than the owner can read or write a file, or write it.
const OTHER_USERS_BITS: u32 = 0o077;
const OTHERS_WRITE: u32 = 0o022;

/// A file with a mode that does not fit its contents.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum ExposedFile {
    /// Others can read a secret.
    #[error("others can read it, because it has mode {mode:04o}: `chmod 600 {path}`", path = .path.display())]
    Secret {
        /// The file.
        path: PathBuf,
        /// Its mode.
        mode: u32,
    },
    /// Others can write permissions.
    #[error("others can write it, because it has mode {mode:04o}: `chmod go-w {path}`", path = .path.display())]
    Permissions {
        /// The file.
        path: PathBuf,
        /// Its mode.
        mode: u32,
    },
}

/// Reads a regular file with a secret, of at most `bytes_max` bytes.
///
/// # Errors
/// As [`crate::read_input`], and if users other than the owner can access the file
/// ([`ExposedFile`]).
pub fn read_secret(path: &Path, bytes_max: u64) -> io::Result<Vec<u8>> {
    read_with_mode(path, bytes_max, |mode| match mode & OTHER_USERS_BITS {
        0 => Ok(()),
        _ => Err(ExposedFile::Secret { path: path.to_owned(), mode }),
    })
}

/// Reads a regular file that grants permissions, of at most `bytes_max` bytes.
///
/// # Errors
/// As [`crate::read_input`], and if users other than the owner can write the file
/// ([`ExposedFile`]).
pub fn read_permissions(path: &Path, bytes_max: u64) -> io::Result<Vec<u8>> {
    read_with_mode(path, bytes_max, |mode| match mode & OTHERS_WRITE {
        0 => Ok(()),
        _ => Err(ExposedFile::Permissions { path: path.to_owned(), mode }),
    })
}

/// Checks the mode of the open file: its path may name another one by now.
fn read_with_mode(
    path: &Path,
    bytes_max: u64,
    check: impl Fn(u32) -> Result<(), ExposedFile>,
) -> io::Result<Vec<u8>> {
    let file: File = open_input(path)?;
    check(file.metadata()?.permissions().mode() & 0o7777)
        .map_err(|error| io::Error::new(io::ErrorKind::PermissionDenied, error))?;
    read_open(file, bytes_max)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::{self, Permissions};

    #[test]
    fn the_mode_decides() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("file");
        fs::write(&path, "text").unwrap();
        let set = |mode| fs::set_permissions(&path, Permissions::from_mode(mode)).unwrap();
        for (mode, is_secret, is_trusted) in [
            (0o600, true, true),
            (0o400, true, true),
            (0o640, false, true),
            (0o604, false, true),
            (0o644, false, true),
            (0o660, false, false),
            (0o602, false, false),
            (0o666, false, false),
        ] {
            set(mode);
            let (secret, trusted) = (read_secret(&path, 9), read_permissions(&path, 9));
            assert_eq!(secret.is_ok(), is_secret, "{mode:o}");
            assert_eq!(trusted.is_ok(), is_trusted, "{mode:o}");
            let advice = format!("{mode:04o}: `chmod");
            for error in [secret.err(), trusted.err()].into_iter().flatten() {
                assert!(error.to_string().contains(&advice), "{error}");
            }
        }
        assert_eq!(
            read_secret(&dir.path().join("none"), 9).unwrap_err().kind(),
            io::ErrorKind::NotFound
        );
    }
}
