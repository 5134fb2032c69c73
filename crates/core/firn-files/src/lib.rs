//! The rules by which Firn opens files that a user, an image or a configuration names.
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
//! The owner of a path decides what it names. A FIFO makes `open(2)` wait for a writer, `rename(2)`
//! replaces a device with a regular file, and opening some devices has side effects. So this crate
//! checks the kind of a file before it opens it, and once more on the open descriptor, when no
//! other file can replace it.

#![forbid(unsafe_code)]

mod input;
mod kind;
mod mode;
mod output;

pub use input::{TooLong, open_disk, open_input, read_input, read_text};
pub use kind::{NonRegularKind, NotRegular};
pub use mode::{ExposedFile, read_permissions, read_secret};
pub use output::{OutputError, check_output, create_output, replace_output, replace_private};
