//! Reading of qcow2 headers, as far as Firn needs them before it builds on a file.
//!
//! ```text
//!    0  "QFI\xfb"                             16  length of that name         u32
//!    4  version  u32                          32  encryption                  u32, 0: none
//!    8  offset of the backing file name       72  incompatible features       u64, version 3; bit 2: data in another file
//!       u64, 0: no backing file              100  bytes of the header         u32, version 3; else 72
//!
//!   after the header: { kind u32, length u32, data, padded to 8 }, until kind 0; 0xE2792ACA is the backing file's format
//! ```
//!
//! All numbers are big-endian.
//!
//! Source: QEMU `docs/interop/qcow2.txt`.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

const MAGIC: &[u8; 4] = b"QFI\xfb";
const HEAD_BYTES: usize = 104;
/// The length of the header in version 2.
const HEAD_BYTES_2: u64 = 72;
const BELOW_FORMAT: u32 = 0xE279_2ACA;
/// Maximum number of header extensions that are read.
const EXTENSIONS_MAX: usize = 32;
/// The maximum length of a backing file name.
const NAME_BYTES_MAX: u32 = 1023;
const DATA_FILE: u64 = 1 << 2;

/// The properties of a qcow2 file that its header records.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Qcow2Header {
    /// The backing file as the header names it; absolute if that is a path.
    pub(crate) backing_file: Option<PathBuf>,
    /// The format of the backing file, if the header records it.
    pub(crate) backing_format: Option<String>,
    /// Its contents can't be read without a secret.
    pub(crate) is_encrypted: bool,
    /// Its contents are in another file.
    pub(crate) has_data_file: bool,
}

/// Reads the header of a file. `None` if it is not a qcow2 file.
pub(crate) fn read_header(path: &Path) -> io::Result<Option<Qcow2Header>> {
    let file = firn_files::open_disk(path)?;
    let mut head = [0; HEAD_BYTES];
    match file.read_exact_at(&mut head, 0) {
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Ok(None),
        read => read?,
    }
    if head[..4] != *MAGIC {
        return Ok(None);
    }
    let (version, encryption) = (u32_at(&head, 4), u32_at(&head, 32));
    let features = if version >= 3 { u64_at(&head, 72) } else { 0 };
    let below = match (u64_at(&head, 8), u32_at(&head, 16)) {
        (0, _) | (_, 0) => None,
        (_, len) if len > NAME_BYTES_MAX => return Err(io::ErrorKind::InvalidData.into()),
        (offset, len) => {
            let mut name = vec![0; len as usize];
            file.read_exact_at(&mut name, offset)?;
            let name = String::from_utf8_lossy(&name).into_owned();
            let name = name.strip_prefix("file:").unwrap_or(&name);
            let is_path = name.split('/').next().is_some_and(|first| !first.contains(':'));
            let dir = path.parent().filter(|_| is_path).unwrap_or(Path::new(""));
            Some(dir.join(name))
        }
    };
    let start = if version >= 3 { u64::from(u32_at(&head, 100)) } else { HEAD_BYTES_2 };
    let below_format = match below {
        Some(_) => read_backing_format(&file, start..u64_at(&head, 8)).or_else(ignore_early_end)?,
        None => None,
    };
    Ok(Some(Qcow2Header {
        backing_file: below,
        backing_format: below_format,
        is_encrypted: encryption != 0,
        has_data_file: features & DATA_FILE != 0,
    }))
}

/// A file that ends early has no more extensions.
fn ignore_early_end(error: io::Error) -> io::Result<Option<String>> {
    match error.kind() {
        io::ErrorKind::UnexpectedEof => Ok(None),
        _ => Err(error),
    }
}

/// Reads the header extension with the backing format, of those in a range.
fn read_backing_format(file: &File, range: Range<u64>) -> io::Result<Option<String>> {
    let (mut at, mut extension) = (range.start, [0; HEAD_BYTES]);
    for _ in 0..EXTENSIONS_MAX {
        if at + 8 > range.end {
            break;
        }
        file.read_exact_at(&mut extension[..8], at)?;
        let (kind, len) = (u32_at(&extension, 0), u32_at(&extension, 4));
        match (kind, len as usize) {
            (0, _) => break,
            (BELOW_FORMAT, len @ ..HEAD_BYTES) => {
                file.read_exact_at(&mut extension[..len], at + 8)?;
                return Ok(Some(String::from_utf8_lossy(&extension[..len]).into_owned()));
            }
            _ => at += 8 + u64::from(len).next_multiple_of(8),
        }
    }
    Ok(None)
}

fn u32_at(bytes: &[u8; HEAD_BYTES], at: usize) -> u32 {
    bytes[at..at + 4].iter().fold(0, |number, &byte| number << 8 | u32::from(byte))
}

fn u64_at(bytes: &[u8; HEAD_BYTES], at: usize) -> u64 {
    u64::from(u32_at(bytes, at)) << 32 | u64::from(u32_at(bytes, at + 4))
}

/// The backing file that a qcow2 file names; `None` if it names none, or is not a qcow2 file.
pub fn read_backing_file(path: &Path) -> io::Result<Option<PathBuf>> {
    Ok(read_header(path)?.and_then(|head| head.backing_file))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn write(path: &Path, below: &str, encryption: u8, features: u8) {
        let mut bytes = vec![0; 300];
        bytes[..4].copy_from_slice(MAGIC);
        (bytes[7], bytes[103]) = (3, 104);
        // An extension of another kind, of 3 bytes, before the one of 5.
        bytes[104..115].copy_from_slice(b"\x01\x02\x03\x04\0\0\0\x03abc");
        bytes[120..133].copy_from_slice(b"\xe2\x79\x2a\xca\0\0\0\x05qcow2");
        bytes[35] = encryption;
        bytes[79] = features;
        if !below.is_empty() {
            (bytes[15], bytes[19]) = (200, below.len() as u8);
            bytes[200..200 + below.len()].copy_from_slice(below.as_bytes());
        }
        std::fs::write(path, bytes).unwrap();
    }

    #[test]
    fn a_header_names_its_backing_file() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a");
        let expected = |below: Option<PathBuf>, is_encrypted, has_data_file| {
            let below_format = below.as_ref().map(|_| "qcow2".to_owned());
            let expected = Qcow2Header {
                backing_file: below,
                backing_format: below_format,
                is_encrypted,
                has_data_file,
            };
            assert_eq!(read_header(&path).unwrap(), Some(expected));
        };
        write(&path, "", 0, 0);
        expected(None, false, false);
        write(&path, "b.img", 2, 0);
        expected(Some(dir.path().join("b.img")), true, false);
        write(&path, "/x/b.img", 0, 4);
        expected(Some("/x/b.img".into()), false, true);
        write(&path, "nbd:b.img", 0, 0);
        expected(Some("nbd:b.img".into()), false, false);
        for other in ["", "short", &"x".repeat(500)] {
            std::fs::write(&path, other).unwrap();
            assert_eq!(read_header(&path).unwrap(), None);
        }
        assert!(read_header(&dir.path().join("none")).is_err());
    }
}
