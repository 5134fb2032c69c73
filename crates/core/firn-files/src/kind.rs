//! Kinds of files that are not regular, and the error for such a file.

use std::fmt;
use std::fs::FileType;
use std::io;
use std::os::unix::fs::FileTypeExt;

use thiserror::Error;

/// The kind of a file that is not regular.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NonRegularKind {
    /// A directory.
    Directory,
    /// A named pipe.
    Fifo,
    /// A Unix socket.
    Socket,
    /// A block device.
    BlockDevice,
    /// A symbolic link, where links are not followed.
    Link,
    /// A character device, such as a terminal or `/dev/null`.
    CharacterDevice,
    /// A kind that this program does not know.
    Unknown,
}

impl NonRegularKind {
    /// The kind of a file of this type, or `None` if it is a regular file.
    pub(crate) fn from_file_type(found: FileType) -> Option<Self> {
        match found {
            it if it.is_file() => None,
            it if it.is_dir() => Some(Self::Directory),
            it if it.is_symlink() => Some(Self::Link),
            it if it.is_fifo() => Some(Self::Fifo),
            it if it.is_socket() => Some(Self::Socket),
            it if it.is_block_device() => Some(Self::BlockDevice),
            it if it.is_char_device() => Some(Self::CharacterDevice),
            _ => Some(Self::Unknown),
        }
    }
}

impl fmt::Display for NonRegularKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Directory => "a directory",
            Self::Fifo => "a FIFO",
            Self::Link => "a symbolic link",
            Self::Socket => "a socket",
            Self::BlockDevice => "a block device",
            Self::CharacterDevice => "a character device",
            Self::Unknown => "a file of an unknown kind",
        })
    }
}

/// A path names something other than a regular file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[error("it is {0}, not a regular file")]
pub struct NotRegular(pub NonRegularKind);

impl NotRegular {
    /// Requires that a file is regular.
    ///
    /// # Errors
    /// [`NotRegular`] if it is of another kind.
    pub fn require_regular(found: FileType) -> Result<(), Self> {
        NonRegularKind::from_file_type(found).map_or(Ok(()), |kind| Err(Self(kind)))
    }

    /// The [`NotRegular`] inside an error of this crate, if there is one.
    pub fn find_in(error: &io::Error) -> Option<Self> {
        error.get_ref()?.downcast_ref().copied()
    }
}

impl From<NotRegular> for io::Error {
    fn from(error: NotRegular) -> Self {
        Self::new(io::ErrorKind::InvalidInput, error)
    }
}
