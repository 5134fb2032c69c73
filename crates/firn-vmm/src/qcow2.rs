//! What a qcow2 file says of itself, as far as Firn has to know before it builds on one.
//!
//! ```text
//!    0  "QFI\xfb"                       16  length of that name         u32      32  encryption  u32, 0: none
//!    4  version  u32                    72  incompatible features       u64, version 3; bit 2: data in another file
//!    8  where the name of what lies below it is   u64, 0: nothing       all numbers big-endian
//! ```
//!
//! Source: QEMU `docs/interop/qcow2.txt`.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

const MAGIC: &[u8; 4] = b"QFI\xfb";
const HEAD_BYTES: usize = 80;
/// The longest name of what lies below.
const NAME_BYTES_MAX: u32 = 1023;
const DATA_FILE: u64 = 1 << 2;

/// What a qcow2 file says of itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Head {
    /// The image below it, as it is named there, absolute if that is a path.
    pub(crate) below: Option<PathBuf>,
    /// Its contents can't be read without a secret.
    pub(crate) is_encrypted: bool,
    /// Its contents are in another file.
    pub(crate) has_data_file: bool,
}

/// Reads the head of a file. `None` if it is no qcow2 file.
pub(crate) fn head(path: &Path) -> io::Result<Option<Head>> {
    let file = File::open(path)?;
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
            Some(path.parent().unwrap_or(Path::new("/")).join(name))
        }
    };
    Ok(Some(Head {
        below,
        is_encrypted: encryption != 0,
        has_data_file: features & DATA_FILE != 0,
    }))
}

fn u32_at(bytes: &[u8; HEAD_BYTES], at: usize) -> u32 {
    bytes[at..at + 4].iter().fold(0, |number, &byte| number << 8 | u32::from(byte))
}

fn u64_at(bytes: &[u8; HEAD_BYTES], at: usize) -> u64 {
    u64::from(u32_at(bytes, at)) << 32 | u64::from(u32_at(bytes, at + 4))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn write(path: &Path, below: &str, encryption: u8, features: u8) {
        let mut bytes = vec![0; 200];
        bytes[..4].copy_from_slice(MAGIC);
        bytes[7] = 3;
        bytes[35] = encryption;
        bytes[79] = features;
        if !below.is_empty() {
            (bytes[15], bytes[19]) = (100, below.len() as u8);
            bytes[100..100 + below.len()].copy_from_slice(below.as_bytes());
        }
        std::fs::write(path, bytes).unwrap();
    }

    #[test]
    fn a_head_says_what_lies_below() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a");
        let expected = |below: Option<PathBuf>, is_encrypted, has_data_file| {
            assert_eq!(head(&path).unwrap(), Some(Head { below, is_encrypted, has_data_file }));
        };
        write(&path, "", 0, 0);
        expected(None, false, false);
        write(&path, "b.img", 2, 0);
        expected(Some(dir.path().join("b.img")), true, false);
        write(&path, "/x/b.img", 0, 4);
        expected(Some("/x/b.img".into()), false, true);
        for other in ["", "short", &"x".repeat(500)] {
            std::fs::write(&path, other).unwrap();
            assert_eq!(head(&path).unwrap(), None);
        }
        assert!(head(&dir.path().join("none")).is_err());
    }
}
