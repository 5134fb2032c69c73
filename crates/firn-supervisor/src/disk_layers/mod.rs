//! The layers of disks: which files they are, which images and VMs need each, and which one is the newest.
//!
//! A checkpoint freezes the file of a disk for its image, and the VM continues on an overlay over it, a *layer*. A record
//! beside the files lists this, so that it outlives the VM, its supervisor and the host's next boot:
//!
//! ```text
//!   /vms/.firn-disks.json                              written to a new file, synced, renamed; changed under a lock
//!     layers   d.qcow2.web-2 on d.qcow2.web-1, of VM web        web-1 on d.qcow2, of VM web
//!     images   b.firn needs d.qcow2.web-1              a.firn needs d.qcow2
//!     merges   what is being merged now, and by which process
//!     changed  d.qcow2.web-0 as it was then  ->  is in d.qcow2 now, which is as it is since
//! ```
//!
//! Its readers:
//!
//! | reader | question |
//! |---|---|
//! | `firn run`, `firn attach` | is the named file an old state of the disk? |
//! | `firn restore` | where are the image's disks now? |
//! | merging, `firn disk commit` | which layers does nothing need? |
//! | `firn image rm` | which files does only this image need? |
//!
//! A file that is named in the record before it exists, or that is missing, counts for nothing. So a layer is made first, then
//! noted, and used last; an image is noted before it has its name; and a merged file is removed after the record says where its
//! contents are.

mod command;
mod commit;
mod merge;
mod newer;
mod plan;
mod queries;
mod record;
mod register;
mod remove;
mod resolve;
mod settle;
mod store;

use std::ffi::OsStr;
use std::path::{Path, PathBuf};

pub(crate) use command::command_line;
pub(crate) use merge::{Merging, end_merges};
pub(crate) use newer::{Wanted, check};
pub(crate) use queries::{covers_partial, needed_by};
pub use register::note_copy;
pub(crate) use register::{forget_save, note_save};
pub use remove::{Removed, remove_images};
pub(crate) use resolve::Held;
pub use resolve::disks_now;

/// The path that a file has in records, whatever links lead to it. The file itself may be gone.
fn key(file: &Path) -> PathBuf {
    if let Ok(path) = std::fs::canonicalize(file) {
        return path;
    }
    let dir = file.parent().and_then(|dir| std::fs::canonicalize(dir).ok());
    dir.map_or_else(|| file.to_owned(), |dir| dir.join(file.file_name().unwrap_or(OsStr::new(""))))
}

/// The directory whose record a file is in. The file is given by its key.
fn dir_of(file: &Path) -> &Path {
    file.parent().unwrap_or(Path::new("/"))
}
