//! Codecs: the compression methods for memory blocks.
//!
//! Every memory block is compressed on its own (Halite, section 6), so that a fault decompresses
//! one block and not a whole locality block. A block that does not shrink is stored uncompressed; a
//! block of zeros is not stored at all. The codec that was used is recorded per block, so an image
//! may mix them. `docs/design/001-codec.md` has the measurements behind the default.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};
use thiserror::Error;

/// The level of zstd unless one is given.
pub const ZSTD_LEVEL_DEFAULT: i8 = 1;

/// The level of zlib unless one is given.
pub const ZLIB_LEVEL_DEFAULT: u8 = 1;

/// The compression method of memory blocks. Written `none`, `lz4`, `zstd`, `zstd:3`, `zlib`,
/// `zlib:6`.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum Codec {
    /// No compression.
    None,
    /// LZ4, one block format stream per memory block.
    #[default]
    Lz4,
    /// Zstandard, one frame per memory block.
    Zstd {
        /// From -7 (fast) to 19 (small).
        level: i8,
    },
    /// Deflate, as in zlib but without its header and checksum.
    Zlib {
        /// From 1 (fast) to 9 (small).
        level: u8,
    },
}

/// A word that names no codec.
#[derive(Debug, Error, PartialEq, Eq)]
#[error(
    "{0:?} is no codec; there are none, lz4, zstd[:LEVEL] (from -7 to 19) and zlib[:LEVEL] (from 1 to 9)"
)]
pub struct CodecError(String);

impl FromStr for Codec {
    type Err = CodecError;

    fn from_str(word: &str) -> Result<Self, CodecError> {
        let (name, level) = match word.split_once(':') {
            Some((name, level)) => (name, Some(level)),
            None => (word, None),
        };
        Self::from_name(name, level).ok_or_else(|| CodecError(word.to_owned()))
    }
}

impl Codec {
    fn from_name(name: &str, level: Option<&str>) -> Option<Self> {
        match (name, level) {
            ("none", None) => Some(Self::None),
            ("lz4", None) => Some(Self::Lz4),
            ("zstd", None) => Some(Self::Zstd { level: ZSTD_LEVEL_DEFAULT }),
            ("zlib", None) => Some(Self::Zlib { level: ZLIB_LEVEL_DEFAULT }),
            ("zstd", Some(level)) => {
                let level = level.parse().ok().filter(|level| (-7..=19).contains(level))?;
                Some(Self::Zstd { level })
            }
            ("zlib", Some(level)) => {
                let level = level.parse().ok().filter(|level| (1..=9).contains(level))?;
                Some(Self::Zlib { level })
            }
            _ => None,
        }
    }
}

impl fmt::Display for Codec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::None => f.write_str("none"),
            Self::Lz4 => f.write_str("lz4"),
            Self::Zstd { level } => write!(f, "zstd:{level}"),
            Self::Zlib { level } => write!(f, "zlib:{level}"),
        }
    }
}

impl TryFrom<String> for Codec {
    type Error = CodecError;

    fn try_from(word: String) -> Result<Self, CodecError> {
        word.parse()
    }
}

impl From<Codec> for String {
    fn from(codec: Codec) -> String {
        codec.to_string()
    }
}

/// The form in which one memory block is stored in the image.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[repr(u8)]
pub enum StoredAs {
    /// Uncompressed.
    Raw = 0,
    /// In LZ4's block format.
    Lz4 = 1,
    /// As one Zstandard frame.
    Zstd = 2,
    /// As a raw deflate stream.
    Deflate = 3,
}

impl StoredAs {
    pub(crate) fn from_code(code: u8) -> Option<Self> {
        [Self::Raw, Self::Lz4, Self::Zstd, Self::Deflate].into_iter().find(|it| *it as u8 == code)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_and_codecs_are_inverse() {
        for name in ["none", "lz4", "zstd:1", "zstd:-7", "zlib:1", "zlib:9"] {
            let codec: Codec = name.parse().unwrap();
            assert_eq!(codec.to_string(), name);
            let json = serde_json::to_string(&codec).unwrap();
            assert_eq!(serde_json::from_str::<Codec>(&json).unwrap(), codec);
        }
        for bad in ["", "lz5", "lz4:1", "zstd:20", "zlib:0", "zstd:", "none:1"] {
            assert!(bad.parse::<Codec>().is_err(), "{bad:?}");
        }
    }
}
