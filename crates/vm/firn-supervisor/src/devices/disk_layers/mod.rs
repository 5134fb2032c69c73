//! The layers of disks: a record of the files, the images and VMs that need each, and the newest
//! one.
//!
//! A checkpoint freezes the file of a disk for its image, and the VM continues on an overlay over
//! it, a *layer*. A record beside the files lists this, so that it outlives the VM, its supervisor
//! and the host's next boot:
//!
//! ```text
//!   /vms/.firn-disks.json                              written to a new file, synced, renamed; changed under a lock
//!     layers   d.qcow2.web-2 on d.qcow2.web-1, of VM web        web-1 on d.qcow2, of VM web
//!     images   b.firn needs d.qcow2.web-1              a.firn needs d.qcow2
//!     merges   running merges, and their processes
//!     changed  d.qcow2.web-0 with its identity then  ->  contents are in d.qcow2 now, with its new identity
//! ```
//!
//! Its readers:
//!
//! | reader | question |
//! |---|---|
//! | `firn run`, `firn attach` | is the named file an old state of the disk? |
//! | `firn restore` | which files have the contents of the image's disks now? |
//! | merging, `firn disk commit` | which layers are not needed? |
//! | `firn image rm` | which files does only this image need? |
//!
//! A file that the record names before it exists, or that is missing, is ignored. So Firn makes a
//! layer first, then records it, and uses it last. It records an image before the image has its
//! name. It removes a merged file after the record names the file that has the contents now.

mod command;
mod commit;
mod merge;
mod newer;
mod plan;
mod queries;
mod record;
mod record_files;
mod record_owner;
mod register;
mod remove;
mod resolve;
mod settle;
mod store;

pub(crate) use command::restart_command_line;
pub(crate) use merge::{LayerMerger, end_merges};
pub(crate) use newer::{WantedDisk, check_old_disks};
pub(crate) use queries::{describe_needs, intermediate_copy_bytes, must_cover_partial_merge};
pub use register::record_copy;
pub(crate) use register::{forget_save, record_save};
pub use remove::{RemovedImage, remove_images};
pub(crate) use resolve::LockedLayers;
pub use resolve::resolve_current_disks;
