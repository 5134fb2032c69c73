//! Opening and reading of input files.

use std::fs::{self, File, FileType, OpenOptions};
use std::io::{self, Read};
use std::os::unix::fs::{FileTypeExt, OpenOptionsExt};
use std::path::Path;

use rustix::fs::OFlags;
use thiserror::Error;

use crate::kind::NotRegular;

/// A file is longer than its use allows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[error("it has more than {0} bytes")]
pub struct TooLong(pub u64);

/// Opens a regular file for reading, without waiting.
///
/// # Errors
/// If it cannot be opened, or is not a regular file ([`NotRegular`]).
pub fn open_input(path: &Path) -> io::Result<File> {
    open_checked(path, |found| Ok(NotRegular::require_regular(found)?))
}

/// Opens a file with the contents of a disk (a regular file or a block device) for reading, without
/// waiting.
///
/// # Errors
/// If it cannot be opened, or is of another kind ([`NotRegular`]).
pub fn open_disk(path: &Path) -> io::Result<File> {
    open_checked(path, |found| match found.is_block_device() {
        true => Ok(()),
        false => Ok(NotRegular::require_regular(found)?),
    })
}

/// Reads a regular file of at most `bytes_max` bytes.
///
/// # Errors
/// If it cannot be read, is not a regular file ([`NotRegular`]), or is longer ([`TooLong`]).
pub fn read_input(path: &Path, bytes_max: u64) -> io::Result<Vec<u8>> {
    read_open(open_input(path)?, bytes_max)
}

pub(crate) fn read_open(file: File, bytes_max: u64) -> io::Result<Vec<u8>> {
    let too_long = || io::Error::new(io::ErrorKind::InvalidData, TooLong(bytes_max));
    // Files of /proc have no length, so the length does not replace the limit below.
    if file.metadata()?.len() > bytes_max {
        return Err(too_long());
    }
    let mut bytes = Vec::new();
    file.take(bytes_max + 1).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > bytes_max { Err(too_long()) } else { Ok(bytes) }
}

/// Reads a regular file of at most `bytes_max` bytes of UTF-8.
///
/// # Errors
/// As [`read_input`], and if it is not UTF-8.
pub fn read_text(path: &Path, bytes_max: u64) -> io::Result<String> {
    let bytes = read_input(path, bytes_max)?;
    String::from_utf8(bytes).map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error))
}

fn open_checked(path: &Path, check: impl Fn(FileType) -> io::Result<()>) -> io::Result<File> {
    // Opening a device may have effects of its own, so its kind is checked first.
    check(fs::metadata(path)?.file_type())?;
    let flags = OFlags::NONBLOCK | OFlags::NOCTTY;
    let file = OpenOptions::new().read(true).custom_flags(flags.bits() as i32).open(path)?;
    check(file.metadata()?.file_type())?;
    Ok(file)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kind::NonRegularKind;
    use rustix::fs::{CWD, Mode};
    use std::os::unix::net::UnixListener;

    #[test]
    fn only_regular_files_are_read() {
        let dir = tempfile::tempdir().unwrap();
        let path = |name: &str| dir.path().join(name);
        rustix::fs::mkfifoat(CWD, path("fifo"), Mode::RUSR).unwrap();
        let _socket = UnixListener::bind(path("socket")).unwrap();
        std::os::unix::fs::symlink("fifo", path("link")).unwrap();
        let cases = [
            (path("fifo"), NonRegularKind::Fifo),
            (path("link"), NonRegularKind::Fifo),
            (path("socket"), NonRegularKind::Socket),
            (dir.path().to_owned(), NonRegularKind::Directory),
            ("/dev/zero".into(), NonRegularKind::CharacterDevice),
        ];
        for (path, kind) in cases {
            for error in [open_input(&path).unwrap_err(), open_disk(&path).unwrap_err()] {
                assert_eq!(NotRegular::find_in(&error), Some(NotRegular(kind)));
            }
        }
        assert_eq!(open_input(&path("none")).unwrap_err().kind(), io::ErrorKind::NotFound);
    }

    #[test]
    fn long_files_are_refused() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("text");
        fs::write(&path, "12345").unwrap();
        assert_eq!(read_text(&path, 5).unwrap(), "12345");
        let error = read_input(&path, 4).unwrap_err();
        assert_eq!(error.to_string(), "it has more than 4 bytes");
        assert!(read_input(Path::new("/proc/self/status"), 4).is_err());
        fs::write(&path, [0xff]).unwrap();
        assert_eq!(read_text(&path, 5).unwrap_err().kind(), io::ErrorKind::InvalidData);
    }
}
