//! Small files beside an image, which go with it: its signature and its learned blocks.

use std::path::{Path, PathBuf};

/// The suffix of a signature.
pub(crate) const SIGNATURE_SUFFIX: &str = ".sig";

/// The maximum length of a signature in bytes.
pub(crate) const SIGNATURE_BYTES_MAX: u64 = 64 << 10;

/// The suffix of the blocks that restores of an image have learned.
pub(crate) const LEARNED_SUFFIX: &str = ".learned";

/// The maximum length of a file of learned blocks in bytes.
pub(crate) const LEARNED_BYTES_MAX: u64 = 1 << 20;

/// All suffixes.
pub(crate) const SIDE_SUFFIXES: [&str; 2] = [SIGNATURE_SUFFIX, LEARNED_SUFFIX];

/// The file beside an image that has this suffix.
pub(crate) fn side_path(image: &Path, suffix: &str) -> PathBuf {
    let mut name = image.as_os_str().to_owned();
    name.push(suffix);
    name.into()
}
