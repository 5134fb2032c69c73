//! Files that a user, an image or a configuration names: which of them Firn reads and writes.
//!
//! ```text
//!                     input                   disk             output
//!   regular file      read                    read             replaced when the new one is whole
//!   nothing           error                   error            created
//!   symbolic link     what it points to       the same         the link is replaced, its target stays as it is
//!   block device      error                   read             error
//!   anything else     error, without a wait   the same         error, before anything is written
//! ```
//!
//! A path names what its owner put there: a FIFO makes `open(2)` wait for a writer, `rename(2)` replaces a device by a
//! regular file, and opening some devices has effects of its own. So the kind of file is checked before it is opened, and
//! once more afterwards, when no other file can have taken its place.

#![forbid(unsafe_code)]

mod input;
mod kind;
mod output;

pub use input::{TooLong, open_disk, open_input, read_input, read_text};
pub use kind::{FileKind, NotRegular};
pub use output::{OutputError, check_output, create_output, replace_output, replace_private};
