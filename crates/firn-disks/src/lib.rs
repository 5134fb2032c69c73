//! The writable disks of a VM that is protected: they go back with its memory.
//!
//! ```text
//!   primary                                                                 standby
//!     QEMU  -- NBD, Unix socket -->  server                                   Standby
//!                                      | each change: to the file, and         |  epochs kept apart until they are committed,
//!                                      v noted, under one lock                 v  then folded
//!                                    Disk ---- the log of an epoch ------->  its own copy of the file
//!                                      |        (wire)
//!                                      v
//!                                    the user's file
//! ```
//!
//! The guest writes to the user's file at once. While the VM is protected the same changes are noted in the *log* of the running
//! epoch. At the cut, with the VM standing still and nothing on its way, the log is closed and travels with the epoch's pages. The
//! standby's file is always that of its newest folded epoch; logs of later epochs are kept beside it, and dropped at a failover.
//!
//! | module | what it decides or does |
//! |---|---|
//! | [`change`] | one change of a disk's bytes (pure) |
//! | [`primary`] | what is noted, and when there is room for more (pure) |
//! | [`standby`] | what is kept, folded, dropped (pure) |
//! | [`wire`] | changes as bytes (pure) |
//! | [`store`] | where the bytes are: a file |
//! | [`disk`] | a file and its log, changed together |
//! | [`nbd`] | serving disks to QEMU |
//!
//! # What a caller does
//!
//! ```text
//!   protect(bound)
//!   seed(), until it is whole and memory is too     copied while the VM runs: each result goes out as epoch 0
//!   drain()                                         when the VM has been told to stop
//!     (the VM stands still)
//!   cut()                                           the log of epoch 1; then 2, 3 ...
//!     (the VM runs)
//!   release()                                       the standby is gone: nothing is noted any more
//! ```
//!
//! Why `drain`: a log is bounded, and a change for which there is no room waits. But a hypervisor that is told to stop first waits
//! for the requests on their way. Without the bound being lifted they would wait for each other. What a log may then have beyond
//! its bound is what the guest's queues hold.

#![forbid(unsafe_code)]

pub mod change;
pub mod disk;
pub mod nbd;
pub mod primary;
pub mod standby;
pub mod store;
pub mod wire;

#[cfg(test)]
mod tests;

pub use change::Change;
pub use disk::{Disk, DiskError, Pressure, Seed};
pub use primary::Log;
pub use standby::Standby;
pub use store::{FileId, FileStore, Store};
